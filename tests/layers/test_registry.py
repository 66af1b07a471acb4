import pytest
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from anyfp8 import layers
from anyfp8.layers import LAYERS, FP8Layer, FP8Linear, register_layer, replacement
from tests.helpers import FP8_TYPES, float_linear, make_fp8, randn


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.fixture
def registry():
    """Undoes every registration."""
    kept = dict(layers._REGISTRY)
    yield
    layers._REGISTRY.clear()
    layers._REGISTRY.update(kept)


@pytest.mark.parametrize(
    "module",
    [nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.Conv3d(2, 2, 1), nn.Embedding(2, 2)],
    ids=lambda m: type(m).__name__,
)
def test_exact_types_are_replaced(module):
    assert replacement(module) == (FP8_TYPES[type(module)], "")


def test_torchs_own_linear_subclass_is_replaced():
    assert replacement(NonDynamicallyQuantizableLinear(2, 2)) == (FP8Linear, "")


def test_fp8_layers_are_loaded_over():
    assert replacement(make_fp8(float_linear())) == (FP8Linear, "")


def forward_on_the_instance():
    module = nn.Linear(2, 2)
    module.forward = lambda x: x
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (OwnForward(2, 2), "OwnForward is a subclass of Linear that may compute something else"),
        (forward_on_the_instance(), "its forward was replaced on the instance"),
        (nn.LayerNorm(2), "LayerNorm is no layer type that has an FP8 version"),
        (nn.ConvTranspose2d(2, 2, 1), "ConvTranspose2d is no layer type that has an FP8 version"),
        (nn.Bilinear(2, 2, 2), "Bilinear is no layer type that has an FP8 version"),
        (nn.EmbeddingBag(2, 2), "EmbeddingBag is no layer type that has an FP8 version"),
        (nn.Embedding(2, 2, max_norm=1.0), "an Embedding with max_norm rewrites its table at each call"),
        (nn.LazyLinear(2), "LazyLinear is a subclass of Linear that may compute something else"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_others_are_not_replaced_and_say_why(module, reason):
    assert replacement(module) == (None, reason)


class Doubled(FP8Linear):
    """For `OwnForward`."""

    def forward(self, input):
        return super().forward(input) * 2


def test_registered_types_are_replaced(registry):
    register_layer(OwnForward, Doubled)
    assert replacement(OwnForward(2, 2)) == (Doubled, "")
    assert LAYERS[OwnForward] is Doubled
    module = OwnForward(32, 16)
    layer = Doubled.from_float(module, make_fp8(float_linear()).scheme, torch.tensor([0.02]))
    x = randn(3, 32)
    assert isinstance(layer, FP8Layer)
    assert (layer(x) - module(x)).abs().max() < module(x).abs().max() * 0.2


@pytest.mark.parametrize("taken", [nn.Linear, nn.Conv2d, nn.Embedding])
def test_a_type_can_be_registered_once(registry, taken):
    with pytest.raises(ValueError, match=f"{taken.__name__} already has FP8{taken.__name__}"):
        register_layer(taken, Doubled)


def test_the_registry_is_read_only():
    with pytest.raises(TypeError, match="does not support item assignment"):
        LAYERS[OwnForward] = Doubled
    assert OwnForward not in LAYERS
