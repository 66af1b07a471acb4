"""`save`: a model with FP8 layers as safetensors shards, an index and the manifest `anyfp8.json`, all or nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from anyfp8.dialects import anyfp8_json
from anyfp8.errors import AnyFP8Error
from anyfp8.layers import LAYERS, FP8Layer
from anyfp8.layers.storage import STORED, FP8Storage
from anyfp8.numerics import FORMATS
from anyfp8.replace import ModuleTree
from anyfp8.scheme import QuantizationScheme

_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|anyfp8\.json")


def save(model: nn.Module, path: str | Path, *, format: str = "anyfp8", max_shard_size: str | int = "5GB") -> None:
    """Write a model to the folder `path`: `model*.safetensors`, an index if sharded, and `anyfp8.json`.

    What is loaded from there is bit for bit what was saved. Tied tensors and shared modules are written once. The
    folder appears whole or not at all; one that save itself wrote is replaced, any other non-empty one is refused.

    format: "anyfp8". max_shard_size: bytes, or text such as "5GB". Raises AnyFP8Error for what can't be written.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    from anyfp8 import __version__

    if format != "anyfp8":
        raise AnyFP8Error(f"unknown format {format!r}; valid: anyfp8")
    tensors, layer_config, ignore = collect(model)
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    producer = f"anyfp8 {__version__}"
    with _replacing(Path(path)) as folder:
        for file, names in split.filename_to_tensors.items():
            shard = {name: tensors[name].contiguous().cpu() for name in names}
            save_file(shard, folder / file, metadata={"format": "pt", "producer": producer})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            _write_json(folder / "model.safetensors.index.json", index)
        _write_json(folder / anyfp8_json.FILE, anyfp8_json.write(layer_config, ignore, producer))


def collect(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, QuantizationScheme], list[str]]:
    """The tensors to store by name, the schemes by module path, and the float layers that might have been FP8."""
    tree = ModuleTree(model)
    tensors: dict[str, Tensor] = {}
    layer_config: dict[str, QuantizationScheme] = {}
    seen: set[tuple[int, int]] = set()  # safetensors refuses tensors that share memory
    for group in tree.tied():
        slot = group[0]
        if slot.tensor.is_meta:
            raise AnyFP8Error(f"{slot.name} is on the meta device: there is nothing to save")
        if slot.fp8 is not None:
            if slot.leaf != "weight":
                raise AnyFP8Error(f"{slot.name} can't be saved: anyfp8.json describes weights of modules only")
            storage = slot.fp8 if isinstance(slot.fp8, FP8Layer) else slot.fp8.storages[0]
            _store(storage, slot.name.rpartition(".")[0], tensors, layer_config)
            continue
        if slot.tensor.dtype in {spec.dtype for spec in FORMATS.values()}:
            raise AnyFP8Error(
                f"{slot.name} is a bare {slot.tensor.dtype} tensor without a scale: what it means is unknown"
            )
        value = slot.tensor.detach()
        place = (value.untyped_storage().data_ptr(), value.device.index or 0)
        tensors[slot.name] = value.clone() if place in seen and value.numel() else value
        seen.add(place)
    ignore = [path for path, module in tree.modules.items() if type(module) in LAYERS]
    return tensors, layer_config, ignore


def _store(
    layer: FP8Storage, path: str, tensors: dict[str, Tensor], layer_config: dict[str, QuantizationScheme]
) -> None:
    prefix = f"{path}." if path else ""
    tensors[f"{prefix}weight"] = layer.weight_codes.view(FORMATS[layer.scheme.weight_dtype].dtype)
    for name in STORED[1:]:
        value = layer._buffers[name]
        if value is not None:
            tensors[f"{prefix}{name}"] = (value.reshape(1) if value.numel() == 1 else value).clone()
    layer_config[path] = replace(layer.scheme, scale_dtype="float32")


class _replacing:
    """A temporary folder beside `path` that becomes `path` on success and vanishes on failure."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = [p.name for p in path.iterdir()] if path.is_dir() else []
        ours = anyfp8_json.FILE in found  # without our manifest, even a model.safetensors is somebody else's
        foreign = [name for name in found if not (ours and _OURS.fullmatch(name))]
        if foreign or (path.exists() and not path.is_dir()):
            what = f"holds other files ({', '.join(sorted(foreign)[:5])})" if foreign else "is a file"
            raise AnyFP8Error(f"{path} {what}: save to a folder of its own")

    def __enter__(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
        return self.temporary

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                self._commit()
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _commit(self) -> None:
        umask = os.umask(0)
        os.umask(umask)
        self.temporary.chmod(0o777 & ~umask)  # mkdtemp's folders are private
        if not self.path.exists():
            self.temporary.rename(self.path)
            return
        old = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.old.", dir=self.path.parent))
        self.path.rename(old / "old")
        try:
            self.temporary.rename(self.path)
        except BaseException:
            (old / "old").rename(self.path)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
