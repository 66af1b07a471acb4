"""`load`: plan, then apply. Whatever can fail on content fails before the first change to the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyfp8 import dialects
from anyfp8.backends import check_name
from anyfp8.checkpoint import Checkpoint
from anyfp8.errors import BackendError, LoadError, Problem
from anyfp8.layers import FP8Layer, parametrize_codes, unparametrize
from anyfp8.manifest import LayerSpec, Manifest
from anyfp8.naming import Rename
from anyfp8.numerics import dequantize
from anyfp8.plan import Assign, Dequantize, Parametrize, Plan, Replace, build_plan
from anyfp8.replace import ModuleTree, Slot, swap
from anyfp8.report import attach_plan

Source = str | Path | Mapping[str, Tensor]


def inspect(
    source: Source,
    *,
    dialect: str | None = None,
    revision: str | None = None,
    subfolder: str = "",
    token: str | None = None,
) -> Manifest:
    """What a checkpoint holds, from its headers alone: dialect and evidence, layers and schemes, everything else.

    Raises CheckpointError for unreadable files, DialectError if no dialect (or more than one) recognises them. What is
    wrong with single layers is listed in `.problems`, not raised.
    """
    checkpoint = Checkpoint.open(source, revision=revision, subfolder=subfolder, token=token)
    return dialects.read(checkpoint, dialect)


def plan(
    model: nn.Module,
    source: Source,
    *,
    dialect: str | None = None,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    progress: bool | None = None,
    revision: str | None = None,
    subfolder: str = "",
    token: str | None = None,
) -> Plan:
    """All that `load` with the same arguments would decide; touches nothing and works on meta models.

    Content is not raised for: `.problems` lists everything that would keep `load` from succeeding.
    """
    check_name(backend)
    manifest = inspect(source, dialect=dialect, revision=revision, subfolder=subfolder, token=token)
    made = build_plan(model, manifest, include=include, exclude=exclude, rename=rename, strict=strict)
    values = manifest.value_problems()
    return made if not values else Plan(**{**vars(made), "problems": (*made.problems, *values)})


def load(
    model: nn.Module,
    source: Source,
    *,
    dialect: str | None = None,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    progress: bool | None = None,
    revision: str | None = None,
    subfolder: str = "",
    token: str | None = None,
) -> nn.Module:
    """Load a checkpoint into any module, in place, and return the module.

    model: any nn.Module, on any device, also on meta. Only if the root itself is swapped is the return value new.
    source: a folder, a `.safetensors` file, an index JSON, a hub id, or a mapping of tensors. Without FP8 tensors it is
        loaded as it is, strictly.
    dialect: name of the dialect, if it should not be detected.
    backend: "auto", "native", "emulated" or "dequantized" (weight-only, another contract).
    dtype: dtype of plain tensors, and what FP8 weights decode to; default: the model's own.
    device: where tensors go; default: where they are (CPU for meta).
    include, exclude: fnmatch patterns on module paths; quantized layers that are left out are decoded to float.
    rename: ordered mapping regex → replacement (re.sub), or a function, on the file's module paths.
    strict: every tensor of file and model must be accounted for. False: missing and unexpected ones are skipped and
        reported; contradictions and FP8 tensors without a scale are errors all the same.
    progress: a bar over bytes; None: only on a terminal.

    Raises AnyFP8Error (LoadError lists every problem at once); the model is then as it was, bit for bit.

    >>> import torch, anyfp8
    >>> tensors = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}  # no FP8 in it: a strict plain load
    >>> anyfp8.load(torch.nn.Linear(2, 1), tensors)(torch.ones(2)).item()
    2.0
    """
    made = plan(
        model,
        source,
        dialect=dialect,
        backend=backend,
        include=include,
        exclude=exclude,
        rename=rename,
        strict=strict,
        revision=revision,
        subfolder=subfolder,
        token=token,
    )
    made.raise_problems()
    return _apply(made, backend, dtype, None if device is None else torch.device(device), progress)


def _apply(
    plan: Plan, backend: str, dtype: torch.dtype | None, device: torch.device | None, progress: bool | None
) -> nn.Module:
    tree = plan.tree
    new_layers = _build_layers(plan, backend, dtype, device)
    with _meta_buffers(tree, device):  # user code (a module's own hook) runs here, so before any other change
        pass
    root = tree.root
    for step, layer in new_layers:
        swap(tree, step.slot.owner, layer)
        root = layer if step.slot.owner is root else root
    owners: dict[int, nn.Module] = {id(step.slot.owner): layer for step, layer in new_layers}
    with torch.no_grad(), _bar(plan, progress) as advance:
        advance(sum(step.spec.nbytes for step, _ in new_layers))
        for step in plan.of(Assign):
            root = _assign(tree, root, step.slots, owners, step.ref.read(), dtype, device)
            advance(step.ref.nbytes)
        for step in plan.of(Dequantize):
            value = _decoded(step.spec, dtype or _dtype_of(step.slot))
            root = _assign(tree, root, (step.slot,), owners, value, dtype, device)
            advance(step.spec.nbytes)
        for step in plan.of(Parametrize):
            spec, slot = step.spec, step.slot
            where = _target(slot, device)
            codes, scale = spec.read_codes().to(where), spec.read_weight_scale().to(where)
            parametrize_codes(slot.owner, slot.leaf, spec.scheme, codes, scale, dtype or _dtype_of(slot))
            advance(spec.nbytes)
    if device is not None:
        root.to(device)  # what the checkpoint doesn't hold: non-persistent buffers
    attach_plan(root, plan)
    return root


def _build_layers(
    plan: Plan, backend: str, dtype: torch.dtype | None, device: torch.device | None
) -> list[tuple[Replace, FP8Layer]]:
    """The FP8 layers, not yet in the model; BackendError, with every refusal, if the backend can't run some."""
    built: list[tuple[Replace, FP8Layer]] = []
    refusals: dict[str, str] = {}
    shared: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}  # tied layers share their bytes
    for step in plan.of(Replace):
        spec: LayerSpec = step.spec
        where = _target(step.slot, device)
        if spec.weight.name not in shared:
            scale, static = spec.read_weight_scale().to(where), spec.read_input_scale()
            shared[spec.weight.name] = (
                spec.read_codes().to(where),
                scale,
                static if static is None else static.to(where),
            )
        codes, scale, static = shared[spec.weight.name]
        static = static if spec.scheme.static else None
        layer = step.layer.from_codes(step.slot.owner, spec.scheme, codes, scale, static, dtype=dtype)
        chosen, why = layer.candidate(backend)
        if chosen is None:
            refusals[step.slot.name.rpartition(".")[0]] = why[backend]
        else:
            layer.backend, layer.refusals = chosen, why
            built.append((step, layer))
    if refusals:
        raise BackendError(f"backend {backend!r} can't run {len(refusals)} of the layers:", refusals)
    return built


