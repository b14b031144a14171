"""What a file or directory holds, from its headers alone."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wcodec.container.manifest import MANIFEST_NAME, Manifest
from wcodec.container.packedfile import PackedFile
from wcodec.container.record import RECORD_NAME
from wcodec.dtypes import DTYPES, numel
from wcodec.errors import MalformedError, UnsupportedError
from wcodec.formats import by_code
from wcodec.packed import ALIGNMENT_BYTES, TAIL_BYTES, Footer, PackedTensor
from wcodec.readers import TensorInfo, open_source
from wcodec.readers.remote import is_address

SCHEMA = "wcodec.info/1"


@dataclass(frozen=True)
class TensorFacts:
    """One tensor.

    Attributes
    ----------
    name : str
    file : str
        Name of the file, relative to what was asked about.
    format : str
        Id of the packed format; ``"raw"`` for a tensor that is in the file as it is.
    dtype : str
        Of the original, by its safetensors name.
    shape : tuple of int
        Logical shape.
    nbytes, stored_bytes : int
        Bytes of the original, and in the file.
    digest : bytes, optional
        xxh3-128 of the original bytes, where the file records it.
    within : str, optional
        Name of the tensor in whose blob it is stored, where that is another.
    logical : int, optional
        Weights, where elements hold several.
    """

    name: str
    file: str
    format: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stored_bytes: int
    digest: bytes | None
    within: str | None = None
    logical: int | None = None

    @property
    def numel(self) -> int:
        """Number of weights."""
        return numel(self.shape)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight; NaN for tensors that are empty, in another's blob, or of opaque types."""
        weights = self.numel if self.logical is None else self.logical
        counts = weights and self.dtype in DTYPES and self.within is None
        return 8 * self.stored_bytes / weights if counts else math.nan


@dataclass(frozen=True)
class SourceFacts:
    """The original of one packed file."""

    file: str
    nbytes: int
    digest: bytes
    tool: str


@dataclass(frozen=True)
class Description:
    """What `describe` found.

    Attributes
    ----------
    path : str
        As it was given.
    kind : str
        Such as ``"packed file"``, ``"packed directory"`` or ``"safetensors"``.
    tensors : list of TensorFacts
    sources : list of SourceFacts
        One per packed file.
    """

    path: str
    kind: str
    tensors: list[TensorFacts]
    sources: list[SourceFacts]

    @property
    def packed(self) -> bool:
        """Whether anything in it is packed."""
        return bool(self.sources) or any(tensor.format != "raw" for tensor in self.tensors)

    @property
    def totals(self) -> dict[str, Any]:
        """Sums over all tensors."""
        nbytes = sum(t.nbytes for t in self.tensors)
        stored = sum(t.stored_bytes for t in self.tensors)
        return {
            "tensors": len(self.tensors),
            "packed_tensors": sum(t.format != "raw" for t in self.tensors),
            "weights": sum(t.numel for t in self.tensors),
            "bytes": nbytes,
            "stored_bytes": stored,
            "ratio": stored / nbytes if nbytes else None,
        }

    def to_json(self) -> dict[str, Any]:
        """The description as JSON-ready values; the schema is ``wcodec.info/1``."""
        return {
            "schema": SCHEMA,
            "path": self.path,
            "kind": self.kind,
            "sources": [
                {"file": s.file, "bytes": s.nbytes, "xxh3_128": s.digest.hex(), "tool": s.tool}
                for s in self.sources
            ],
            "tensors": [_tensor_json(t) for t in self.tensors],
            "totals": self.totals,
        }


def describe(path: str | os.PathLike[str]) -> Description:
    """Say what a file or directory holds, without decoding anything.

    Parameters
    ----------
    path : path-like
        A packed file or directory, or anything that `wcodec.readers.open_source` reads; packed ones on this
        machine only.

    Raises
    ------
    WCodecError
        If it cannot be read or contradicts itself.
    """
    name, here = os.fspath(path), not is_address(path)
    place = Path(path)
    if here and place.is_dir() and (place / MANIFEST_NAME).exists():
        shards = [shard for shard, facts in Manifest.read(place).files.items() if facts.kind == "packed"]
        return _packed(name, "packed directory", {shard: PackedFile(place / shard) for shard in shards})
    with open_source(path) as source:
        if source.kind == "safetensors" and RECORD_NAME in {t.name for t in source.tensors}:
            if here and place.is_file():
                return _packed(name, "packed file", {place.name: PackedFile(place)})
            if not here:
                raise UnsupportedError(
                    "is packed, and blobs elsewhere are not read", file=name, mend="download it first"
                )
        return Description(name, source.kind, [_facts(tensor) for tensor in source.tensors], [])


def _facts(tensor: TensorInfo) -> TensorFacts:
    """Facts of a tensor in a file without a source record, which may be a blob that a host saved."""
    name, file, nbytes = tensor.name, tensor.file.name, tensor.nbytes
    if tensor.dtype == "U8" and len(tensor.shape) == 1 and nbytes and nbytes % ALIGNMENT_BYTES == 0:
        with contextlib.suppress(MalformedError, UnsupportedError):
            tail = tensor.read_range(max(nbytes - TAIL_BYTES, 0), nbytes)
            footer = Footer.parse(tail)
            form = by_code(footer.format_code, footer.version)
            original = form.content_bytes(PackedTensor(tail, footer))
            return TensorFacts(
                name, file, form.id, footer.dtype, footer.shape, original, nbytes, footer.digest
            )
    return TensorFacts(name, file, "raw", tensor.dtype, tensor.shape, nbytes, nbytes, None)


def _packed(path: str, kind: str, files: dict[str, PackedFile]) -> Description:
    tensors = [facts for name, file in files.items() for facts in _parts(name, file)]
    sources = [SourceFacts(name, f.size, f.record.digest, f.record.tool) for name, f in files.items()]
    return Description(path, kind, tensors, sources)


def _parts(name: str, file: PackedFile) -> Iterator[TensorFacts]:
    for part in file.parts:
        yield TensorFacts(
            part.entry.name,
            name,
            part.packed.format if part.packed is not None else "raw",
            part.entry.dtype,
            part.entry.shape,
            part.nbytes,
            part.stored.end - part.stored.begin,
            part.digest,
            part.within,
            part.packed.numel if part.packed is not None and part.entry.name in file.record.pairs else None,
        )


def _tensor_json(facts: TensorFacts) -> dict[str, Any]:
    bits = facts.bits_per_weight
    return {
        "name": facts.name,
        "file": facts.file,
        "format": facts.format,
        "dtype": facts.dtype,
        "shape": list(facts.shape),
        "bytes": facts.nbytes,
        "stored_bytes": facts.stored_bytes,
        "bits_per_weight": None if math.isnan(bits) else bits,
        "xxh3_128": facts.digest.hex() if facts.digest is not None else None,
        **({"within": facts.within} if facts.within is not None else {}),
    }
