"""The stand-in must refuse what CUDA refuses, or the native tests show nothing."""

import inspect

import pytest
import torch
from torch.nn.functional import ScalingType, scaled_mm

from tests.helpers import assert_close, randn
from tests.strict_scaled_mm import RuleBroken, StrictScaledMM

M, K, N = 3, 32, 16
BF16, F32 = torch.bfloat16, torch.float32


def call(**changes):
    """A call that is allowed, but for the changes; returns the output."""
    row_wise = changes.pop("row_wise", False)
    op = changes.pop("op", None) or StrictScaledMM()
    recipe = ScalingType.RowWise if row_wise else ScalingType.TensorWise
    arguments = {
        "mat_a": randn(M, K).to(torch.float8_e4m3fn),
        "mat_b": randn(N, K, seed=1).to(torch.float8_e4m3fn).t(),
        "scale_a": torch.full((M, 1) if row_wise else (1, 1), 0.5),
        "scale_recipe_a": recipe,
        "scale_b": torch.full((1, N) if row_wise else (1, 1), 0.25),
        "scale_recipe_b": recipe,
        "output_dtype": BF16,
    }
    return op(**(arguments | changes))


def test_signature_is_the_real_ones():
    assert list(inspect.signature(StrictScaledMM.__call__).parameters)[1:] == list(
        inspect.signature(scaled_mm).parameters
    )


@pytest.mark.parametrize("row_wise", [False, True])
def test_allowed_calls_agree_with_the_real_op(row_wise):
    for changes in ({}, {"bias": randn(N).bfloat16()}):
        want = call(op=scaled_mm, row_wise=row_wise, **changes)
        assert_close(call(row_wise=row_wise, **changes), want, 2**-8)


def test_remembers_its_calls():
    op = StrictScaledMM()
    call(op=op)
    call(op=op, row_wise=True, bias=randn(N).half(), output_dtype=torch.float16)
    assert op.calls == [
        ("TensorWise", BF16, False, (M, K, N)),
        ("RowWise", torch.float16, True, (M, K, N)),
    ]


F8, F8B = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mat_a": randn(K).to(F8)}, "operands must be matrices"),
        ({"mat_a": randn(1, M, K).to(F8)}, "operands must be matrices"),
        ({"mat_a": randn(M, K)}, "operands are torch.float32"),
        ({"mat_a": randn(M, K).to(torch.float8_e4m3fnuz)}, "operands are torch.float8_e4m3fnuz"),
        ({"mat_a": randn(M, K).to(F8B), "mat_b": randn(N, K).to(F8B).t()}, "e5m2 × e5m2 is not supported"),
        ({"mat_a": randn(M, 16).to(F8)}, "shapes can't be multiplied"),
        ({"mat_a": randn(0, K).to(F8)}, "empty operand"),
        ({"mat_a": randn(M, 30).to(F8), "mat_b": randn(N, 30).to(F8).t()}, "K = 30 is no multiple of 16"),
        ({"mat_b": randn(10, K).to(F8).t()}, "N = 10 is no multiple of 16"),
        ({"mat_a": randn(K, M).to(F8).t()}, "a must be row-major"),
        ({"mat_b": randn(K, N).to(F8)}, "b must be column-major"),
        ({"mat_a": torch.empty(M, K + 1, dtype=F8)[:, :K]}, "rows must start at multiples of 16 bytes"),
        ({"scale_a": torch.ones(1, dtype=torch.float64)}, "scales must be float32"),
        ({"scale_a": torch.ones(M, 1)}, "TensorWise scales must have 1 element"),
        ({"scale_recipe_b": ScalingType.RowWise}, "recipes .* differ"),
        ({"row_wise": True, "scale_a": torch.ones(M)}, "RowWise scale_a must be"),
        ({"row_wise": True, "scale_a": torch.ones(1, 1)}, "RowWise scale_a must be"),
        ({"row_wise": True, "scale_b": torch.ones(N, 1)}, "RowWise scale_b must be"),
        ({"row_wise": True, "scale_b": torch.ones(1, 1).expand(1, N)}, "RowWise scales must be contiguous"),
        ({"row_wise": True, "output_dtype": F32}, "no RowWise kernel for a torch.float32 output"),
        ({"output_dtype": torch.float64}, "no kernel for a torch.float64 output"),
        ({"output_dtype": F32, "bias": randn(N)}, "bias is not supported with a float32 output"),
        ({"bias": randn(N)}, "a torch.float32 bias for a torch.bfloat16 output"),
        ({"bias": randn(N).half()}, "a torch.float16 bias for a torch.bfloat16 output"),
        ({"bias": randn(N + 1).bfloat16()}, "bias must be"),
        ({"use_fast_accum": True}, "fast accumulation"),
        ({"bias": randn(N).bfloat16().requires_grad_()}, "no derivative"),
    ],
)
def test_refuses(changes, message):
    assert call().dtype == BF16
    with pytest.raises(RuleBroken, match=message):
        call(**changes)


def test_rocm_has_bfloat16_row_wise_only():
    op = StrictScaledMM(row_wise_outputs=(BF16,))
    call(op=op, row_wise=True)
    with pytest.raises(RuleBroken, match=r"no RowWise kernel for a torch.float16 output"):
        call(op=op, row_wise=True, output_dtype=torch.float16)
