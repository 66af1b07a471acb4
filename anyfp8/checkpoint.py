"""`Checkpoint`: the files of a checkpoint as named, lazily read tensors. Nothing is unpickled, ever."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyfp8.errors import CheckpointError
from anyfp8.header import DTYPES, FP8, DuplicateKey, no_duplicates, read_header

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
#: preferred when a folder holds several safetensors files or indexes without saying which one is meant
STEMS = ("model", "diffusion_pytorch_model", "pytorch_model")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.safetensors")
#: bytes; what torch's CPU allocator aligns to
_ALIGNMENT = 64
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class TensorRef:
    """A tensor on disk (or in a mapping that was passed as source): known by its header, read on demand.

    dtype is the safetensors word ("F8_E4M3", "BF16", ...), `file` what messages call its origin.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    _source: Tensor | tuple[_MappedFile, int, int] = field(repr=False, compare=False)

    def map(self) -> None:
        """Map its file now; raises CheckpointError if that fails, so that `read` can't."""
        if not isinstance(self._source, Tensor):
            self._source[0].buffer()

    @property
    def is_fp8(self) -> bool:
        """True if the stored dtype is one of the four FP8 formats."""
        return self.dtype in FP8

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        bits = DTYPES[self.dtype][0]
        for n in self.shape:
            bits *= n
        return -(-bits // 8)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype that holds it; raises CheckpointError where torch has none."""
        dtype = DTYPES[self.dtype][1]
        if dtype is None:
            raise CheckpointError(f"{self} has dtype {self.dtype}, which torch can't hold")
        return dtype

    def read(self) -> Tensor:
        """The tensor, on CPU. From a file: in a storage of its own over a private mapping, without a copy.

        Only numbers of several bytes that are not aligned as torch aligns its own memory are copied: matmuls on a CPU
        round their last bit in another way there, and a reinterpreting view needs the alignment of its dtype.
        """
        if isinstance(self._source, Tensor):
            return self._source
        file, begin, end = self._source
        dtype = self.torch_dtype
        if begin == end:
            return torch.empty(self.shape, dtype=dtype)
        raw = torch.frombuffer(file.buffer(), dtype=torch.uint8, count=end - begin, offset=begin)
        if dtype.itemsize > 1 and begin % _ALIGNMENT:
            raw = raw.clone()
            file.drop(begin, end)
        return raw.view(dtype).view(self.shape)

    def __str__(self) -> str:
        return f"{self.name} in {self.file}"


class _MappedFile:
    """A file mapped copy-on-write at first use: tensors over it are writable, the file never changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None

    def buffer(self) -> mmap.mmap:
        if self._map is None:
            try:
                with open(self.path, "rb") as file:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise CheckpointError(f"{self.path} can't be mapped into memory: {error}") from error
        return self._map

    def drop(self, begin: int, end: int) -> None:
        """Free the memory of the pages that lie wholly between; whoever looks again reads the file again."""
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        size = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.buffer().madvise(mmap.MADV_DONTNEED, first, size)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint's tensors (by their names in the files), its JSON files, and what was ignored on the way.

    name: what messages call it. tensors: name → TensorRef. metadata: the `__metadata__` of all files, merged.
    configs: file name → parsed JSON object, of the files beside the weights. ignored: file name → reason.
    beside: the other files of the folder (tokenizer, configs, code), which are never opened here.
    """

    name: str
    tensors: Mapping[str, TensorRef]
    metadata: Mapping[str, str] = field(default_factory=dict)
    configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[Path, ...] = ()

    @classmethod
    def open(
        cls,
        source: str | Path | Mapping[str, Tensor],
        *,
        revision: str | None = None,
        subfolder: str = "",
        token: str | None = None,
    ) -> Checkpoint:
        """Open a folder, a `.safetensors` file, an index JSON, a hub id, or a mapping of tensors; reads headers only.

        Raises CheckpointError, naming file and tensor, for anything that can't be read or contradicts itself.
        """
        if isinstance(source, Mapping):
            return _from_mapping(source)
        path = resolve(source, revision=revision, subfolder=subfolder, token=token)
        if path.is_dir():
            return _from_folder(path)
        if path.suffix in PICKLES:
            raise CheckpointError(
                f"{path} is a pickle, which anyfp8 never opens: loading one can run any code. "
                "Save the state dict with safetensors."
            )
        if path.name.endswith(".json"):
            return _from_index(path)
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path} is neither a .safetensors file nor a .safetensors.index.json")
        return _from_files(path.parent, str(path), [path.name], _pickles_beside(path.parent))


