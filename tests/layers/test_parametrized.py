"""Codes behind a parameter of any module, decoded on access."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyfp8 import QuantizationScheme, ReadOnlyWeightError
from anyfp8.layers import DecodedParameter, parametrize_codes, unparametrize
from anyfp8.numerics import quantize_tiled
from tests.helpers import (
    E4M3,
    FLOATS,
    ORACLES,
    assert_close,
    assert_same_bytes,
    bytes_of,
    oracle_decode,
    oracle_expand,
    randn,
)


class Doubling(nn.Linear):
    """A subclass with a forward of its own, which anyfp8 must not replace."""

    def forward(self, x):
        return 2 * F.linear(x, self.weight, self.bias)


def part(weight, tile=(1, -1), format=E4M3):
    """(scheme, values) of a float weight, and what it decodes to in float64."""
    codes, scale = quantize_tiled(weight, format, tile)
    values = {"weight_codes": codes.view(torch.uint8), "weight_scale": scale}
    decoded = oracle_decode(values["weight_codes"], format) * oracle_expand(scale, weight.shape, tile)
    return (QuantizationScheme(format, tile), values), decoded


def doubling(tile=(1, -1), format=E4M3, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Doubling(32, 16).to(dtype)
    one, decoded = part(module.weight, tile, format)
    parametrize_codes(module, "weight", [one], dtype)
    return module, decoded


@pytest.mark.parametrize("tile", [(-1, -1), (1, -1), (1, 8), (5, 7)])
@pytest.mark.parametrize("format", ORACLES)
def test_a_linear_subclass_runs_its_own_forward(tile, format):
    module, decoded = doubling(tile, format)
    x = randn(3, 32)
    assert isinstance(module, Doubling)
    assert_same_bytes(module.weight.clone(), decoded.float())
    assert_close(module(x), 2 * F.linear(x.double(), decoded, module.bias.double()), 1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_decodes_to_its_dtype(dtype):
    module, decoded = doubling(dtype=dtype)
    want = decoded if dtype == torch.float64 else decoded.float().to(dtype)
    assert_same_bytes(module.weight.clone(), want)
    assert module(randn(2, 32).to(dtype)).dtype == dtype


def test_only_codes_and_scales_are_resident():
    module, _ = doubling()
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    assert sum(t.nbytes for n, t in tensors.items() if n != "bias") == 16 * 32 + 16 * 4
    assert all(not p.requires_grad for n, p in module.named_parameters() if n != "bias")


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.half(), torch.float16),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.half().float(), torch.float32),
        (lambda m: m._apply(lambda t: t.half()), torch.float16),
    ],
)
def test_casts_keep_bytes(cast, dtype):
    module, decoded = doubling()
    before = {n: bytes_of(b) for n, b in module.named_buffers()}
    cast(module)
    assert {n: bytes_of(b) for n, b in module.named_buffers()} == before
    want = decoded if dtype == torch.float64 else decoded.float().to(dtype)
    assert_same_bytes(module.weight.clone(), want)
    assert module(randn(2, 32).to(dtype)).dtype == dtype


def test_gradients_reach_the_input():
    module, decoded = doubling()
    x = randn(3, 32).requires_grad_()
    module(x).sum().backward()
    assert_close(x.grad, 2 * decoded.sum(0).expand(3, 32), 1e-6)


def test_deepcopy_and_state_dict():
    module, decoded = doubling()
    twin = copy.deepcopy(module)
    assert_same_bytes(twin.weight.clone(), module.weight.clone())
    other, _ = doubling()
    other.load_state_dict({k: torch.zeros_like(v) for k, v in other.state_dict().items()})
    assert other.weight.abs().sum() == 0
    other.load_state_dict(module.state_dict())
    assert_same_bytes(other.weight.clone(), decoded.float())
    assert_same_bytes(twin.weight.clone(), decoded.float())


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.weight.data.add_(1),
        lambda m: m.weight.zero_(),
        lambda m: nn.init.zeros_(m.weight),
        lambda m: m.reset_parameters(),
    ],
)
def test_writes_are_refused(write):
    """The same promise as for layers: what is written to a decoded copy would be lost silently."""
    module, decoded = doubling()
    with pytest.raises(ReadOnlyWeightError, match=r"anyfp8\.dequantize"):
        write(module)
    assert_same_bytes(module.weight.clone(), decoded.float())


@pytest.mark.parametrize("value", [nn.Parameter(torch.ones(16, 32)), torch.ones(16, 32)])
def test_assignments_are_refused(value):
    module, decoded = doubling()
    with pytest.raises((ReadOnlyWeightError, RuntimeError, KeyError), match=r"weight|right_inverse"):
        module.weight = value
    assert_same_bytes(module.weight.clone(), decoded.float())


def test_loading_over():
    module, _ = doubling()
    other, decoded = part(randn(16, 32, seed=7), (4, 4))
    parametrize_codes(module, "weight", [other], torch.float32)
    assert_same_bytes(module.weight.clone(), decoded.float())
    assert len(module.parametrizations["weight"]) == 1


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_joined(dim):
    """q, k and v that the file stores apart, each with a scheme of its own."""
    weights = [randn(8, 8, seed=i) * 10**i for i in range(3)]
    parts, decoded = zip(
        *[part(w, t, f) for w, t, f in zip(weights, [(-1, -1), (1, -1), (1, 4)], ORACLES, strict=False)], strict=True
    )
    module = nn.Module()
    module.register_parameter("fused", nn.Parameter(torch.cat(weights, dim)))
    parametrize_codes(module, "fused", parts, torch.float32, dim)
    assert_same_bytes(module.fused.clone(), torch.cat(decoded, dim).float())
    decoder = module.parametrizations["fused"][0]
    assert isinstance(decoder, DecodedParameter)
    assert decoder.weight_shape == tuple(module.fused.shape)


def test_a_bare_parameter_of_any_rank():
    module = nn.Module()
    module.register_parameter("experts", nn.Parameter(randn(3, 4, 5)))
    one, decoded = part(module.experts, (1, 1, -1))
    parametrize_codes(module, "experts", [one], torch.float32)
    assert_same_bytes(module.experts.clone(), decoded.float())


def test_unparametrize():
    module, decoded = doubling()
    x = randn(3, 32)
    want = module(x)
    unparametrize(module, "weight", module.weight.clone())
    assert type(module) is Doubling
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.requires_grad
    assert_same_bytes(module.weight.detach(), decoded.float())
    assert_same_bytes(module(x).detach(), want.detach())


# --- attention ---
def attention(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.MultiheadAttention(16, 2, batch_first=True, **options).eval()


def packed(**options):
    """Attention with FP8 codes in `in_proj_weight`, and its float twin."""
    module, twin = attention(**options), attention(**options)
    one, decoded = part(module.in_proj_weight)
    twin.in_proj_weight.data = decoded.float()
    parametrize_codes(module, "in_proj_weight", [one], torch.float32)
    return module, twin


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_attention(grad, need_weights):
    module, twin = packed()
    x = randn(2, 5, 16)
    mask = torch.tensor([[False] * 5, [False, False, False, True, True]])
    with torch.set_grad_enabled(grad):
        got = module(x, x, x, need_weights=need_weights, key_padding_mask=mask)
        want = twin(x, x, x, need_weights=need_weights, key_padding_mask=mask)
    assert_close(got[0], want[0], 1e-5)
    if need_weights:
        assert_close(got[1], want[1], 1e-5)


def test_attention_with_other_keys_and_values():
    module, twin = packed()
    q, k, v = randn(2, 5, 16), randn(2, 7, 16, seed=1), randn(2, 7, 16, seed=2)
    assert_close(module(q, k, v)[0], twin(q, k, v)[0], 1e-5)


def test_attention_in_an_encoder_layer():
    """Its fast path reads the weights itself."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    twin = copy.deepcopy(encoder)
    one, decoded = part(encoder.self_attn.in_proj_weight)
    twin.self_attn.in_proj_weight.data = decoded.float()
    parametrize_codes(encoder.self_attn, "in_proj_weight", [one], torch.float32)
    x = randn(2, 5, 16)
    with torch.no_grad():
        assert_close(encoder(x), twin(x), 1e-5)


def test_attention_cast_and_copied():
    module, twin = packed()
    x = randn(2, 5, 16)
    assert_close(copy.deepcopy(module).double()(*[x.double()] * 3)[0], twin.double()(*[x.double()] * 3)[0], 1e-6)


@pytest.mark.parametrize("kind", ["linear", "attention"])
def test_compile_and_export(kind):
    torch._dynamo.reset()
    module, args = (doubling()[0], (randn(3, 32),)) if kind == "linear" else (packed()[0], (randn(2, 5, 16),) * 3)
    with torch.no_grad():
        want = module(*args)
        got = torch.compile(module, fullgraph=True, backend="eager")(*args)
        exported = torch.export.export(module.eval(), args).module()(*args)
    for found in (got, exported):
        for a, b in zip(found, want, strict=True) if kind == "attention" else [(found, want)]:
            assert_close(a, b, 1e-5)
