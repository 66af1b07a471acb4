import pytest
import torch
from torch import nn

from anyfp8 import FP8Conv1d, FP8Conv2d, FP8Conv3d, QuantizationScheme
from tests.helpers import (
    E4M3,
    FLOATS,
    assert_close,
    assert_same_bytes,
    make_fp8,
    oracle_forward,
    randn,
    sqnr,
)

SCHEMES = {
    "static": QuantizationScheme(tile=(1, -1), act_dtype=E4M3),
    "dynamic per tensor": QuantizationScheme(tile=(1, -1), act_dtype=E4M3, act_dynamic=True),
    "dynamic per token": QuantizationScheme(tile=(1, -1), act_dtype=E4M3, act_dynamic=True, act_tile=(1, -1)),
    "groups": QuantizationScheme(tile=(1, -1), act_dtype=E4M3, act_dynamic=True, act_tile=(1, 4)),
    "weight-only": QuantizationScheme(),
}
schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
TYPES = {nn.Conv1d: FP8Conv1d, nn.Conv2d: FP8Conv2d, nn.Conv3d: FP8Conv3d}
SIZES = {nn.Conv1d: (11,), nn.Conv2d: (9, 8), nn.Conv3d: (6, 5, 7)}
OPTIONS = {
    "plain": {},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4},
    "no bias": {"bias": False},
    "pointwise": {"kernel_size": 1},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "replicate": {"padding": 1, "padding_mode": "replicate", "stride": 2},
}


def conv(kind=nn.Conv2d, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(4, 8, **({"kernel_size": 3} | options))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@schemes
def test_output(kind, options, scheme):
    module = conv(kind, **options)
    layer = make_fp8(module, scheme, input_scale=4 / 448)
    assert type(layer) is TYPES[kind]
    assert isinstance(layer, kind)
    x = randn(2, 4, *SIZES[kind])
    got = layer(x)
    assert got.shape == module(x).shape
    assert_close(got, oracle_forward(layer, x), 1e-6)


@schemes
def test_stays_close_to_the_float_layer(scheme):
    module = conv()
    layer = make_fp8(module, scheme, input_scale=4 / 448)
    x = randn(2, 4, 9, 8)
    assert sqnr(layer(x), module(x)) > 25
    layer.weight_scale.mul_(1.2)
    assert sqnr(layer(x), module(x)) < 16


@pytest.mark.parametrize("kind", TYPES)
@schemes
def test_unbatched(kind, scheme):
    layer = make_fp8(conv(kind), scheme)
    x = randn(4, *SIZES[kind])
    assert_close(layer(x), layer(x[None])[0], 1e-6)


@pytest.mark.parametrize("kind", TYPES)
@schemes
def test_empty_batch(kind, scheme):
    module = conv(kind)
    x = torch.empty(0, 4, *SIZES[kind])
    assert make_fp8(module, scheme)(x).shape == module(x).shape


@schemes
@pytest.mark.parametrize("bias", [None, *FLOATS])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(scheme, bias, dtype):
    module = conv(bias=bias is not None)
    if bias is not None:
        module.bias.data = module.bias.data.to(bias)
    layer = make_fp8(module, scheme)
    x = randn(2, 4, 6, 6).to(dtype)
    got = layer(x)
    assert got.dtype == dtype
    loose = scheme.weight_only and dtype in (torch.bfloat16, torch.float16)
    assert_close(got, oracle_forward(layer, x), max(1e-6, torch.finfo(dtype).eps * (2 if loose else 0.5)))


@schemes
def test_layouts(scheme):
    layer = make_fp8(conv(padding=1), scheme)
    x = randn(2, 4, 6, 6)
    want = layer(x)
    for other in (
        x.to(memory_format=torch.channels_last),
        x.transpose(2, 3).contiguous().transpose(2, 3),
        torch.stack([x, x], -1)[..., 0],
    ):
        assert_close(layer(other), want, 1e-6)


@pytest.mark.parametrize("tile", [(1, -1, -1, -1), (-1, -1, -1, -1), (2, 2, -1, -1), (1, 1, 1, 1), (3, 3, 2, 2)])
def test_channels_last_modules(tile):
    """`.to(memory_format=torch.channels_last)` reaches every 4-D buffer, scales included."""
    layer = make_fp8(conv(padding=1), QuantizationScheme(tile=tile, act_dtype=E4M3))
    x = randn(2, 4, 6, 6)
    want, weight, scale = layer(x), layer.weight, layer.weight_scale.clone()
    layer.to(memory_format=torch.channels_last)
    assert layer.weight_codes.is_contiguous(memory_format=torch.channels_last)
    assert_same_bytes(layer.weight_scale, scale)
    assert_same_bytes(layer.weight.clone(), weight.clone())
    assert_close(layer(x.to(memory_format=torch.channels_last)), want, 1e-6)


def test_per_token_is_the_last_dimension():
    """One scale per row of W, for images too: a huge row leaves its neighbours as fine as they were."""
    layer = make_fp8(conv(kernel_size=1), SCHEMES["dynamic per token"])
    x = randn(1, 4, 6, 5)
    want = layer(x)
    x[0, :, 2] *= 1e6
    got = layer(x)
    keep = [0, 1, 3, 4, 5]
    assert_same_bytes(got[:, :, keep].detach(), want[:, :, keep].detach())


def test_weight_gets_no_gradient_and_input_and_bias_do():
    layer = make_fp8(conv(), SCHEMES["static"])
    x = randn(1, 4, 6, 6).requires_grad_()
    layer(x).sum().backward()
    assert x.grad.abs().sum() > 0
    assert_same_bytes(layer.bias.grad, torch.full((8,), 16.0))


def test_functional_call():
    layer = make_fp8(conv(), SCHEMES["static"])
    x = randn(1, 4, 6, 6)
    base = layer(x) - layer.bias.reshape(-1, 1, 1)
    assert_close(torch.func.functional_call(layer, {"bias": torch.ones(8)}, (x,)), base + 1, 1e-6)


@schemes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(scheme, dtype):
    layer = make_fp8(conv(padding=1), scheme)
    for source in FLOATS:
        x, float_layer = randn(1, 4, 5, 5).to(source), conv(padding=1).to(source)
        with torch.autocast("cpu", dtype=dtype):
            got, want = layer(x), float_layer(x)
        assert got.dtype == want.dtype
        assert_close(got, layer(x.float()), torch.finfo(dtype).eps * (8 if scheme.weight_only else 1))
