"""Where the time of a wgmma product goes: %globaltimer stamps per CTA, drawn as a PNG, and parts left out.

``python -m bench.gemm_timeline --shape 8192x4096 -m 128 [--split 2 …] [--png timeline.png] [--ablate]``.
The clock ticks every 256 ns on the H200 measured: single stamps are coarse, means over CTAs are not.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

STAMPS = ("start", "issued", "first stage", "loop end", "posted", "collected", "end", "sm")
_TIMES = len(STAMPS) - 1
#: Phases of a consumer in the order of its stamps, and the colours they are drawn in.
PHASES = (
    ("first data", "start", "first stage", "#c7c7c7"),
    ("products", "first stage", "loop end", "#4c78a8"),
    ("exchange", "loop end", "collected", "#e45756"),
    ("epilogue", "collected", "end", "#72b7b2"),
)
ABLATIONS = {
    "all": 0,
    "no decode": 1,
    "no MMA": 2,
    "no token copies": 4,
    "no weight copies": 8,
    "no copies": 12,
    "MMA and handshakes": 13,
    "nothing": 15,
}


@dataclass(frozen=True)
class Timeline:
    """Stamps of one launch in µs after the first CTA's start, shape (CTAs, 7); NaN where a CTA has none."""

    times: npt.NDArray[np.float64]
    sm: npt.NDArray[np.int64]

    @classmethod
    def of(cls, stamps: npt.NDArray[np.int64]) -> Timeline:
        """Read what the kernel wrote: 8 words per CTA, nanoseconds, the SM last, zero where not reached."""
        words = stamps.reshape(-1, len(STAMPS))
        times = np.where(words[:, :_TIMES] == 0, np.nan, words[:, :_TIMES].astype(np.float64))
        return cls((times - times[:, 0].min()) / 1e3, words[:, _TIMES])

    def at(self, name: str) -> npt.NDArray[np.float64]:
        """One stamp of every CTA; without an exchange, that of the end of the loop stands for it."""
        found = self.times[:, STAMPS.index(name)]
        if name in ("posted", "collected"):
            found = np.where(np.isnan(found), self.at("loop end"), found)
        return found

    def summary(self) -> str:
        """First, mean and last of every stamp."""
        values = [(name, self.times[:, i]) for i, name in enumerate(STAMPS[:_TIMES])]
        return "  ".join(
            f"{name} {np.nanmin(v):.2f}/{np.nanmean(v):.2f}/{np.nanmax(v):.2f}"
            for name, v in values
            if not np.isnan(v).all()
        )

    def draw(self, path: Path, title: str) -> None:
        """Draw one bar per CTA, coloured by phase."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(11, 7), layout="constrained")
        rows = np.arange(len(self.times))
        for label, begin, end, colour in PHASES:
            left = self.at(begin)
            axes.barh(rows, self.at(end) - left, left=left, height=1.0, color=colour, label=label)
        axes.set(xlabel="µs after the first CTA's start", ylabel="CTA", title=title)
        axes.invert_yaxis()
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


class Bench:
    """One product on the GPU: the packed matrix, tokens, workspace."""

    def __init__(self, n: int, k: int, m: int, repeats: int) -> None:
        import torch

        from bench.harness import Session
        from wcodec.kernels.gemm import Bricks
        from wcodec.kernels.pack import pack
        from wcodec.packed import PackedTensor

        self.session = Session(repeats)
        self.m, self.n, self.k = m, n, k
        self.weight = (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
        self.x = torch.randn(m, k, device="cuda").bfloat16()
        self.out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self.blob = pack(self.weight)
        packed = PackedTensor.from_blob(self.blob.cpu().numpy())
        self.bricks = Bricks.of(packed, self.blob.data_ptr())
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count

    def capture(self, config: Any, **extra: Any) -> tuple[Any, Any]:
        """Capture one instance; return the graph and where it puts its stamps."""
        import torch

        from wcodec.kernels.gemm import Gemm

        run = Gemm(config, self.bricks, self.m, 0, self.processors, **extra)
        ctas = config.grid(self.n, self.k, self.m, self.processors)
        stamps = torch.zeros(ctas * len(STAMPS), dtype=torch.int64, device="cuda")
        nbytes = config.partial_bytes(self.n, self.k, self.m, self.processors)
        partials = torch.zeros(max(nbytes, 16), dtype=torch.uint8, device="cuda")

        def launch() -> Any:
            run(
                self.session.stream(),
                self.x.data_ptr(),
                self.k,
                self.out.data_ptr(),
                self.n,
                partials=partials.data_ptr(),
                stamps=stamps.data_ptr(),
            )
            return partials, stamps  # kept alive with the graph

        return self.session.capture(launch), stamps

    def timeline(self, config: Any) -> Timeline:
        """Stamp a few cold launches and return the last."""
        graph, stamps = self.capture(config, WC_TIMELINE=1)
        self.session.times([graph], 5)
        return Timeline.of(stamps.cpu().numpy())

    def ablate(self, config: Any) -> dict[str, float]:
        """Raw µs of cuBLAS and of the kernel with parts switched off."""
        import torch.nn.functional as functional

        graphs = {"cuBLAS": self.session.capture(lambda: functional.linear(self.x, self.weight))}
        for name, bits in ABLATIONS.items():
            graphs[name] = self.capture(config, WC_ABLATE=bits)[0]
        medians = np.median(self.session.times(list(graphs.values())), axis=1)
        return dict(zip(graphs, map(float, medians), strict=True))


def main() -> None:
    """Print the stamps and, if asked, the ablation; draw the timeline."""
    from wcodec.cuda.device import device_info
    from wcodec.kernels.gemm import GemmConfig
    from wcodec.kernels.gemm_rule import default_config

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8192x4096", help="N x K")
    parser.add_argument("-m", type=int, default=128, help="tokens")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--ablate", action="store_true")
    names = [field.name for field in fields(GemmConfig) if field.type == "int"]
    for name in names:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, dest=f"set_{name}", help="of the instance"
        )
    switches = ("cluster", "pair")
    for name in switches:
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, dest=f"set_{name}")
    args = parser.parse_args()
    n, k = map(int, args.shape.split("x"))
    given = {name: getattr(args, f"set_{name}") for name in (*names, *switches)}
    changes = {name: value for name, value in given.items() if value is not None}
    config = replace(default_config(n, k, args.m, device_info(0)), **changes)
    bench = Bench(n, k, args.m, args.repeats)
    timeline = bench.timeline(config)
    print(config)
    print(timeline.summary())
    if args.png:
        timeline.draw(args.png, f"{n} × {k}, {args.m} tokens, split {config.split}")
    if args.ablate:
        found = bench.ablate(config)
        print(
            f"empty {bench.session.empty:.1f} " + " ".join(f"| {name} {us:.1f}" for name, us in found.items())
        )


if __name__ == "__main__":
    main()
