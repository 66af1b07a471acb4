"""`Plan`: all that `load` decides, as steps with reasons, and every problem that keeps it from loading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from anyfp8.checkpoint import TensorRef
from anyfp8.errors import LoadError, Problem
from anyfp8.folding import fold
from anyfp8.layers import FP8Layer
from anyfp8.manifest import LayerSpec, Manifest
from anyfp8.replace import ModuleTree, Slot
from anyfp8.scheme import QuantizationScheme


@dataclass(eq=False)
class Replace:
    """Swap the layer that owns `slot` for an FP8 layer with the codes of `spec`."""

    slot: Slot
    spec: LayerSpec
    layer: type[FP8Layer]
    reason: str = ""


@dataclass(eq=False)
class Parametrize:
    """Keep the codes of `spec` behind the parameter in `slot`; its module's input is not quantized."""

    slot: Slot
    spec: LayerSpec
    reason: str


@dataclass(eq=False)
class Stack:
    """Fill a stacked parameter [experts, rows, columns] from single experts: `parts` of its rows, each of all experts.

    All are quantized (their codes stay, behind the parameter) or, with `decode` or plain tensors, it becomes float.
    """

    slot: Slot
    parts: tuple[tuple[LayerSpec | TensorRef, ...], ...]
    decode: bool
    reason: str

    @property
    def pieces(self) -> tuple[LayerSpec | TensorRef, ...]:
        """All experts of all parts."""
        return tuple(piece for part in self.parts for piece in part)


@dataclass(eq=False)
class Dequantize:
    """Decode `spec` once into the ordinary parameter in `slots` (several, if the model ties them)."""

    slots: tuple[Slot, ...]
    spec: LayerSpec
    reason: str

    @property
    def slot(self) -> Slot:
        """The first of them."""
        return self.slots[0]


@dataclass(eq=False)
class Assign:
    """Take a plain tensor as it is into `slots` (several, if the model ties them)."""

    slots: tuple[Slot, ...]
    ref: TensorRef


@dataclass(eq=False)
class Skip:
    """Leave a tensor of the file unused, for a reason."""

    name: str
    reason: str


Step = Replace | Parametrize | Stack | Dequantize | Assign | Skip


@dataclass(frozen=True, eq=False)
class Plan:
    """All that `load` decides. `steps` if it can be done; `problems` if not (then `raise_problems` raises)."""

    manifest: Manifest
    steps: tuple[Step, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    tree: ModuleTree = field(repr=False)
    hint: str = ""

    @property
    def layer_config(self) -> dict[str, QuantizationScheme]:
        """Model path → scheme, of the layers that will be FP8."""
        return {s.slot.name.rpartition(".")[0]: s.spec.scheme for s in self.of(Replace)}

    def of(self, kind: type[Any]) -> Iterator[Any]:
        """The steps of one kind."""
        return (step for step in self.steps if isinstance(step, kind))

    def raise_problems(self) -> None:
        """Raise LoadError with every problem, if there is any."""
        if self.problems:
            raise LoadError(self.problems, self.manifest.checkpoint.name, self.hint)

    def __str__(self) -> str:
        lines = [f"{self.manifest.checkpoint.name} ({self.manifest.dialect}):"]
        for kind in (Replace, Parametrize, Dequantize):
            groups: dict[str, list[str]] = {}
            for step in self.of(kind):
                why = f": {step.spec.scheme}" + (f" ({step.reason})" if step.reason else "")
                groups.setdefault(why, []).append(step.slot.name)
            lines += [f"  {kind.__name__} {', '.join(fold(names))}{why}" for why, names in groups.items()]
        lines += [f"  Stack {len(step.pieces)} into {step.slot.name} ({step.reason})" for step in self.of(Stack)]
        lines.append(f"  Assign {sum(1 for _ in self.of(Assign))} plain tensors")
        lines += [f"  Skip {step.name}: {step.reason}" for step in self.of(Skip)]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  problem ({p.kind}): {p.name}: {p.detail}" for p in self.problems]
        return "\n".join(lines)
