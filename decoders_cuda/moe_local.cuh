// Expert ids of routes: of the whole layer, and of the experts on this GPU. Macro ID_BYTES: 4 or 8.
#pragma once

#include "ptx.cuh"

namespace wc {
namespace moe {

#if ID_BYTES == 8
using RouteId = long long;
#else
using RouteId = int;
#endif

// Local expert of a global one: a table where the local experts are not consecutive, else an offset. −1: not here.
WC_DEVICE int local_expert(RouteId id, const int* table, u32 first, u32 experts, u32 all_experts) {
    if (table != nullptr) {
        return static_cast<u64>(id) < all_experts ? table[id] : -1;
    }
    const u64 local = static_cast<u64>(id) - first;
    return local < experts ? static_cast<int>(local) : -1;
}

}  // namespace moe
}  // namespace wc
