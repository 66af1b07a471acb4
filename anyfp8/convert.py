"""`convert`: from one dialect to another, file by file, without a model."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from anyfp8 import dialects, writers
from anyfp8.checkpoint import CONFIGS, Checkpoint, TensorRef
from anyfp8.errors import AnyFP8Error, LoadError, Problem
from anyfp8.folder import replacing, write_json
from anyfp8.folding import join
from anyfp8.manifest import LayerSpec, Manifest
from anyfp8.numerics import decode, dtype_name, unswizzle
from anyfp8.sources import plain_values
from anyfp8.writers import Layer, Writer
from anyfp8.writers.base import FILES, INDEX, matrices, metadata


def convert(
    source: str | Path,
    dest: str | Path,
    *,
    to: str,
    dialect: str | None = None,
    revision: str | None = None,
    subfolder: str = "",
    token: str | None = None,
    progress: bool | None = None,
) -> None:
    """Write the checkpoint `source` in another format to the folder `dest`; codes are not changed.

    to: as `save`'s format. One output file for each input file, one of them in memory at a time. Other files beside the
    weights (configs, tokenizer) are carried along; `quantization_config` in config.json is replaced.

    Raises AnyFP8Error, before anything is written, if the source has a problem or the format can't say some layer (all
    of them are named). KV-cache scales and other named exceptions are left behind.
    """
    from anyfp8 import __version__

    checkpoint = Checkpoint.open(source, revision=revision, subfolder=subfolder, token=token)
    manifest = dialects.read(checkpoint, dialect)
    problems = [*manifest.problems, *(Problem("unclaimed", name, why) for name, why in manifest.unclaimed.items())]
    for spec in manifest.layers.values():
        if spec.by_class:
            detail = (
                "its scheme depends on the module's class, which no file tells: load it into the model and save that"
            )
            problems.append(Problem("ambiguous", spec.name, detail))
        if spec.codes.padded_to > 1 and spec.codes.crop is None:
            detail = "it is padded, and only the model knows how much: load it into the model and save that"
            problems.append(Problem("ambiguous", spec.name, detail))
    if problems := [*problems, *manifest.value_problems()]:
        raise LoadError(problems, checkpoint.name)
    writer = writers.get(to)
    layers = [_layer(spec) for spec in manifest.layers.values()]
    if not layers:
        raise AnyFP8Error(f"{checkpoint.name} has no FP8 layer to convert")
    writers.check(writer, to, layers)
    producer = f"anyfp8 {__version__}"
    with replacing(Path(dest)) as folder:
        _write_weights(manifest, writer, layers, folder, producer, progress)
        floats = matrices({name: ref.shape for name, ref in manifest.plain.items()})
        _write_configs(checkpoint, writer.configs(layers, floats, producer), folder)


def _layer(spec: LayerSpec) -> Layer:
    return Layer(spec.name, spec.scheme, spec.shape, two_level=spec.scale.factor is not None, param=spec.param)


def _values(spec: LayerSpec) -> dict[str, Tensor]:
    values = spec.read()
    if spec.scale.factor is not None:  # NVFP4's two levels, for formats that keep them apart
        outer = spec.scale.factor.read().float().reshape(())
        inner = spec.scale.ref.read()
        name = dtype_name(inner.dtype) if spec.scale.ref.is_fp8 else "float8_e4m3fn"
        inner = decode(inner.view(values["weight_codes"].dtype), name)
        values["inner_scale"] = unswizzle(inner, *spec.grid) if spec.scale.swizzled else inner
        # multiplier and divisor both: the one that the file holds is exact, and a format stores one or the other
        values["outer_scale"], values["outer_divisor"] = (1 / outer, outer) if spec.scale.divide else (outer, 1 / outer)
    return values


def _write_weights(
    manifest: Manifest, writer: Writer, layers: list[Layer], folder: Path, producer: str, progress: bool | None
) -> None:
    from safetensors.torch import save_file
    from tqdm.auto import tqdm

    by_file: dict[str, list[LayerSpec | TensorRef]] = {}
    for spec in manifest.layers.values():
        by_file.setdefault(spec.weight.file, []).append(spec)
    for ref in manifest.plain.values():
        by_file.setdefault(ref.file, []).append(ref)
    named = {join(layer.name, layer.param): layer for layer in layers}
    weight_map: dict[str, str] = {}
    total = 0
    files = sorted(by_file)
    for number, file in enumerate(
        tqdm(files, desc="Converting", disable=None if progress is None else not progress), 1
    ):
        suffix = "" if len(files) == 1 else f"-{number:05d}-of-{len(files):05d}"
        name = FILES.format(suffix=suffix)
        tensors = dict(_tensors(by_file[file], writer, named))
        save_file(tensors, folder / name, metadata=metadata(producer))
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def _tensors(
    owners: Iterable[LayerSpec | TensorRef], writer: Writer, layers: dict[str, Layer]
) -> Iterable[tuple[str, Tensor]]:
    for owner in owners:
        if isinstance(owner, TensorRef):
            yield owner.name, plain_values(owner)
        else:
            yield from (
                (n, t.contiguous()) for n, t in writer.tensors(layers[owner.weight_name], _values(owner)).items()
            )


def _write_configs(checkpoint: Checkpoint, configs: dict[str, dict[str, Any]], folder: Path) -> None:
    """The new configs, and what was beside the weights: all but weights, indexes and old quantization configs."""
    config = {k: v for k, v in checkpoint.configs.get("config.json", {}).items() if k != "compression_config"}
    config.pop("quantization_config", None)
    config |= configs.pop("config.json", {})
    if config:
        write_json(folder / "config.json", config)
    for name, value in configs.items():
        write_json(folder / name, value)
    for path in checkpoint.beside:
        if path.name not in (*CONFIGS, "recipe.yaml") and not (folder / path.name).exists():
            shutil.copy2(path, folder / path.name)
