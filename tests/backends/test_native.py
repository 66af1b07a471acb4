"""The native backend, on a stand-in for the op that enforces CUDA's rules, against the emulation."""

import math

import pytest
import torch
from torch import nn

from anyfp8.errors import BackendError
from anyfp8.scheme import QuantizationScheme
from tests.helpers import E4M3, E5M2, FLOATS, assert_close, assert_same_bytes, float_linear, make_fp8, randn
from tests.strict_scaled_mm import StrictScaledMM

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIZES = [(32, 16), (30, 10), (3, 5), (48, 7), (7, 48)]
TILES = {"tensor": (-1, -1), "row": (1, -1)}
#: of the input: None is static
INPUTS = {"static": None, "tensor": (-1, -1), "token": (1, -1)}


def scheme(weight="tensor", act="static", weight_dtype=E4M3, act_dtype=E4M3):
    if INPUTS[act] is None:
        return QuantizationScheme(weight_dtype, TILES[weight], act_dtype=act_dtype)
    return QuantizationScheme(weight_dtype, TILES[weight], act_dtype=act_dtype, act_dynamic=True, act_tile=INPUTS[act])


@pytest.fixture
def strict(monkeypatch):
    op = StrictScaledMM()
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", op)
    return op


def pair(module, scheme, **options):
    """One layer on each backend, with the same codes and bias."""
    native, emulated = make_fp8(module, scheme, **options), make_fp8(module, scheme, **options)
    native.select_backend("native")
    assert (native.backend.name, emulated.backend.name) == ("native", "emulated")
    return native, emulated


def assert_agree(native, emulated, x):
    with torch.no_grad():
        got, want = native(x), emulated(x)
    assert got.dtype == want.dtype
    # the float32 sums differ in their last bits; rounded to 16 bits that may become one unit
    assert_close(got, want, max(1e-6, torch.finfo(want.dtype).eps))
    return got


# --- how the op is called ---
def test_the_op_is_called_through_its_module(strict):
    native, emulated = pair(float_linear(), scheme())
    assert_agree(native, emulated, randn(3, 32))
    assert len(strict.calls) == 1


def test_emulated_never_calls_the_op(strict):
    make_fp8(float_linear())(randn(3, 32))
    assert strict.calls == []


@pytest.mark.parametrize(
    ("weight", "act", "dtype", "bias", "want"),
    [
        ("tensor", "static", BF16, BF16, ("TensorWise", BF16, True)),
        ("tensor", "tensor", F16, F16, ("TensorWise", F16, True)),
        ("row", "static", BF16, BF16, ("RowWise", BF16, True)),
        ("tensor", "token", BF16, None, ("RowWise", BF16, False)),
        # a bias that the epilogue can't add in one rounding, or an output that it can't give
        ("tensor", "static", BF16, F32, ("TensorWise", F32, False)),
        ("row", "token", BF16, F16, ("TensorWise", F32, False)),
        ("tensor", "static", F32, F32, ("TensorWise", F32, False)),
        ("row", "token", F64, BF16, ("TensorWise", F32, False)),
    ],
)
def test_the_fastest_legal_kernel_is_used(strict, weight, act, dtype, bias, want):
    native, _ = pair(float_linear(bias=bias is not None, bias_dtype=bias), scheme(weight, act))
    native(randn(3, 32).to(dtype))
    assert strict.calls == [(*want, (3, 32, 16))]


def test_sizes_are_padded_to_16(strict):
    native, _ = pair(float_linear(30, 10), scheme())
    assert native(randn(3, 30)).shape == (3, 10)
    assert strict.calls == [("TensorWise", F32, False, (3, 32, 16))]


def test_the_real_op_on_a_cpu():
    """Without the stand-in: the names and the order of its arguments."""
    for weight in TILES:
        for act in INPUTS:
            native, emulated = pair(float_linear(30, 10), scheme(weight, act))
            for dtype in (F32, BF16):
                assert_agree(native, emulated, randn(3, 30).to(dtype))


