import math

import pytest
import torch
from torch import nn

from anyfp8 import FP8Linear, QuantizationScheme
from tests.helpers import (
    E4M3,
    FLOATS,
    assert_close,
    assert_same_bytes,
    float_linear,
    make_fp8,
    oracle_forward,
    oracle_weight,
    randn,
    sqnr,
)

SCHEMES = {
    "static": QuantizationScheme(tile=(1, -1), act_dtype=E4M3),
    "dynamic per tensor": QuantizationScheme(act_dtype=E4M3, act_dynamic=True),
    "dynamic per token": QuantizationScheme(tile=(1, -1), act_dtype=E4M3, act_dynamic=True, act_tile=(1, -1)),
    "groups": QuantizationScheme(tile=(1, 8), act_dtype=E4M3, act_dynamic=True, act_tile=(1, 8)),
    "ragged groups": QuantizationScheme(tile=(1, 12), act_dtype=E4M3, act_dynamic=True, act_tile=(1, 5)),
    "blocks": QuantizationScheme(tile=(5, 24), act_dtype=E4M3, act_dynamic=True, act_tile=(1, 24)),
    "weight-only": QuantizationScheme(tile=(1, -1)),
}
schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


@schemes
def test_is_a_linear(scheme):
    layer = make_fp8(float_linear(), scheme)
    assert isinstance(layer, nn.Linear)
    assert type(layer) is FP8Linear
    assert (layer.in_features, layer.out_features) == (32, 16)
    assert layer.weight.shape == (16, 32)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


@schemes
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [None, *FLOATS])
def test_output(scheme, dtype, bias):
    layer = make_fp8(float_linear(bias=bias is not None, bias_dtype=bias), scheme)
    for shape in [(32,), (5, 32), (2, 3, 32)]:
        x = randn(*shape).to(dtype)
        got = layer(x)
        assert got.dtype == dtype
        # a weight-only layer decodes its weight to the input's dtype, as a layer of that dtype would store it
        loose = scheme.weight_only and dtype in (torch.bfloat16, torch.float16)
        tolerance = max(1e-6, torch.finfo(dtype).eps * (2 if loose else 0.5))
        assert_close(got, oracle_forward(layer, x), tolerance)


@schemes
def test_stays_close_to_the_float_layer(scheme):
    """The scales are applied, and the right way round: FP8 costs some 30 dB, a wrong scale everything."""
    module = float_linear(512, 64)
    layer = make_fp8(module, scheme, input_scale=4 / 448)
    x = randn(64, 512)
    assert sqnr(layer(x), module(x)) > 28
    layer.weight_scale.mul_(1.2)
    assert sqnr(layer(x), module(x)) < 16


@schemes
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_empty_batch(scheme, shape):
    layer = make_fp8(float_linear(), scheme)
    for dtype in (torch.float32, torch.bfloat16):
        got = layer(torch.empty(shape, dtype=dtype))
        assert got.shape == (*shape[:-1], 16)
        assert got.dtype == dtype


@schemes
def test_layouts(scheme):
    layer = make_fp8(float_linear(), scheme)
    for x in (
        randn(32, 5).t(),
        randn(5, 64)[:, ::2],
        randn(1, 32).expand(5, 32),
        randn(32, 2, 5).permute(1, 2, 0),
        randn(5, 2, 32).transpose(0, 1),
    ):
        kept = x.clone()
        assert_close(layer(x), layer(x.contiguous()), 1e-6)
        assert_same_bytes(x, kept)


@schemes
def test_one_output_feature_and_one_input_feature(scheme):
    for k, n in [(32, 1), (1, 16), (1, 1)]:
        layer = make_fp8(float_linear(k, n), scheme)
        assert_close(layer(randn(3, k)), oracle_forward(layer, randn(3, k)), 1e-6)


