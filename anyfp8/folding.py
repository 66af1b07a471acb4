"""Dotted names: joined, and many numbered ones folded into few (`blocks.0.fc` ... become `blocks.{0…11}.fc`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

#: numbers as programs write them; longer ones are no indices
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


def join(path: str, leaf: str) -> str:
    """`path.leaf`; just the leaf at the root, whose path is empty."""
    return f"{path}.{leaf}" if path else leaf


def layer_path(module: str, param: str) -> str:
    """What a quantized weight is called in manifests: the module's path, or the parameter's where it is no `weight`.

    >>> layer_path("blocks.0.fc", "weight"), layer_path("blocks.0.attn", "in_proj_weight")
    ('blocks.0.fc', 'blocks.0.attn.in_proj_weight')
    """
    return module if param == "weight" else join(module, param)


def fold(names: Iterable[str]) -> list[str]:
    """The names, with those that differ only in numbered path components written once, in first-seen order.

    >>> fold(["blocks.0.fc", "head", "blocks.1.fc", "blocks.2.fc", "blocks.5.fc"])
    ['blocks.{0…2,5}.fc', 'head']
    """
    templates: dict[tuple[str | None, ...], list[tuple[int, ...]]] = {}
    for name in dict.fromkeys(names):
        # only canonical numbers fold, so that unfolding is unambiguous ("01" stays as it is)
        parts = [None if _NUMBER.fullmatch(part) else part for part in name.split(".")]
        numbers = tuple(int(p) for p, t in zip(name.split("."), parts, strict=True) if t is None)
        templates.setdefault(tuple(parts), []).append(numbers)
    return [text for parts, numbers in templates.items() for text in _fold_template(parts, numbers)]


def _fold_template(parts: tuple[str | None, ...], numbers: list[tuple[int, ...]]) -> list[str]:
    axes = [sorted({n[i] for n in numbers}) for i in range(len(numbers[0]))]
    if prod(len(axis) for axis in axes) == len(numbers):
        spans = iter(_span(axis) for axis in axes)
        return [".".join(next(spans) if part is None else part for part in parts)]
    # not a full grid: split on the first axis that varies and fold the rest
    axis = next(i for i, values in enumerate(axes) if len(values) > 1)
    out = []
    for value in axes[axis]:
        out += _fold_template(parts, [n for n in numbers if n[axis] == value])
    return out


def _span(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return "{" + ",".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}…{b}" for a, b in runs) + "}"
