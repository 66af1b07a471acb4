"""Every error that anyfp8 raises on purpose.

    AnyFP8Error(RuntimeError)
    ├── SchemeError(ValueError)    a quantization scheme has an unknown key or value
    ├── CheckpointError            a file or folder can't be read, or lies about what it holds
    ├── DialectError               no dialect, or more than one, claims the checkpoint
    ├── LoadError                  file and model don't fit; `.problems` lists every one of them
    ├── BackendError               a backend can't run a layer; `.refusals` says which and why
    ├── CalibrationError           calibration saw no input, or no usable one, for some layers
    └── ReadOnlyWeightError        a write to the decoded weight of an FP8 layer, which would be lost

A failed call leaves the model that was passed in as it was, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anyfp8.folding import fold


class AnyFP8Error(RuntimeError):
    """Base of all errors of this package."""


class SchemeError(AnyFP8Error, ValueError):
    """A quantization scheme has an unknown key or an impossible value."""


class CheckpointError(AnyFP8Error):
    """A checkpoint's files can't be read, or contradict themselves."""


class DialectError(AnyFP8Error):
    """No dialect recognises the checkpoint, or more than one does."""


class CalibrationError(AnyFP8Error):
    """Calibration gave no usable input for some layers."""


class ReadOnlyWeightError(AnyFP8Error):
    """Somebody wrote to the decoded weight of an FP8 layer."""


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a checkpoint from being loaded into a model.

    `kind` is one of the headings in `HEADINGS`, `name` a tensor or module of the file or model, `file` where it is
    stored, `detail` what is wrong with it (equal details are printed once, with their names folded).
    """

    kind: str
    name: str
    detail: str = ""
    file: str = ""


HEADINGS = {
    "contradiction": "the manifest and the tensors contradict each other",
    "missing": "missing from the checkpoint",
    "unexpected": "in the checkpoint, but not in the model",
    "unclaimed": "in the checkpoint, but nothing uses it",
    "mismatched": "of another shape or dtype than expected",
    "invalid": "unusable values",
    "unsupported": "can't be loaded as FP8",
    "meta": "would be left on the meta device",
    "ambiguous": "ambiguous",
}


class LoadError(AnyFP8Error):
    """Checkpoint and model don't fit together; `problems` holds all the reasons, not just the first."""

    def __init__(self, problems: Sequence[Problem], source: str = "", hint: str = "") -> None:
        self.problems, self._rest = tuple(problems), (source, hint)
        super().__init__(describe(self.problems, source, hint))

    def __reduce__(self) -> tuple[type[LoadError], tuple[Sequence[Problem], str, str]]:
        return type(self), (self.problems, *self._rest)


def describe(problems: Sequence[Problem], source: str = "", hint: str = "") -> str:
    """The problems as text: grouped by kind, equal details together, names folded."""
    lines = [f"{source or 'the checkpoint'} can't be loaded ({len(problems)} problem{'s' * (len(problems) != 1)}):"]
    for kind, heading in HEADINGS.items():
        groups: dict[tuple[str, str], list[str]] = {}
        for problem in problems:
            if problem.kind == kind:
                groups.setdefault((problem.file, problem.detail), []).append(problem.name)
        if groups:
            lines.append(f"  {heading}:")
        for (file, detail), names in groups.items():
            lines.append(f"    {', '.join(fold(names))}" + f" in {file}" * bool(file) + f": {detail}" * bool(detail))
    if hint:
        lines.append(f"  {hint}")
    return "\n".join(lines)


class BackendError(AnyFP8Error):
    """A backend was asked for that can't run some layer; `refusals` maps layer names to reasons."""

    def __init__(self, message: str, refusals: dict[str, str] | None = None) -> None:
        self.refusals = dict(refusals or {})
        super().__init__(with_reasons(message, self.refusals))


def with_reasons(message: str, refusals: Mapping[str, str]) -> str:
    """The message, and under it each reason with the (folded) names that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        by_reason.setdefault(reason, []).append(name)
    return "\n".join([message] + [f"    {', '.join(fold(names))}: {reason}" for reason, names in by_reason.items()])
