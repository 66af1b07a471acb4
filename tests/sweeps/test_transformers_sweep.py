"""Model types of transformers: quantize, save, load into a fresh meta model, run (tests/sweeps/cycle.py)."""

import time
from fnmatch import fnmatch

import pytest
import torch
from torch import nn

import anyfp8
from tests.sweeps.coverage import Coverage
from tests.sweeps.cycle import Row, cycle
from tests.sweeps.transformers_cases import NOT_RUN
from tests.sweeps.transformers_moe_multimodal import EXPERTS, MULTIMODAL
from tests.sweeps.transformers_text import DECODERS, ENCODER_DECODERS, ENCODERS, STATE_SPACE
from tests.sweeps.transformers_vision_audio import AUDIO, TIME_SERIES, VISION_MODELS

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install anyfp8[transformers]"
)


# TimesFM copies tensors with torch.tensor()
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
#: family → model type → case
CASES = {
    "decoder": DECODERS,
    "encoder": ENCODERS,
    "encoder-decoder": ENCODER_DECODERS,
    "state space": STATE_SPACE,
    "mixture of experts": EXPERTS,
    "vision": VISION_MODELS,
    "audio": AUDIO,
    "time series and others": TIME_SERIES,
    "multimodal": MULTIMODAL,
}
FAST = ("llama", "gpt2", "bert", "t5", "mixtral", "olmo_hybrid", "convnext", "wav2vec2", "llava")


def one(family, name, folder):
    """The row of a model. A layer that refuses to run is a refusal of anyfp8 too."""
    case, row = CASES[family][name], Row("transformers", family, name)
    try:
        cycle(row, case.build, case.run, folder, exclude=case.unreached or None)
    except anyfp8.AnyFP8Error as error:
        row.problem, row.into = f"{type(error).__name__}: {error}", ""
    if case.unreached:
        row.left["left out with exclude=, as no inference calls it"] = len(unreached(case))
    return row


def unreached(case):
    """Names of the layers that the case leaves out."""
    with torch.device("meta"):
        model = case.build()
    names = [
        name for name, module in model.named_modules() if isinstance(getattr(module, "weight", None), nn.Parameter)
    ]
    return [name for name in names if any(fnmatch(name, pattern) for pattern in case.unreached)]


@pytest.mark.parametrize("name", FAST)
def test_a_loaded_model_computes_what_the_quantized_one_does(name, tmp_path):
    family = next(family for family, cases in CASES.items() if name in cases)
    row = one(family, name, tmp_path / "fp8")
    assert row.exact, row
    assert not row.wrong, row
    assert not row.problem
    assert row.fp8 > 0


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_every_model_type(tmp_path):
    coverage, start = Coverage("transformers", transformers.__version__), time.monotonic()
    for family, cases in CASES.items():
        for i, name in enumerate(cases):
            try:
                row = one(family, name, tmp_path / f"{family}-{i}")
            except Exception as error:  # somebody's bug: it must not stop the others, and counts as wrong
                row = Row("transformers", family, name, into="?", problem=f"{type(error).__name__}: {error}")
            coverage.rows.append(row)
    coverage.write(time.monotonic() - start)
    assert not [(row.name, row.problem) for row in coverage.rows if row.wrong]
    assert sum(row.exact for row in coverage.rows) >= 0.95 * len(coverage.rows)


def test_the_sweep_has_at_least_60_model_types():
    names = [name.partition(" (")[0] for cases in CASES.values() for name in cases]
    assert len(set(names)) >= 60
    assert not set(names) & set(NOT_RUN)
