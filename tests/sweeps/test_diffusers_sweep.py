"""Every model class of diffusers: quantize, save, load into a fresh meta model, run (tests/sweeps/cycle.py)."""

import time
from collections import Counter
from fnmatch import fnmatch

import pytest
import torch

from anyfp8.layers import LAYERS
from tests.sweeps.coverage import Coverage
from tests.sweeps.cycle import Row, cycle
from tests.sweeps.diffusers_cases import NOT_RUN, every_class, family
from tests.sweeps.diffusers_controlnets import CONTROLNETS
from tests.sweeps.diffusers_images import IMAGES
from tests.sweeps.diffusers_parts import PARTS
from tests.sweeps.diffusers_unets import UNETS
from tests.sweeps.diffusers_vaes import VAES
from tests.sweeps.diffusers_videos import OTHERS, VIDEOS

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install anyfp8[diffusers]")

CASES = UNETS | CONTROLNETS | IMAGES | VIDEOS | OTHERS | VAES | PARTS
#: cross attention, gated and fused layers, tables lost on meta (attributes and buffers), lists of inputs, VAEs
FAST = (
    "UNet2DConditionModel",
    "T2IAdapter",
    "SD3Transformer2DModel",
    "FluxTransformer2DModel",
    "QwenImageTransformer2DModel",
    "ZImageTransformer2DModel",
    "Lumina2Transformer2DModel",
    "WanTransformer3DModel",
    "AutoencoderKL",
    "AutoencoderTiny",
)

#: what the library itself brings about
pytestmark = pytest.mark.filterwarnings(
    "ignore:.* is deprecated and will be removed in version:FutureWarning",
    "ignore:.*weight_norm. is deprecated:FutureWarning",
    "ignore:flex_attention called without torch.compile:UserWarning",
    "ignore:In CPU autocast, but the target dtype is not supported:UserWarning",
    "ignore:To copy construct from a tensor:UserWarning",
    "ignore:.torch.jit.script. is deprecated:FutureWarning",
)


def one(name, folder):
    """The row of a case."""
    case, row = CASES[name], Row("diffusers", family(name), name)
    cycle(row, case.build, case.run, folder, exclude=list(case.leave) or None)
    row.left.update(left_out(case))
    return row


def left_out(case):
    """Reason → how many layers the case leaves out."""
    if not case.leave:
        return {}
    with torch.device("meta"):
        layers = [name for name, module in case.build().named_modules() if type(module) in LAYERS]
    reasons = [next((why for pattern, why in case.leave.items() if fnmatch(name, pattern)), None) for name in layers]
    return Counter(f"left out with exclude=: {why}" for why in reasons if why)


@pytest.mark.parametrize("name", FAST)
def test_a_loaded_model_computes_what_the_quantized_one_does(name, tmp_path):
    row = one(name, tmp_path / "fp8")
    assert row.exact, row
    assert not row.wrong, row
    assert not row.problem
    assert row.fp8 > 0


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_every_model_class(tmp_path):
    start, coverage = time.monotonic(), Coverage("diffusers", diffusers.__version__)
    for number, name in enumerate(CASES):
        try:
            row = one(name, tmp_path / str(number))
        except Exception as error:  # somebody's bug: it must not stop the others, and counts as wrong
            row = Row("diffusers", family(name), name, into="?", problem=f"{type(error).__name__}: {error}")
        coverage.rows.append(row)
    coverage.write(time.monotonic() - start)
    assert not [f"{row.name}: {row.problem}" for row in coverage.rows if row.wrong]
    assert sum(row.exact for row in coverage.rows) >= 0.95 * len(CASES)
    assert {row.family for row in coverage.rows} | NOT_RUN.keys() == every_class()