def resolve(source: str | Path, *, revision: str | None, subfolder: str, token: str | None) -> Path:
    """The local path of a source; a hub id is downloaded (safetensors and JSON files only) or found in the cache."""
    path = Path(source).expanduser()
    if not path.exists() and isinstance(source, str) and _HUB_ID.fullmatch(source):
        from huggingface_hub import snapshot_download  # only where a hub id is really asked for
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        inside = f"{subfolder}/" if subfolder else ""
        try:
            path = Path(
                snapshot_download(
                    source,
                    revision=revision,
                    token=token,
                    allow_patterns=[f"{inside}*.safetensors", f"{inside}*.json"],
                )
            )
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise CheckpointError(
                f"{source!r} is no file or folder here, and the hub could not provide it: {error}"
            ) from error
    if subfolder:
        path = path / subfolder
    if not path.exists():
        raise CheckpointError(f"{path} does not exist (and is not a hub id of the form owner/name)")
    return path


def _from_mapping(tensors: Mapping[str, Tensor]) -> Checkpoint:
    words = {dtype: word for word, (_, dtype) in DTYPES.items() if dtype is not None}
    refs = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{name!r} in the mapping is not a name")
        if not isinstance(tensor, Tensor) or tensor.dtype not in words:
            raise CheckpointError(f"{name!r} in the mapping is not a tensor of a dtype that safetensors can hold")
        if tensor.is_meta or tensor.layout != torch.strided:
            raise CheckpointError(f"{name!r} in the mapping is a meta or sparse tensor: it has no values to load")
        refs[name] = TensorRef(name, "the mapping", words[tensor.dtype], tuple(tensor.shape), tensor.detach())
    return Checkpoint("the mapping of tensors", refs)


def _from_folder(folder: Path) -> Checkpoint:
    weights = sorted(p.name for p in folder.glob("*.safetensors"))
    indexes = sorted(p.name for p in folder.glob("*.safetensors.index.json"))
    pickles = _pickles_beside(folder)
    if indexes:
        return _from_index(folder / _choose(folder, indexes, ".safetensors.index.json"))
    if not weights:
        if pickles:
            raise CheckpointError(
                f"{folder} holds only pickle files ({', '.join(pickles)}), which anyfp8 never opens: loading a pickle "
                "can run any code. Convert it to safetensors."
            )
        hint = ""
        if (folder / "model_index.json").exists():
            hint = '; it is a diffusers pipeline: pass a component, e.g. subfolder="transformer"'
        raise CheckpointError(f"{folder} holds no .safetensors file{hint}")
    shards = [m for m in map(_SHARD.fullmatch, weights) if m]
    if shards and len(shards) == len(weights):  # shards whose index was lost: they must be complete
        count = int(shards[0]["count"])
        if len({(m["stem"], m["count"]) for m in shards}) == 1 and [int(m["index"]) for m in shards] == list(
            range(1, count + 1)
        ):
            return _from_files(folder, str(folder), weights, pickles)
        raise CheckpointError(f"{folder} has shards ({', '.join(weights)}) that are not one complete set, and no index")
    chosen = _choose(folder, weights, ".safetensors")
    stray = {name: f"{chosen} was chosen" for name in weights if name != chosen}
    return _from_files(folder, str(folder), [chosen], stray | pickles)


