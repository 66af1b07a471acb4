import copy

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8 import FP8Conv2d, FP8Embedding, FP8Linear, QuantizationScheme
from anyfp8.errors import BackendError
from anyfp8.layers import LAYERS, FP8Layer
from tests.helpers import (
    E4M3,
    FLOATS,
    FP8_TYPES,
    assert_close,
    assert_same_bytes,
    float_linear,
    make_fp8,
    oracle_weight,
    randn,
)

STATIC = QuantizationScheme(act_dtype=E4M3)


# --- making one ---
@pytest.mark.parametrize("fp8_type", FP8_TYPES.values())
def test_a_constructor_without_arguments_refuses(fp8_type):
    name = fp8_type.__name__
    with pytest.raises(TypeError, match=rf"{name} is made from a float layer: use \.from_float\(.*\) or \.from_codes"):
        fp8_type()


@pytest.mark.parametrize(("float_type", "fp8_type"), FP8_TYPES.items())
def test_a_constructor_called_as_the_float_layers_makes_one(float_type, fp8_type):
    args = (4, 4, 3) if "Conv" in float_type.__name__ else (4, 4)  # PEFT makes its LoRA layers so
    made = fp8_type(*args)
    assert type(made) is float_type
    assert made.weight.requires_grad


@pytest.mark.parametrize("scheme", [STATIC, QuantizationScheme(tile=(1, -1)), "FP8_BLOCK", "FP8_DYNAMIC"])
def test_from_float_quantizes_the_weight(scheme):
    module = float_linear(40, 24)
    layer = make_fp8(module, scheme)
    assert layer.weight_codes.dtype == torch.uint8
    assert layer.weight_codes.shape == (24, 40)
    assert ((oracle_weight(layer) - module.weight).abs() <= module.weight.abs().max() / 16 * (1 + 1e-6)).all()
    assert layer.bias is module.bias
    assert type(module) is nn.Linear


def test_from_float_spells_the_tile_out():
    layer = FP8Conv2d.from_float(nn.Conv2d(2, 4, 3), QuantizationScheme(tile=(1, -1)))
    assert layer.scheme.tile == (1, -1, -1, -1)
    assert layer.weight_scale.shape == (4, 1, 1, 1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_from_float_keeps_the_dtype(dtype):
    layer = make_fp8(float_linear(dtype=dtype))
    assert layer.compute_dtype == layer.weight.dtype == layer.bias.dtype == dtype
    assert layer.weight_scale.dtype == layer.input_scale.dtype == torch.float32


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]], dtype=torch.float64)])
def test_from_float_takes_an_input_scale_of_any_shape(scale):
    assert_same_bytes(FP8Linear.from_float(float_linear(), STATIC, scale).input_scale, torch.tensor([0.5]))


@pytest.mark.parametrize(
    ("scheme", "scale"),
    [(STATIC, None), (QuantizationScheme(), torch.ones(1)), (QuantizationScheme.of("FP8_DYNAMIC"), torch.ones(1))],
)
def test_from_float_wants_an_input_scale_for_static_schemes_only(scheme, scale):
    with pytest.raises(ValueError, match="a static scheme needs an input_scale, and only a static one does"):
        FP8Linear.from_float(float_linear(), scheme, scale)


def test_from_float_refuses_what_is_not_finite():
    module = float_linear()
    module.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="the weight holds NaN or infinite values"):
        make_fp8(module)


def test_from_float_refuses_a_tile_of_another_rank():
    with pytest.raises(ValueError, match="has 2 axes, the tensor"):
        FP8Conv2d.from_float(nn.Conv2d(2, 4, 3), QuantizationScheme(tile=(1, 2)))


# --- what it takes over ---
class Marked(nn.Linear):
    """Not replaced by itself; only a place for attributes."""


def test_attributes_mode_and_gradients_are_kept():
    module = float_linear().eval()
    module.note = "mine"
    module.bias.requires_grad_(False)
    layer = make_fp8(module)
    assert layer.note == "mine"
    assert not layer.training
    assert layer.train().training
    assert not layer.bias.requires_grad
    assert layer.bias is module.bias