# --- agreement with the emulation ---
@pytest.mark.parametrize("weight", TILES)
@pytest.mark.parametrize("act", INPUTS)
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_agrees_for_all_dtypes_and_row_counts(strict, weight, act, k, n):
    cases = 0
    for bias in (None, *FLOATS):
        native, emulated = pair(float_linear(k, n, bias=bias is not None, bias_dtype=bias), scheme(weight, act))
        for dtype in FLOATS:
            for m in (0, 1, 17):
                x = (randn(m, k, seed=m) * 3).to(dtype)
                got = assert_agree(native, emulated, x)
                assert got.shape == (m, n)
                assert got.dtype == dtype
                cases += 1
    assert len(strict.calls) == cases * 2 // 3  # none for empty batches


@pytest.mark.parametrize(("weight_dtype", "act_dtype"), [(E5M2, E4M3), (E4M3, E5M2)])
def test_mixed_formats(strict, weight_dtype, act_dtype):
    for weight in TILES:
        for act in INPUTS:
            native, emulated = pair(float_linear(), scheme(weight, act, weight_dtype, act_dtype))
            assert_agree(native, emulated, randn(5, 32))


@pytest.mark.parametrize("weight", TILES)
@pytest.mark.parametrize("act", INPUTS)
@pytest.mark.parametrize("shape", [(32,), (1, 32), (5, 32), (2, 3, 32), (2, 1, 3, 32), (2, 0, 32), (0, 4, 2, 32)])
def test_ranks_and_empty_batches(strict, weight, act, shape):
    native, emulated = pair(float_linear(), scheme(weight, act))
    with torch.no_grad():
        got = native(randn(*shape))
    assert got.shape == (*shape[:-1], 16)
    assert_agree(native, emulated, randn(*shape))