def _target(slot: Slot, device: torch.device | None) -> torch.device:
    return device or (torch.device("cpu") if slot.tensor.is_meta else slot.tensor.device)


def _decoded(spec: LayerSpec, dtype: torch.dtype) -> Tensor:
    return dequantize(spec.read_codes(), spec.read_weight_scale(), spec.scheme.weight_dtype, spec.scheme.tile, dtype)


def _dtype_of(slot: Slot) -> torch.dtype:
    return slot.tensor.dtype if slot.fp8 is None else slot.fp8.compute_dtype


def _assign(
    tree: ModuleTree,
    root: nn.Module,
    slots: tuple[Slot, ...],
    owners: dict[int, nn.Module],
    value: Tensor,
    dtype: torch.dtype | None,
    device: torch.device | None,
) -> nn.Module:
    """Put a tensor into its slots: a copy where the model has real memory, the tensor itself where it is on meta.

    A slot that was FP8 so far gets its ordinary layer back. Returns the root, which may be that layer.
    """
    quantized = [slot for slot in slots if slot.fp8 is not None]
    for slot in quantized:
        root = _restore(tree, root, slot, owners, value.to(_target(slot, device), dtype or _dtype_of(slot), copy=True))
    slots = tuple(slot for slot in slots if slot.fp8 is None)
    if not slots:
        return root
    first = slots[0]
    old = first.tensor
    kind = dtype if dtype is not None and old.is_floating_point() else old.dtype
    where = _target(first, device)
    if not old.is_meta and (old.dtype, old.device) == (kind, where):
        old.copy_(value)
        return root
    new = value.to(device=where, dtype=kind)
    if not old.is_meta and isinstance(old, nn.Parameter):
        old.data = new  # keeps the parameter's identity: ties, optimizers, hooks
        return root
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for slot in slots:
        owner = owners.get(id(slot.owner), slot.owner)
        places: dict[str, Any] = owner._buffers if slot.is_buffer else owner._parameters
        places[slot.leaf] = new
    return root


def _restore(tree: ModuleTree, root: nn.Module, slot: Slot, owners: dict[int, nn.Module], weight: Tensor) -> nn.Module:
    if isinstance(slot.fp8, FP8Layer):
        plain = owners[id(slot.owner)] = slot.fp8.to_float(weight)
        swap(tree, slot.fp8, plain)
        return plain if slot.fp8 is root else root
    unparametrize(slot.owner, slot.leaf, weight)
    return root


@contextmanager
def _meta_buffers(tree: ModuleTree, device: torch.device | None) -> Iterator[None]:
    """Materialise non-persistent meta buffers and let their modules' own hooks fill them; all or nothing."""
    where = device or torch.device("cpu")
    saved = {(id(owner), leaf): (owner, leaf, owner._buffers[leaf]) for owner, leaf in tree.meta_buffers.values()}
    try:
        for owner, leaf, buffer in saved.values():
            assert buffer is not None
            fresh = torch.empty_like(buffer, device=where)
            owner._buffers[leaf] = fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh.zero_()
        for owner in {id(owner): owner for owner, _, _ in saved.values()}.values():
            owner.init_non_persistent_buffers()  # type: ignore[operator]
        empty = [
            name
            for name, (owner, leaf) in tree.meta_buffers.items()
            if (b := owner._buffers[leaf]) is None
            or b.is_meta
            or (b.is_floating_point() and bool(b.isnan().all()) and b.numel())
        ]
        if empty:
            raise LoadError([Problem("meta", n, "init_non_persistent_buffers() left it empty") for n in empty])
        yield
    except BaseException:
        for owner, leaf, buffer in saved.values():
            owner._buffers[leaf] = buffer
        raise


@contextmanager
def _bar(plan: Plan, progress: bool | None) -> Iterator[Any]:
    from tqdm.auto import tqdm

    off = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in ("1", "TRUE", "YES", "ON")
    disable = True if off and progress is None else None if progress is None else not progress
    total = sum(s.ref.nbytes for s in plan.of(Assign))
    total += sum(s.spec.nbytes for kind in (Replace, Dequantize, Parametrize) for s in plan.of(kind))
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading FP8", disable=disable, leave=False) as bar:
        yield bar.update
