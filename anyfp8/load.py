"""`load`: plan, then apply. Whatever can fail on content fails before the first change to the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from anyfp8 import dialects
from anyfp8.backends import check_name
from anyfp8.checkpoint import Checkpoint
from anyfp8.errors import AnyFP8Error
from anyfp8.manifest import Manifest
from anyfp8.naming import Rename
from anyfp8.plan import Plan
from anyfp8.report import attach_plan

#: files are read to the CPU, whatever default device the caller has set
_CPU = torch.device("cpu")

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
    from anyfp8.planner import build_plan

    check_name(backend)
    _check_target(dtype, device)
    with _CPU:
        manifest = inspect(source, dialect=dialect, revision=revision, subfolder=subfolder, token=token)
        for ref in manifest.checkpoint.tensors.values():
            ref.map()
        made = build_plan(model, manifest, include=include, exclude=exclude, rename=rename, strict=strict)
        problems, notes = (*made.problems, *manifest.value_problems()), (*made.notes, *manifest.value_notes())
        return replace(made, problems=problems, notes=notes)


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
        dtype=dtype,
        device=device,
        include=include,
        exclude=exclude,
        rename=rename,
        strict=strict,
        revision=revision,
        subfolder=subfolder,
        token=token,
    )
    made.raise_problems()
    from anyfp8.apply import apply_plan  # as the planner: only where it is used, for a cheap `import anyfp8`

    where = None if device is None else torch.device(device)
    with _CPU:
        root = apply_plan(made, backend=backend, dtype=dtype, device=where, progress=progress)
    attach_plan(root, made)
    return root


def _check_target(dtype: torch.dtype | None, device: torch.device | str | None) -> None:
    """Refuse, before anything is read, a dtype or device that tensors can't be put to."""
    if dtype is not None and dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise AnyFP8Error(f"dtype is {dtype!r}; valid: torch.float32, bfloat16, float16, float64, or None")
    if device is None:
        return
    try:
        where = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise AnyFP8Error(f"device {device!r} can't be used: {error}") from None
    if where.type == "meta":
        raise AnyFP8Error("device is meta, where no tensor has values; pass the device that the model shall run on")