@schemes
def test_a_nan_or_inf_row_does_not_leak(scheme):
    """One bad token in a batch must not change the others (per tensor dynamic is the exception that proves it)."""
    layer = make_fp8(float_linear(), scheme)
    x = randn(2, 4, 32)
    want = layer(x)
    bad = x.clone()
    bad[0, 1, 3], bad[1, 2, 5] = math.nan, math.inf
    got = layer(bad)
    rest = torch.ones(2, 4, dtype=torch.bool)
    rest[0, 1] = rest[1, 2] = False
    assert got[0, 1].isnan().all()
    if scheme == SCHEMES["dynamic per tensor"]:
        assert got.isnan().all()
    else:
        assert_same_bytes(got[rest].detach(), want[rest].detach())


@pytest.mark.parametrize("name", ["dynamic per token", "groups", "ragged groups", "blocks"])
def test_a_huge_row_does_not_coarsen_others(name):
    layer = make_fp8(float_linear(), SCHEMES[name])
    x = randn(4, 32)
    want = layer(x)
    x[2] *= 1e6
    got = layer(x)
    for row in (0, 1, 3):
        assert_same_bytes(got[row].detach(), want[row].detach())


@schemes
def test_zero_rows(scheme):
    layer = make_fp8(float_linear(), scheme)
    x = randn(3, 32)
    x[1] = 0
    assert_same_bytes(layer(x)[1].detach(), layer.bias.detach())
    assert_same_bytes(layer(torch.zeros(32)).detach(), layer.bias.detach())


def test_all_zero_weight():
    module = float_linear()
    module.weight.data.zero_()
    for scheme in SCHEMES.values():
        layer = make_fp8(module, scheme)
        assert_same_bytes(layer(randn(3, 32)).detach(), module.bias.detach().expand(3, 16))


@schemes
def test_inference_mode(scheme):
    layer = make_fp8(float_linear(), scheme)
    with torch.inference_mode():
        got = layer(randn(3, 32))
    assert_same_bytes(got.clone(), layer(randn(3, 32)).detach())


@schemes
def test_functional_call(scheme):
    layer = make_fp8(float_linear(), scheme)
    x = randn(3, 32)
    base = layer(x) - layer.bias
    bias = torch.ones(16)
    assert_close(torch.func.functional_call(layer, {"bias": bias}, (x,)), base + 1, 1e-6)
    doubled = torch.func.functional_call(layer, {"weight_scale": layer.weight_scale * 2, "bias": bias}, (x,))
    assert_close(doubled, base * 2 + 1, 1e-6)
    assert_close(layer(x), base + layer.bias, 1e-6)  # nothing is left behind


def test_functional_call_differentiates():
    layer = make_fp8(float_linear(), SCHEMES["static"])
    x, bias = randn(3, 32), torch.zeros(16)
    grad = torch.func.grad(lambda b: torch.func.functional_call(layer, {"bias": b}, (x,)).sum())(bias)
    assert grad.tolist() == [3.0] * 16


@schemes
def test_replaces_torchs_own_linear_subclass_in_attention(scheme):
    """nn.MultiheadAttention reads `out_proj.weight` and never calls the layer."""
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = randn(2, 5, 16)
    attention.out_proj = FP8Linear.from_float(
        attention.out_proj, scheme, torch.tensor([0.02]) if scheme.static else None
    )
    want = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    want.load_state_dict({k: v for k, v in attention.state_dict().items() if "out_proj" not in k}, strict=False)
    want.out_proj.weight.data = oracle_weight(attention.out_proj).float()
    want.out_proj.bias = attention.out_proj.bias
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert_close(attention(x, x, x)[0], want(x, x, x)[0], 1e-5)


def test_the_encoder_layers_fast_path_is_not_taken():
    """In eval mode nn.TransformerEncoderLayer may read the weights itself, and the input would not be quantized."""
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    encoder.linear1 = make_fp8(encoder.linear1, SCHEMES["static"], input_scale=1e-4)  # saturates: easy to see
    called = []
    encoder.linear1.register_forward_hook(lambda *args: called.append(1))
    x = randn(2, 5, 16)
    with torch.no_grad():
        got = encoder(x)
    assert called == [1]
    assert_close(got, encoder(x.requires_grad_()), 1e-5)
