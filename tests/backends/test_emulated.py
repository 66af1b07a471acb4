"""The reference backend against a float64 oracle that shares no code with it."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyfp8.scheme import QuantizationScheme
from tests.helpers import (
    E4M3,
    E4M3Z,
    E5M2,
    E5M2Z,
    FLOATS,
    MAX,
    ORACLES,
    assert_close,
    assert_same_bytes,
    float_linear,
    make_fp8,
    oracle_forward,
    oracle_input,
    oracle_weight,
    randn,
)


def scheme(act=E4M3, dynamic=None, tile=(-1, -1), weight=E4M3):
    if dynamic is None:
        return QuantizationScheme(weight, tile, act_dtype=act)
    return QuantizationScheme(weight, tile, act_dtype=act, act_dynamic=True, act_tile=dynamic)


TILES = [(-1, -1), (1, -1), (1, 16), (8, 8), (5, 7), (16, -1), (-1, 8)]
INPUTS = [None, (-1, -1), (1, -1), (1, 8), (1, 5)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dynamic", INPUTS)
def test_linear_agrees_with_the_oracle(tile, dynamic):
    layer = make_fp8(float_linear(), scheme(dynamic=dynamic, tile=tile))
    for shape in [(32,), (1, 32), (5, 32), (2, 3, 32), (2, 1, 3, 32)]:
        x = randn(*shape) * 3
        assert_close(layer(x), oracle_forward(layer, x), 1e-6)


@pytest.mark.parametrize(("weight", "act"), list(itertools.product(ORACLES, ORACLES)))
def test_every_pair_of_formats(weight, act):
    for dynamic in (None, (1, -1)):
        layer = make_fp8(float_linear(), scheme(act, dynamic, (1, -1), weight), input_scale=8 / MAX[act])
        x = randn(4, 32) * 4
        assert_close(layer(x), oracle_forward(layer, x), 1e-6)


def test_sums_that_float32_can_hold_are_exact():
    """Codes are small integers and scales powers of two, so nothing may be rounded before the output."""
    layer = make_fp8(nn.Linear(64, 32), scheme(), input_scale=0.25)
    layer.weight_codes.copy_((torch.arange(32 * 64) * 37 % 160 + 40).reshape(32, 64) % 256)
    layer.weight_codes[(layer.weight_codes & 0x7F) > 0x58] = 0x40
    layer.weight_codes[(layer.weight_codes & 0x7F) < 0x38] = 0xC4
    layer.weight_scale.fill_(2.0**-5)
    layer.bias.data = torch.arange(32.0) / 64
    x = torch.arange(-96.0, 96.0).reshape(3, 64) / 16
    want = oracle_forward(layer, x)
    assert len(want.unique()) > 50
    assert layer(x).double().tolist() == want.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [None, (1, -1), (1, 8)])
def test_rounds_once_to_the_output_dtype(dtype, dynamic):
    """Within half a unit in the last place, which rounding twice (or accumulating in the dtype) exceeds."""
    layer = make_fp8(float_linear(512, 64, bias_dtype=dtype), scheme(dynamic=dynamic, tile=(1, -1)))
    x = (randn(16, 512) * 2).to(dtype)
    got, want = layer(x), oracle_forward(layer, x)
    assert got.dtype == dtype
    half = torch.finfo(dtype).eps / 2
    noise = want.abs().max() * 1e-6  # of the float32 sum
    worst = ((got.double() - want).abs() - noise).clamp_min(0) / want.abs()
    assert worst.max() <= half * (1 + 1e-3)
    twice = F.linear(oracle_input(x, layer.scheme, layer.input_scale).to(dtype), oracle_weight(layer).to(dtype))
    twice = twice + layer.bias
    worst = ((twice.double() - want).abs() - noise).clamp_min(0) / want.abs()
    assert worst.max() > half * 1.1, "the bound sees nothing"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [None, *FLOATS])
def test_any_dtype_of_input_and_bias(dtype, bias):
    layer = make_fp8(float_linear(bias=bias is not None, bias_dtype=bias), scheme(tile=(1, -1)))
    x = randn(3, 32).to(dtype)
    got = layer(x)
    assert got.dtype == dtype
    assert_close(got, oracle_forward(layer, x), max(1e-6, torch.finfo(dtype).eps))


CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    "2d": (nn.Conv2d(4, 6, (3, 2), padding=(1, 0), dilation=(2, 1), groups=2), (2, 4, 7, 6)),
    "3d": (nn.Conv3d(2, 4, 2, bias=False), (1, 2, 3, 4, 5)),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("dynamic", INPUTS)
@pytest.mark.parametrize("tile", ["tensor", "channel", "group", "all"])
def test_convolutions_agree_with_the_oracle(kind, dynamic, tile):
    module, shape = CONVOLUTIONS[kind]
    rank = module.weight.dim()
    tile = {"tensor": (-1,) * rank, "channel": (1,) + (-1,) * (rank - 1), "group": (1, 2), "all": (2, 1)}[tile]
    tile = (*tile, *[-1] * (rank - len(tile)))
    layer = make_fp8(module, scheme(dynamic=dynamic, tile=tile))
    for x in (randn(*shape), randn(*shape[1:])):  # batched and not
        assert_close(layer(x), oracle_forward(layer, x), 1e-6)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_modes(mode):
    layer = make_fp8(nn.Conv2d(3, 5, 3, padding=2, padding_mode=mode), scheme())
    x = randn(2, 3, 6, 7)
    assert_close(layer(x), oracle_forward(layer, x), 1e-6)


def test_zero_rows_give_the_bias():
    layer = make_fp8(float_linear(), scheme(dynamic=(1, -1)))
    x = randn(4, 32)
    x[1] = 0
    assert_same_bytes(layer(x)[1], layer.bias.detach())
    assert_same_bytes(layer(torch.zeros(2, 32)), layer.bias.detach().expand(2, 16))


def test_static_inputs_saturate():
    layer = make_fp8(float_linear(bias=False), scheme(), input_scale=0.01)
    x = torch.full((1, 32), 1e9)
    assert_close(layer(x), F.linear(torch.full((1, 32), 4.48).double(), oracle_weight(layer)), 1e-6)
    x[0, 3] = float("inf")
    assert_close(layer(x), F.linear(torch.full((1, 32), 4.48).double(), oracle_weight(layer)), 1e-6)


# --- weight-only ---
@pytest.mark.parametrize("weight", [E4M3, E5M2, E4M3Z, E5M2Z])
@pytest.mark.parametrize("dtype", FLOATS)
def test_weight_only_is_an_ordinary_layer_with_the_decoded_weight(weight, dtype):
    layer = make_fp8(float_linear(), QuantizationScheme(weight, (1, 8)))
    x = randn(3, 32).to(dtype) * 1000  # beyond every format's range at a scale of 1
    assert_same_bytes(layer(x), F.linear(x, oracle_weight(layer).to(dtype), layer.bias.to(dtype)).detach())
    conv = make_fp8(nn.Conv2d(2, 4, 3, padding=1), QuantizationScheme(weight))
    x = randn(1, 2, 5, 5).to(dtype)
    assert_same_bytes(conv(x), F.conv2d(x, oracle_weight(conv).to(dtype), conv.bias.to(dtype), padding=1).detach())


# --- the dequantized backend ---
@pytest.mark.parametrize("dynamic", [None, (1, -1)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dequantized_leaves_the_input_alone(dynamic, dtype):
    layer = make_fp8(float_linear(), scheme(dynamic=dynamic), input_scale=1e-4)
    quantized = layer(randn(2, 32).to(dtype))
    layer.select_backend("dequantized")
    x = randn(2, 32).to(dtype)
    kept = x.clone()
    got = layer(x)
    assert_same_bytes(x, kept)
    assert_same_bytes(got, F.linear(x, oracle_weight(layer).to(dtype), layer.bias.to(dtype)).detach())
    if dynamic is None:
        assert (got - quantized).abs().max() > 0.1  # the static scale would have saturated it


def test_dequantized_convolution():
    layer = make_fp8(nn.Conv2d(2, 4, 3, padding=1), scheme(), input_scale=1e-4)
    layer.select_backend("dequantized")
    x = randn(1, 2, 5, 5)
    want = F.conv2d(x, oracle_weight(layer).float(), layer.bias, padding=1).detach()
    assert_same_bytes(layer(x).detach(), want)


# --- autocast ---
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["emulated", "dequantized"])
def test_autocast_gives_its_dtype(dtype, name):
    layer = make_fp8(float_linear(), scheme())
    layer.select_backend(name)
    for source in FLOATS:
        x = randn(3, 32).to(source)
        with torch.autocast("cpu", dtype=dtype):
            got, want = layer(x), float_linear().to(source)(x)
        assert got.dtype == want.dtype, f"{source} became {got.dtype}, in a float layer {want.dtype}"
        assert layer(x).dtype == source


def test_autocast_does_not_round_the_sum_or_the_codes():
    layer = make_fp8(float_linear(512, 16), scheme(dynamic=(1, -1)))
    x = randn(4, 512)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(x)
    assert_same_bytes(got, layer(x).detach().bfloat16())


# --- gradients ---
@pytest.mark.parametrize("dynamic", [None, (-1, -1), (1, -1), (1, 8)])
@pytest.mark.parametrize("tile", [(1, -1), (1, 8)])
def test_gradients_are_straight_through(dynamic, tile):
    layer = make_fp8(float_linear(), scheme(dynamic=dynamic, tile=tile), input_scale=2 / 448)
    x = (randn(2, 3, 32) * 2).requires_grad_()  # about a third saturates under the static scale
    grad = randn(2, 3, 16, seed=5)
    layer(x).backward(grad)
    want = grad.double() @ oracle_weight(layer)
    if dynamic is None:
        inside = x.detach().abs() <= 2
        assert 0.1 < inside.double().mean() < 0.9
        want = want * inside
    assert_close(x.grad, want, 1e-6)
    assert_close(layer.bias.grad, grad.double().sum((0, 1)), 1e-6)


def test_gradients_of_a_convolution():
    layer = make_fp8(nn.Conv2d(3, 4, 3, padding=1), scheme(), input_scale=10 / 448)
    x = randn(2, 3, 5, 5).requires_grad_()
    grad = randn(2, 4, 5, 5, seed=5)
    layer(x).backward(grad)
    assert_close(x.grad, F.conv_transpose2d(grad.double(), oracle_weight(layer), padding=1), 1e-6)
    assert_close(layer.bias.grad, grad.double().sum((0, 2, 3)), 1e-6)


def test_gradients_of_weight_only_and_dequantized():
    for layer in (make_fp8(float_linear(), "FP8_WEIGHT_ONLY"), make_fp8(float_linear())):
        layer.select_backend("dequantized")
        x = randn(3, 32).requires_grad_()
        layer(x).sum().backward()
        assert_close(x.grad, oracle_weight(layer).sum(0).expand(3, 32), 1e-6)