LAYOUTS = {
    "transposed": lambda: randn(32, 5).t(),
    "strided columns": lambda: randn(5, 64)[:, ::2],
    "strided rows": lambda: randn(10, 32)[::2],
    "odd row stride": lambda: randn(5, 33)[:, :32],
    "expanded": lambda: randn(1, 32).expand(5, 32),
    "permuted 3-D": lambda: randn(32, 2, 5).permute(1, 2, 0),
    "swapped batch": lambda: randn(5, 2, 32).transpose(0, 1),
    "transposed 4-D": lambda: randn(2, 3, 32, 4).transpose(2, 3),
    "offset": lambda: randn(1 + 5 * 32)[1:].view(5, 32),
    "one row transposed": lambda: randn(32, 1).t(),
    "one wide stride": lambda: torch.as_strided(randn(5 * 32), (1, 32), (1, 5)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("act", INPUTS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_layouts(strict, layout, act, dtype):
    native, emulated = pair(float_linear(), scheme("row", act))
    x = LAYOUTS[layout]().to(dtype)
    kept = x.clone()
    got = assert_agree(native, emulated, x)
    assert_same_bytes(got, native(x.contiguous()).detach())
    assert_same_bytes(x, kept)


def test_a_layout_of_the_weight(strict):
    """Codes that are a slice, or transposed, as a fused projection or a checkpoint of [in, out] gives them."""
    native, emulated = pair(float_linear(bias=False), scheme("row"))
    x = randn(5, 32)
    for codes in (native.weight_codes.t().contiguous().t(), torch.cat([native.weight_codes] * 2, 1)[:, :32]):
        native._buffers["weight_codes"] = codes
        assert_agree(native, emulated, x)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("weight", TILES)
@pytest.mark.parametrize("act", INPUTS)
def test_autocast(strict, weight, act, dtype):
    for bias in (None, F32, BF16):
        native, emulated = pair(float_linear(bias=bias is not None, bias_dtype=bias), scheme(weight, act))
        for source in FLOATS:
            x = randn(5, 32).to(source)
            with torch.autocast("cpu", dtype=dtype):
                got = assert_agree(native, emulated, x)
            assert got.dtype == (F64 if source == F64 else dtype)


def test_rocm_rules(strict):
    """ROCm's row-wise kernel gives bfloat16 only, and torch 2.10's on sm89 and sm100 too."""
    strict.row_wise_outputs = (BF16,)
    for act in INPUTS:
        native, emulated = pair(float_linear(bias_dtype=F16), scheme("row", act))
        assert_agree(native, emulated, randn(5, 32).half())


# --- values ---
@pytest.mark.parametrize("act", INPUTS)
def test_saturation_and_zero_rows(strict, act):
    native, emulated = pair(float_linear(), scheme("row", act), input_scale=1e-3)
    x = randn(4, 32) * 50
    x[1] = 0
    got = assert_agree(native, emulated, x)
    assert_same_bytes(got[1], native.bias.detach())


def test_nan_and_inf_stay_in_their_rows(strict):
    x = randn(4, 32)
    x[0, 3], x[2, 5] = math.nan, math.inf
    for act in ("static", "token"):
        native, emulated = pair(float_linear(), scheme("row", act))
        with torch.no_grad():
            got, want = native(x), emulated(x)
        assert got[0].isnan().all()
        assert torch.equal(got.isnan(), want.isnan())
        assert_close(got[[1, 3]], want[[1, 3]])


# --- gradients ---
def gradients(layer, x, grad):
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    layer(x).backward(grad)
    return x.grad, None if layer.bias is None else layer.bias.grad


@pytest.mark.parametrize("shape", [(32,), (1, 32), (5, 32), (2, 3, 32), (0, 32)])
@pytest.mark.parametrize("act", INPUTS)
@pytest.mark.parametrize("bias", [None, F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradients_are_the_emulations(strict, shape, act, bias, dtype):
    native, emulated = pair(
        float_linear(bias=bias is not None, bias_dtype=bias), scheme("row", act), input_scale=2 / 448
    )
    x = (randn(*shape) * 2).to(dtype)
    grad = randn(*shape[:-1], 16, seed=3).to(dtype)
    got, want = gradients(native, x, grad), gradients(emulated, x, grad)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert_close(a, b, max(1e-6, torch.finfo(a.dtype).eps))


def test_gradients_at_the_edge_of_the_range(strict):
    """What calibration's largest value is divided to: exactly ±max."""
    native, emulated = pair(float_linear(4, 16), scheme(), input_scale=0.5)
    x = torch.tensor([[224.0, -224.0, 224.5, 1.0]])
    (got, _), (want, _) = (gradients(layer, x, torch.ones(1, 16)) for layer in (native, emulated))
    assert_close(got, want)


def test_gradients_under_autocast(strict):
    native, emulated = pair(float_linear(), scheme("row", "token"))
    found = []
    for layer in (native, emulated):
        x = randn(5, 32).requires_grad_()
        with torch.autocast("cpu", dtype=BF16):
            y = layer(x)
        y.float().square().sum().backward()
        found.append(x.grad)
    assert found[0].dtype == F32
    assert_close(found[0], found[1], 2**-8)


def test_only_the_bias_needs_a_gradient(strict):
    native, _ = pair(float_linear(), scheme())
    native(randn(3, 32)).sum().backward()
    assert_same_bytes(native.bias.grad, torch.full((16,), 3.0))


def test_no_gradient_where_none_is_needed(strict):
    native, _ = pair(float_linear(bias=False), scheme())
    assert not native(randn(3, 32)).requires_grad
    with torch.no_grad():
        assert not native(randn(3, 32).requires_grad_()).requires_grad
    with torch.inference_mode():
        assert native(randn(3, 32)).is_inference()


# --- refusals ---
def test_convolutions_are_refused():
    layer = make_fp8(nn.Conv2d(2, 4, 3))
    with pytest.raises(BackendError, match="FP8Conv2d: torch has no FP8 convolution"):
        layer.select_backend("native")
    assert layer.backend.name == "emulated"


def test_weight_only_is_refused():
    layer = make_fp8(float_linear(), "FP8_WEIGHT_ONLY")
    with pytest.raises(BackendError, match="FP8Linear: weight-only: the input is not quantized"):
        layer.select_backend("native")