def test_no_bias_stays_no_bias():
    layer = make_fp8(float_linear(bias=False))
    assert layer.bias is None
    assert "bias" not in layer.state_dict()
    assert list(layer.parameters()) == []


def test_other_tensors_and_children_are_kept():
    module = float_linear()
    module.register_buffer("counter", torch.tensor(3))
    module.register_parameter("gain", nn.Parameter(torch.ones(2)))
    module.probe = nn.Identity()
    layer = make_fp8(module)
    assert layer.counter is module.counter
    assert layer.gain is module.gain
    assert layer.probe is module.probe


def test_hooks_from_before():
    module = float_linear()
    calls = []
    handles = [
        module.register_forward_pre_hook(lambda m, args: calls.append(("before", type(m)))),
        module.register_forward_hook(lambda m, args, out: calls.append(("after", type(m)))),
        module.register_forward_hook(lambda m, args, out: out * 2),
        module.register_forward_pre_hook(lambda m, args, kwargs: calls.append(sorted(kwargs)), with_kwargs=True),
    ]
    layer = make_fp8(module)
    x = randn(2, 32)
    doubled = layer(input=x)
    assert calls == [("before", FP8Linear), ["input"], ("after", FP8Linear)]
    for handle in handles:
        handle.remove()
    assert_close(layer(x) * 2, doubled)
    assert len(calls) == 3


def test_hooks_from_after():
    layer = make_fp8(float_linear())
    x = randn(2, 32)
    want = layer(x)
    seen = []
    with_pre = layer.register_forward_pre_hook(lambda m, args: (args[0] * 0,))
    assert_close(layer(x), layer.bias.expand(2, 16))
    with_pre.remove()
    handle = layer.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(grad_out[0].shape))
    layer(x.requires_grad_()).sum().backward()
    handle.remove()
    assert seen == [(2, 16)]
    assert_same_bytes(layer(x).detach(), want.detach())


def test_a_wrapped_forward_can_be_called_on_the_class():
    """LoRA and accelerate call `type(layer).forward(layer, x)` or keep `layer.forward` and call it later."""
    layer = make_fp8(float_linear())
    x = randn(2, 32)
    want = layer(x)
    kept = layer.forward
    layer.forward = lambda input: kept(input) + 1
    assert_close(layer(x), want + 1)
    assert_same_bytes(type(layer).forward(layer, x).detach(), want.detach())


# --- backends of one layer ---
def test_the_backend_is_chosen_before_the_forward(monkeypatch):
    layer = make_fp8(float_linear())

    def never(*args):
        raise AssertionError("asked inside the forward")

    monkeypatch.setattr(type(layer.backend), "check", never)
    monkeypatch.setattr("anyfp8.layers.mixin.select", never)
    layer(randn(2, 32))


def test_select_backend_and_its_reasons():
    layer = make_fp8(float_linear())
    assert layer.backend.name == "emulated"
    assert list(layer.refusals) == ["native"]
    layer.select_backend("native")
    assert (layer.backend.name, layer.refusals) == ("native", {})
    layer.select_backend("auto")
    assert layer.backend.name == "emulated"
    with pytest.raises(BackendError, match="unknown backend 'fast'"):
        layer.select_backend("fast")
    assert layer.backend.name == "emulated"


def test_repr_shows_scheme_and_backend():
    text = repr(nn.Sequential(make_fp8(float_linear())))
    assert "FP8Linear(in_features=32, out_features=16, bias=True, e4m3fn per channel, input static e4m3fn" in text
    assert "backend=emulated" in text


