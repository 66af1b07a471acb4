"""`save`: a model with FP8 layers as safetensors shards, an index and the format's configs, all or nothing."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from anyfp8 import writers
from anyfp8.errors import AnyFP8Error
from anyfp8.folder import replacing, write_json
from anyfp8.header import DTYPES
from anyfp8.layers import FP8Layer
from anyfp8.layers.storage import STORED, FP8Storage
from anyfp8.numerics import FORMATS
from anyfp8.replace import ModuleTree, Slot
from anyfp8.writers import Layer
from anyfp8.writers.base import FILES, INDEX, matrices, metadata

_STORABLE = {dtype for _, dtype in DTYPES.values()}
_FP8 = {spec.dtype for spec in FORMATS.values() if spec.bits == 8}


def save(model: nn.Module, path: str | Path, *, format: str = "anyfp8", max_shard_size: str | int = "5GB") -> None:
    """Write a model to the folder `path`: `model*.safetensors`, an index if sharded, and the format's JSON files.

    What is loaded from there is bit for bit what was saved. Tied tensors and shared modules are written once. The
    folder appears whole or not at all; one that anyfp8 itself wrote is replaced, any other non-empty one is refused.

    format: "anyfp8" (says everything), "compressed-tensors", "auto-round", "transformers", "modelopt" or "comfy". What
        a format can't say is an error that names the layers, before anything is written.
    max_shard_size: bytes, or text such as "5GB".

    Raises AnyFP8Error for what can't be written.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    from anyfp8 import __version__

    writer = writers.get(format)
    stored, plain = collect(model)
    layers = [layer for layer, _ in stored]
    writers.check(writer, format, layers)
    tensors = dict(plain)
    for layer, storage in stored:
        tensors |= writer.tensors(layer, {n: v for n in STORED if (v := storage._buffers[n]) is not None})
    if not layers and format != "anyfp8":
        raise AnyFP8Error(f"the model has no FP8 layer, so there is nothing to say in format {format!r}")
    floats = matrices({name: value.shape for name, value in plain.items()})
    producer = f"anyfp8 {__version__}"
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=FILES, max_shard_size=max_shard_size)
    with replacing(Path(path)) as folder:
        written: set[tuple[int, int]] = set()  # safetensors refuses tensors that share memory
        for file, names in split.filename_to_tensors.items():
            shard = {name: _unshared(tensors[name], written) for name in names}
            save_file(shard, folder / file, metadata=metadata(producer))
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            write_json(folder / INDEX, index)
        for name, config in writer.configs(layers, floats, producer).items():
            write_json(folder / name, config)


def collect(model: nn.Module) -> tuple[list[tuple[Layer, FP8Storage]], dict[str, Tensor]]:
    """The quantized layers of a model and its other tensors by name; raises AnyFP8Error for what no file can hold."""
    tree = ModuleTree(model)
    stored: list[tuple[Layer, FP8Storage]] = []
    plain: dict[str, Tensor] = {}
    for group in tree.tied():
        slot = group[0]
        if slot.tensor.is_meta:
            raise AnyFP8Error(f"{slot.name} is on the meta device: there is nothing to save")
        if slot.fp8 is not None:
            stored += [_stored(slot) for slot in _distinct(group)]
        elif slot.tensor.dtype in _FP8:
            raise AnyFP8Error(f"{slot.name} is a bare {slot.tensor.dtype} tensor: without a scale it means nothing")
        elif slot.tensor.dtype not in _STORABLE:
            raise AnyFP8Error(f"{slot.name} is {slot.tensor.dtype}, which safetensors can't hold")
        else:
            # one name a tensor; two tensors over one memory need not share it in the model that is loaded into
            first = {id(slot.tensor): slot for slot in reversed(group)}
            plain |= {slot.name: slot.tensor.detach() for slot in first.values()}
    return stored, plain


def _distinct(group: list[Slot]) -> list[Slot]:
    """Of layers that share their codes, those to write: one, unless several treat their input each in its own way."""
    full = [slot for slot in group if slot.fp8 is not None and not slot.fp8.scheme.weight_only]
    return full or group[:1]


def _stored(slot: Slot) -> tuple[Layer, FP8Storage]:
    assert slot.fp8 is not None
    storage = slot.fp8 if isinstance(slot.fp8, FP8Layer) else slot.fp8.joined()
    if storage is None:
        raise AnyFP8Error(f"{slot.name} can't be saved: its parts are quantized in tiles that don't fit together")
    module, _, leaf = slot.name.rpartition(".")
    return Layer(module, storage.scheme, storage.weight_shape, param=leaf), storage


def _unshared(value: Tensor, written: set[tuple[int, int]]) -> Tensor:
    value = value.contiguous().cpu()
    place = (value.untyped_storage().data_ptr(), value.untyped_storage().nbytes())
    if place in written and value.numel():
        return value.clone()
    written.add(place)
    return value
