"""`LoadReport`: what the last load did to a model, as plain data, with the backends as they are now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from anyfp8.errors import AnyFP8Error
from anyfp8.folding import fold
from anyfp8.layers import FP8Layer
from anyfp8.manifest import group_by_reason
from anyfp8.plan import Assign, Dequantize, Parametrize, Plan, Replace, Skip, Stack
from anyfp8.replace import ModuleTree
from anyfp8.scheme import QuantizationScheme

_ATTRIBUTE = "_anyfp8_load"


@dataclass(frozen=True)
class LayerReport:
    """One FP8 layer: its scheme, the backend that runs it, why better ones were not taken, and its bytes."""

    scheme: QuantizationScheme
    backend: str
    refusals: dict[str, str]
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class LoadReport:
    """What a load did. layers: module path → LayerReport, read off the model at the time of asking.

    dequantized, skipped: name → reason. assigned: how many plain tensors. notes: what a user should know.
    """

    source: str
    dialect: str
    evidence: str
    layers: dict[str, LayerReport]
    dequantized: dict[str, str]
    skipped: dict[str, str]
    ignored_files: dict[str, str]
    assigned: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        layers = {
            name: {
                "scheme": layer.scheme.to_dict(),
                "backend": layer.backend,
                "refusals": dict(layer.refusals),
                "bytes": layer.nbytes,
                "note": layer.note,
            }
            for name, layer in self.layers.items()
        }
        return {**vars(self), "layers": layers, "notes": list(self.notes)}

    def __str__(self) -> str:
        total = sum(layer.nbytes for layer in self.layers.values())
        lines = [
            f"{self.source}: {self.dialect} ({self.evidence})",
            f"  {len(self.layers)} FP8 layers ({total / 1e6:.1f} MB), {self.assigned} plain tensors",
        ]
        groups: dict[str, list[str]] = {}
        for name, layer in self.layers.items():
            why = "".join(f"; not {b}: {reason}" for b, reason in layer.refusals.items())
            groups.setdefault(f"{layer.scheme} → {layer.backend}{why}{layer.note and '; ' + layer.note}", []).append(
                name
            )
        lines += [f"  {', '.join(fold(names))}: {text}" for text, names in groups.items()]
        for title, table in (
            ("decoded to float", self.dequantized),
            ("skipped", self.skipped),
            ("ignored", self.ignored_files),
        ):
            lines += [f"  {title}: {', '.join(fold(n))} ({why})" for why, n in group_by_reason(table).items()]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def attach_report(
    model: nn.Module,
    *,
    source: str,
    dialect: str,
    evidence: str,
    dequantized: dict[str, str] | None = None,
    skipped: dict[str, str] | None = None,
    ignored_files: dict[str, str] | None = None,
    assigned: int = 0,
    notes: tuple[str, ...] = (),
    layer_notes: dict[str, str] | None = None,
) -> None:
    """Keep on the model what `report` will say besides the layers themselves."""
    kept = {
        "source": source,
        "dialect": dialect,
        "evidence": evidence,
        "dequantized": dequantized or {},
        "skipped": skipped or {},
        "ignored_files": ignored_files or {},
        "assigned": assigned,
        "notes": notes,
    }
    model.__dict__[_ATTRIBUTE] = (kept, layer_notes or {})


def attach_plan(model: nn.Module, plan: Plan) -> None:
    """`attach_report` for what a load did."""
    checkpoint = plan.manifest.checkpoint
    attach_report(
        model,
        source=checkpoint.name,
        dialect=plan.manifest.dialect,
        evidence=plan.manifest.evidence,
        dequantized={s.slot.name: s.reason for s in plan.of(Dequantize)},
        skipped={s.name: s.reason for s in plan.of(Skip)},
        ignored_files=dict(checkpoint.ignored),
        assigned=sum(1 for _ in plan.of(Assign)),
        notes=plan.notes,
        layer_notes={s.slot.name: s.reason for k in (Replace, Parametrize, Stack) for s in plan.of(k) if s.reason},
    )


def report(model: nn.Module) -> LoadReport:
    """What the last `load` or `quantize` did to this model; raises AnyFP8Error if none did."""
    if _ATTRIBUTE not in model.__dict__:
        raise AnyFP8Error(f"this {type(model).__name__} was not loaded by anyfp8.load (or is only a part of what was)")
    kept, notes = model.__dict__[_ATTRIBUTE]
    return LoadReport(layers=layer_reports(model, notes), **kept)


def layer_reports(model: nn.Module, notes: dict[str, str] | None = None) -> dict[str, LayerReport]:
    """The FP8 layers of a model as they are now."""
    notes = notes or {}
    found: dict[str, LayerReport] = {}
    for slot in ModuleTree(model).unique_slots():
        if slot.fp8 is None:
            continue
        size = sum(t.nbytes for t in slot.fp8.buffers())
        name, note = slot.name, notes.get(slot.name, "")
        if isinstance(slot.fp8, FP8Layer):
            layer, name = slot.fp8, name.rpartition(".")[0]
            found[name] = LayerReport(layer.scheme, layer.backend.name, dict(layer.refusals), size, note)
        else:
            found[name] = LayerReport(slot.fp8.scheme, "decoded on access", {}, size, note)
    return found
