"""The header of a `.safetensors` file, read and checked completely before anything is mapped.

Format: 8 bytes little-endian header size, that many bytes of JSON, then the tensors' bytes. The JSON maps each name to
`{"dtype", "shape", "data_offsets": [begin, end]}`, and `__metadata__` to strings (safetensors 0.8, README "Format").
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from anyfp8.errors import CheckpointError

#: safetensors' own limit on the header's size in bytes.
MAX_HEADER = 100_000_000

#: dtype word of the format → (bits per element, torch dtype that holds it; None: torch can't)
DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    "F64": (64, torch.float64),
    "F32": (32, torch.float32),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E5M2": (8, torch.float8_e5m2),
    "F8_E4M3FNUZ": (8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": (8, torch.float8_e5m2fnuz),
    "F8_E8M0": (8, torch.float8_e8m0fnu),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, None),
    "I64": (64, torch.int64),
    "I32": (32, torch.int32),
    "I16": (16, torch.int16),
    "I8": (8, torch.int8),
    "U64": (64, torch.uint64),
    "U32": (32, torch.uint32),
    "U16": (16, torch.uint16),
    "U8": (8, torch.uint8),
    "BOOL": (8, torch.bool),
    "C64": (64, torch.complex64),
}
#: the words whose torch dtype is an FP8 format that weights are stored in
FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: dtype word, shape, and its bytes `[begin, end)` counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: BinaryIO, size: int, name: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """The checked entries and the metadata of an open file of `size` bytes; `name` is how errors call it.

    Raises CheckpointError naming the file, and the tensor where one is at fault: truncated, trailing bytes, header not
    JSON or too large, duplicate names, unknown dtype, offsets that overlap, leave holes or disagree with the shape.
    """
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{name} is truncated: {size} bytes, too short for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER, size - 8):
        raise CheckpointError(
            f"{name} is not a safetensors file, or is truncated: it says its header has {length} bytes, "
            f"but the file has {size} (and a header at most {MAX_HEADER})"
        )
    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=no_duplicates)
    except DuplicateKey as error:
        raise CheckpointError(f"{name}: the header names {error} twice") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: the header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{name}: the header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{name}: __metadata__ must map strings to strings")
    entries = {key: _entry(value, 8 + length, f"{name}: tensor {key!r}") for key, value in header.items()}
    _check_layout(entries, 8 + length, size, name)
    return entries, metadata


class DuplicateKey(Exception):
    """A JSON object has a key twice."""


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for json that raises DuplicateKey instead of keeping the last value."""
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        raise DuplicateKey(next(repr(k) for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return out


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(value: Any, data_start: int, where: str) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise CheckpointError(f"{where}: data_offsets {offsets!r} are not two sizes")
    if len(shape) > 64:
        raise CheckpointError(f"{where}: a shape of {len(shape)} axes is more than any tensor can have")
    bits = DTYPES[dtype][0]
    for n in shape:  # one that torch can't count is a lie, and its product could have millions of digits
        bits *= max(n, 1)
        if bits >= 1 << 66:
            raise CheckpointError(f"{where}: shape {str(shape[:8])[:-1]}...] is larger than any tensor can be")
    bits *= 0 not in shape
    if offsets[1] - offsets[0] != -(-bits // 8):
        raise CheckpointError(
            f"{where}: its data_offsets span {offsets[1] - offsets[0]} bytes, but {dtype} of shape {shape} needs "
            f"{-(-bits // 8)}"
        )
    return Entry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _check_layout(entries: dict[str, Entry], start: int, size: int, name: str) -> None:
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            raise CheckpointError(
                f"{name} is truncated: tensor {key!r} ends at byte {entry.end}, but the file has {size} bytes"
            )
        if entry.begin != start:
            what = "overlaps the tensor before it" if entry.begin < start else "leaves unused bytes before it"
            raise CheckpointError(f"{name}: tensor {key!r} {what} (starts at {entry.begin}, expected {start})")
        start = entry.end
    if start != size:
        raise CheckpointError(f"{name} has {size - start} bytes of trailing garbage after the last tensor")