def _choose(folder: Path, names: list[str], suffix: str) -> str:
    if len(names) == 1:
        return names[0]
    for stem in STEMS:
        if stem + suffix in names:
            return stem + suffix
    raise CheckpointError(f"{folder} holds several files: {', '.join(names)}. Pass the one that is meant.")


def _pickles_beside(folder: Path) -> dict[str, str]:
    return {p.name: "a pickle, never opened" for p in sorted(folder.iterdir()) if p.suffix in PICKLES}


def _from_index(path: Path) -> Checkpoint:
    folder = path.parent
    index = _read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map from tensor names to file names")
    first = {name: tensor for tensor, name in reversed(weight_map.items())}  # one look at each file, not at each tensor
    for name, tensor in first.items():
        _inside(folder, name, f"{path}: tensor {tensor!r}")
    files = sorted(first)
    stray = {p.name: "the index does not name it" for p in folder.glob("*.safetensors") if p.name not in files}
    return _from_files(folder, str(folder), files, stray | _pickles_beside(folder), weight_map, path.name)


def _inside(folder: Path, name: str, where: str) -> None:
    """Refuse an index entry that leaves the folder; a plain name that is a symlink (hub caches) is followed."""
    parts = re.split(r"[/\\]", name)
    if not name or ".." in parts or "" in parts or Path(name).is_absolute() or ":" in parts[0] or "\x00" in name:
        raise CheckpointError(f"{where} is said to be in {name!r}, which is outside the checkpoint's folder")
    target = folder / name
    try:
        inside = len(parts) == 1 or folder.resolve() in target.resolve().parents
        exists = target.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, a loop of symlinks ...
        raise CheckpointError(f"{where} is said to be in {name[:80]!r}, which can't be opened: {error}") from None
    if not inside:
        raise CheckpointError(f"{where} is said to be in {name!r}, which leads outside the checkpoint's folder")
    if not exists:
        raise CheckpointError(f"{where} is said to be in {name!r}, which does not exist")


def _from_files(
    folder: Path,
    name: str,
    files: Iterable[str],
    ignored: dict[str, str],
    weight_map: Mapping[str, str] | None = None,
    index: str = "",
) -> Checkpoint:
    tensors: dict[str, TensorRef] = {}
    metadata: dict[str, str] = {}
    for file in files:
        path = folder / file
        mapped = _MappedFile(path)
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file")
        try:
            with open(path, "rb") as stream:
                entries, meta = read_header(stream, path.stat().st_size, str(path))
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error
        metadata |= meta
        for key, entry in entries.items():
            if weight_map is not None and weight_map.get(key) != file:
                if key not in weight_map:
                    ignored[f"{key} in {file}"] = f"{index} does not name it"
                else:
                    ignored[f"{key} in {file}"] = f"a stale copy: {index} points to {weight_map[key]}"
                continue
            if key in tensors:
                raise CheckpointError(f"tensor {key!r} is in {tensors[key].file} and in {file}, and no index decides")
            tensors[key] = TensorRef(key, file, entry.dtype, entry.shape, (mapped, entry.begin, entry.end))
    for key, file in (weight_map or {}).items():
        if key not in tensors:
            raise CheckpointError(f"{folder / index} says that tensor {key!r} is in {file!r}, but it is not there")
    configs = {p.name: _read_json(p) for p in sorted(folder.glob("*.json")) if p.name in CONFIGS}
    weights = {".safetensors", *PICKLES}
    beside = [p for p in sorted(folder.iterdir()) if p.is_file() and p.suffix not in weights]
    whole = name == str(folder)  # of a single file, what lies around it is not its own
    beside = [p for p in beside if not p.name.endswith(".index.json")] if whole else []
    return Checkpoint(name, tensors, metadata, configs, ignored, tuple(beside))


#: the JSON files that dialects read
CONFIGS = (
    *("anyfp8.json", "config.json", "quantization_config.json", "hf_quant_config.json"),
    *("quanto_qmap.json", "quantization_map.json"),
)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"), object_pairs_hook=no_duplicates)
    except DuplicateKey as error:
        raise CheckpointError(f"{path} names {error} twice") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value
