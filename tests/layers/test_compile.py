"""One graph under torch.compile, and torch.export, with the numbers of eager mode."""

import pytest
import torch
from torch import nn

from anyfp8 import QuantizationScheme
from tests.helpers import E4M3, E5M2Z, assert_close, assert_same_bytes, float_linear, make_fp8, oracle_forward, randn

STATIC = QuantizationScheme(tile=(1, -1), act_dtype=E4M3)
TOKEN = QuantizationScheme(tile=(1, -1), act_dtype=E4M3, act_dynamic=True, act_tile=(1, -1))
GROUPS = QuantizationScheme(tile=(1, 8), act_dtype=E4M3, act_dynamic=True, act_tile=(1, 5))
WEIGHT_ONLY = QuantizationScheme(tile=(5, 7))
#: name → (layer, input, the same with another batch)
CASES = {
    "static": (make_fp8(float_linear(), STATIC), randn(4, 32), randn(9, 32)),
    "token": (make_fp8(float_linear(), TOKEN), randn(4, 32), randn(9, 32)),
    "groups": (make_fp8(float_linear(), GROUPS), randn(4, 32), randn(9, 32)),
    "weight-only": (make_fp8(float_linear(), WEIGHT_ONLY), randn(4, 32), randn(9, 32)),
    "e5m2fnuz": (make_fp8(float_linear(), QuantizationScheme(E5M2Z)), randn(4, 32), randn(9, 32)),
    "conv": (make_fp8(nn.Conv2d(2, 4, 3, padding=1), STATIC), randn(4, 2, 5, 6), randn(9, 2, 5, 6)),
    "embedding": (
        make_fp8(nn.Embedding(10, 8), QuantizationScheme(tile=(3, 4))),
        torch.arange(12).reshape(4, 3) % 10,
        torch.arange(27).reshape(9, 3) % 10,
    ),
}


class Model(nn.Module):
    """What real models do besides calling a layer: they read the dtype and the shape of its weight."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        if x.is_floating_point():
            x = x.to(self.layer.weight.dtype)
        return self.layer(x) * self.layer.weight.shape[0]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize("case", ["groups", "weight-only", "e5m2fnuz"])
def test_compile(case):
    layer, x, _ = CASES[case]
    with torch.no_grad():
        got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert_same_bytes(got, layer(x))


@pytest.mark.parametrize("case", ["static", "token", "conv", "embedding"])
def test_compile_with_a_dynamic_batch_makes_one_graph(case):
    layer, x, other = CASES[case]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(Model(layer), fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for value in (x, other, torch.cat([x, other])):
            assert_same_bytes(compiled(value), layer(value) * layer.weight_codes.shape[0])
    assert len(graphs) == 1


@pytest.mark.parametrize("case", ["groups", "conv", "embedding"])
def test_export(case):
    layer, x, other = CASES[case]
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(Model(layer).eval(), (x,), dynamic_shapes=({0: batch},))
    with torch.no_grad():
        for value in (x, other):
            assert_same_bytes(exported.module()(value), layer(value) * layer.weight_codes.shape[0])


def test_gradients_through_a_compiled_layer():
    layer, x, _ = CASES["token"]
    found = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        value = x.clone().requires_grad_()
        layer.zero_grad()
        call(value).square().sum().backward()
        found.append((value.grad, layer.bias.grad.clone()))
    for got, want in zip(*found, strict=True):
        assert_close(got, want, 1e-6)


def test_compiling_under_autocast():
    layer, x, _ = CASES["static"]
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bytes(compiled(x), layer(x))
        assert compiled(x).dtype == torch.bfloat16
    with torch.no_grad():
        assert_same_bytes(compiled(x), layer(x))


def test_another_backend_after_compiling():
    """`set_backend` must not be ignored by a graph that was made before."""
    layer = make_fp8(float_linear(), STATIC, input_scale=1e-4)
    x = randn(4, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        saturated = compiled(x)
        layer.select_backend("dequantized")
        assert_same_bytes(compiled(x), layer(x))
    assert (layer(x) - saturated).abs().max() > 0.1


def test_new_scales_reach_a_compiled_layer():
    layer = make_fp8(float_linear(), STATIC)
    x = randn(4, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    compiled(x)
    layer.weight_scale.mul_(3)
    assert_close(compiled(x), oracle_forward(layer, x), 1e-6)


@pytest.mark.parametrize(("scheme", "grad"), [(STATIC, False), (TOKEN, True)])
def test_the_native_backend_compiles(scheme, grad):
    """On a GPU that is what a compiled model runs; a bias that could be trained is the usual case."""
    layer = make_fp8(float_linear(30, 10), scheme)
    layer.select_backend("native")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 9):
        x = randn(rows, 30).requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            got, want = compiled(x), layer(x)
        assert_close(got, want, 1e-6)
        if grad:
            (want_grad,) = torch.autograd.grad(want.sum(), x)
            (got_grad,) = torch.autograd.grad(got.sum(), x)
            assert_close(got_grad, want_grad, 1e-6)


def test_the_native_backend_exports():
    layer = make_fp8(float_linear(30, 10), TOKEN)
    layer.select_backend("native")
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(layer.eval(), (randn(4, 30),), dynamic_shapes=({0: batch},))
    x = randn(9, 30)
    assert_close(exported.module()(x), layer(x), 1e-6)