@pytest.mark.parametrize("weight_dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_fp8_dtype(weight_dtype):
    assert make_fp8(float_linear(), QuantizationScheme(weight_dtype)).fp8_dtype == getattr(torch, weight_dtype)


# --- backends of a model ---
def model():
    return nn.Sequential(
        make_fp8(float_linear()),
        nn.ReLU(),
        nn.ModuleDict({"conv": make_fp8(nn.Conv2d(2, 4, 3)), "table": make_fp8(nn.Embedding(4, 4), "FP8_WEIGHT_ONLY")}),
        make_fp8(float_linear(16, 8), "FP8_WEIGHT_ONLY"),
        make_fp8(float_linear(16, 8), "FP8_WEIGHT_ONLY"),
    )


def backends_of(module):
    return {name: m.backend.name for name, m in module.named_modules() if isinstance(m, FP8Layer)}


def test_set_backend_is_all_or_nothing():
    net = model()
    before = backends_of(net)
    with pytest.raises(BackendError, match="backend 'native' can't run 3 of the layers:") as caught:
        anyfp8.set_backend(net, "native")
    assert set(caught.value.refusals) == {"2.conv", "3", "4"}
    assert caught.value.refusals["2.conv"] == "torch has no FP8 convolution"
    assert "{3,4}: weight-only" in str(caught.value)
    assert backends_of(net) == before
    assert list(net[0].refusals) == ["native"]


def test_set_backend_reaches_every_layer_but_embeddings():
    net = model()
    anyfp8.set_backend(net, "dequantized")
    assert backends_of(net) == {
        "0": "dequantized",
        "2.conv": "dequantized",
        "2.table": "emulated",
        "3": "dequantized",
        "4": "dequantized",
    }
    anyfp8.set_backend(net, "auto")
    assert set(backends_of(net).values()) == {"emulated"}


def test_set_backend_on_a_layer_itself():
    layer = make_fp8(float_linear())
    anyfp8.set_backend(layer, "native")
    assert layer.backend.name == "native"
    with pytest.raises(BackendError, match="FP8Conv2d: torch has no FP8 convolution"):
        anyfp8.set_backend(make_fp8(nn.Conv2d(2, 4, 3)), "native")


def test_set_backend_of_an_unknown_name_changes_nothing():
    net = model()
    with pytest.raises(BackendError, match="unknown backend 'cutlass'; known: auto, native"):
        anyfp8.set_backend(net, "cutlass")
    assert set(backends_of(net).values()) == {"emulated"}


def test_set_backend_reaches_a_shared_layer_once():
    layer = make_fp8(float_linear())
    net = nn.ModuleDict({"a": layer, "b": layer})
    anyfp8.set_backend(net, "native")
    assert layer.backend.name == "native"


# --- back to float ---
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_dequantize_gives_the_ordinary_layers_back(dtype):
    net = model()
    weights = {name: oracle_weight(m).float() for name, m in net.named_modules() if isinstance(m, FP8Layer)}
    biases = dict(net.named_parameters())
    assert anyfp8.dequantize(net, dtype) is net
    assert not any(isinstance(m, FP8Layer) for m in net.modules())
    for name, want in weights.items():
        module = net.get_submodule(name)
        assert type(module) in LAYERS
        assert_same_bytes(module.weight.detach(), want.to(dtype or torch.float32))
        assert module.weight.requires_grad
    for name, bias in biases.items():
        assert net.get_parameter(name) is bias


def test_dequantize_of_a_layer_itself_returns_a_new_one():
    layer = make_fp8(float_linear())
    want = oracle_weight(layer).float()
    plain = anyfp8.dequantize(layer)
    assert type(plain) is nn.Linear
    assert_same_bytes(plain.weight.detach(), want)
    assert plain.bias is layer.bias


def test_dequantize_keeps_hooks():
    net = nn.Sequential(make_fp8(float_linear()))
    net[0].register_forward_hook(lambda m, args, out: out * 0)
    anyfp8.dequantize(net)
    assert net(randn(2, 32)).abs().sum() == 0


def test_a_deepcopied_model_is_independent():
    net = model()
    twin = copy.deepcopy(net)
    anyfp8.dequantize(twin)
    anyfp8.set_backend(net, "dequantized")
    assert isinstance(net[0], FP8Linear)
    assert isinstance(net[2]["table"], FP8Embedding)
    assert type(twin[0]) is nn.Linear
