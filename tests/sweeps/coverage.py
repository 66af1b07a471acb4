"""Collects the rows of a full sweep and writes docs/coverage.md from them."""

import json
import math
from collections import Counter
from pathlib import Path

from tests.sweeps.cycle import Row

DOCS = Path(__file__).parents[2] / "docs"


class Coverage:
    """Rows of one library, kept in `docs/coverage.json` beside those of the others; the table is made anew from all."""

    def __init__(self, library: str, version: str) -> None:
        self.library, self.version = library, version
        self.rows: list[Row] = []

    def write(self, seconds: float, planned: Counter[str] | None = None) -> None:
        """planned: outcome → how many of all the library's names were only planned (on meta)."""
        DOCS.mkdir(exist_ok=True)
        store = DOCS / "coverage.json"
        kept = json.loads(store.read_text()) if store.exists() else {}
        kept[self.library] = {
            "version": self.version,
            "seconds": round(seconds),
            "planned": dict(planned or {}),
            "rows": [clean(row) for row in sorted(self.rows, key=lambda row: (row.family, row.name))],
        }
        store.write_text(json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False) + "\n")
        (DOCS / "coverage.md").write_text(table(kept))


def clean(row: Row) -> dict[str, object]:
    """A row as JSON, without what is empty; decibels with one decimal, infinite ones as null."""
    values = row.to_dict()
    del values["library"]
    for name in ("layers_db", "oracle_db", "sqnr_db"):
        values[name] = round(values[name], 1) if math.isfinite(values[name]) else None
    return {k: v for k, v in values.items() if v not in ({}, "", None)} | {"wrong": row.wrong}


def table(kept: dict[str, dict]) -> str:
    """The page: a summary, then a line a model."""
    lines = [
        "# Coverage",
        "",
        "Written by `scripts/test -m sweep`. Every number and reason is read off plans and reports; `coverage.json`",
        "has them as data. Each model is built small, with random weights, quantized to static FP8 with random",
        "calibration, saved, loaded into a fresh model (on meta, where it can be built there) and run. *Exact*: the",
        "output is the quantized original's, bit for bit. *Layers*: the lowest SQNR of an FP8 layer's output against",
        "an ordinary layer with the decoded weight and the rounded input; *oracle*: of the model's output against a",
        "model of those (deep networks amplify a code that is rounded the other way); *float*: against the float model",
        "(random weights: it says nothing about accuracy).",
        "*Wrong* counts models that load without an error and compute something else.",
        "",
        "| library | names planned right | models | exact | refused | wrong | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for library, found in sorted(kept.items()):
        rows, planned = found["rows"], found["planned"]
        right = f"{planned.get('right', 0)} of {sum(planned.values())}" if planned else ""
        exact, wrong = sum(row["exact"] for row in rows), sum(row["wrong"] for row in rows)
        refused = sum("into" not in row for row in rows)
        lines.append(
            f"| {library} {found['version']} | {right} | {len(rows)} | {exact} ({exact / len(rows):.1%}) "
            f"| {refused} | {wrong} | {found['seconds']} |"
        )
    for library, found in sorted(kept.items()):
        lines += ["", f"## {library}", ""]
        if others := {k: n for k, n in found["planned"].items() if k != "right"}:
            lines += [f"Not planned right: {', '.join(f'{n} × {k}' for k, n in others.items())}", ""]
        lines += [
            "| family | model | FP8 layers | exact | layers dB | oracle dB | float dB | loaded into | reasons |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in found["rows"]:
            reasons = [f"{n} left float: {why}" for why, n in row.get("left", {}).items()]
            reasons += [f"{n} FP8: {why}" for why, n in row.get("notes", {}).items()]
            reasons += [row["problem"]] if "problem" in row else []
            into = row.get("into", "")
            cells = [
                row["family"],
                row["name"],
                row["fp8"],
                "yes" if row["exact"] else "**no**",
                number(row, "layers_db"),
                number(row, "oracle_db"),
                number(row, "sqnr_db"),
                into,
                "; ".join(reasons),
            ]
            lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def number(row: dict, name: str) -> str:
    """Decibels as text."""
    return "∞" if name not in row and row["exact"] else str(row.get(name, ""))
