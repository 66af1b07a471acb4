"""Codes and scales keep their bytes through every cast, copy, and round trip."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from anyfp8 import QuantizationScheme
from tests.helpers import E4M3, FLOATS, assert_close, assert_same_bytes, bytes_of, float_linear, make_fp8, randn

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ACT = {"act_dtype": E4M3}


def layers():
    """One of each kind."""
    return {
        "linear": make_fp8(float_linear(), "FP8_STATIC"),
        "dynamic": make_fp8(float_linear(), "FP8_DYNAMIC"),
        "blocks": make_fp8(float_linear(), QuantizationScheme(tile=(5, 8))),
        "conv": make_fp8(nn.Conv2d(4, 6, 3), QuantizationScheme(tile=(1, 2, -1, -1), **ACT)),
        "conv3d": make_fp8(nn.Conv3d(2, 4, 2), QuantizationScheme(tile=(2, 1, -1, -1, -1), **ACT)),
        "embedding": make_fp8(nn.Embedding(10, 8), QuantizationScheme(tile=(1, 4))),
    }


KINDS = list(layers())
kinds = pytest.mark.parametrize("kind", KINDS)


def input_of(layer):
    if isinstance(layer, nn.Embedding):
        return torch.arange(10)
    sizes = {2: (3, 32), 4: (2, 4, 6, 6), 5: (1, 2, 4, 4, 4)}
    return randn(*sizes[layer.weight_codes.dim()])


def bytes_in(layer):
    return {name: (b.dtype, tuple(b.shape), bytes_of(b)) for name, b in layer.named_buffers()}


CASTS = {
    "half": (lambda m: m.half(), F16),
    "bfloat16": (lambda m: m.bfloat16(), BF16),
    "double": (lambda m: m.double(), F64),
    "float": (lambda m: m.float(), F32),
    "to dtype": (lambda m: m.to(BF16), BF16),
    "to keyword": (lambda m: m.to(dtype=F16), F16),
    "to device and dtype": (lambda m: m.to("cpu", F64), F64),
    "to tensor": (lambda m: m.to(torch.zeros(1, dtype=BF16)), BF16),
    "to device": (lambda m: m.to("cpu"), F32),
    "type": (lambda m: m.type(F16), F16),
    "cpu": (lambda m: m.cpu(), F32),
    "bare lambda": (lambda m: m._apply(lambda t: t.half()), F16),
    "bare lambda to": (lambda m: m._apply(lambda t: t.to(BF16)), BF16),
    "clone": (lambda m: m._apply(lambda t: t.clone()), F32),
    "in a parent": (lambda m: nn.ModuleList([nn.Sequential(m)]).to(F64), F64),
    "there and back": (lambda m: m.half().double().bfloat16().float(), F32),
    "eval": (lambda m: m.eval(), F32),
    "requires_grad_": (lambda m: m.requires_grad_(False), F32),
    "share_memory": (lambda m: m.share_memory(), F32),
}


@kinds
@pytest.mark.parametrize(("cast", "dtype"), CASTS.values(), ids=CASTS)
def test_casts_keep_bytes(kind, cast, dtype):
    layer = layers()[kind]
    before = bytes_in(layer)
    cast(layer)
    assert bytes_in(layer) == before
    assert layer.compute_dtype == dtype
    assert layer.weight.dtype == dtype
    if getattr(layer, "bias", None) is not None:
        assert layer.bias.dtype == dtype
    layer(input_of(layer))


def test_type_of_codes_is_never_float8():
    """float8 buffers would be cast by `.half()`."""
    for layer in layers().values():
        assert layer.weight_codes.dtype == torch.uint8
        assert layer.weight_scale.dtype == F32


@kinds
def test_a_cast_changes_the_output_dtype_of_the_weight_only(kind):
    layer = layers()[kind]
    x = input_of(layer)
    want = layer(x)
    layer.half()
    if isinstance(layer, nn.Embedding):
        assert_same_bytes(layer(x), want.half())
    else:
        assert layer(x).dtype == F32
        assert_close(layer(x), want, 1e-3)  # the bias was rounded
        assert layer(x.half()).dtype == F16


@kinds
def test_to_meta(kind):
    layer = layers()[kind]
    shapes = {name: b.shape for name, b in layer.named_buffers()}
    layer.to("meta")
    assert all(t.is_meta for t in [*layer.buffers(), *layer.parameters()])
    assert {name: b.shape for name, b in layer.named_buffers()} == shapes
    assert [b.dtype for b in layer.buffers()] == [torch.uint8] + [F32] * (len(shapes) - 1)
    assert layer.weight.is_meta
    out = layer(input_of(layer).to("meta"))
    assert out.shape == layers()[kind](input_of(layer)).shape


@kinds
def test_to_empty_and_load(kind):
    layer = layers()[kind]
    x = input_of(layer)
    want, state = layer(x), copy.deepcopy(layer.state_dict())
    empty = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    assert not any(t.is_meta for t in [*empty.buffers(), *empty.parameters()])
    assert [b.dtype for b in empty.buffers()] == [b.dtype for b in layer.buffers()]
    empty.load_state_dict(state)
    assert_same_bytes(empty(x).detach(), want.detach())


def test_a_scale_of_any_layout_survives_a_cast():
    """Scales may be views, e.g. rows of a stacked scale or a transpose."""
    layer = make_fp8(float_linear(), QuantizationScheme(tile=(4, 4)))
    want = layer.weight.clone()
    for scale in (layer.weight_scale.t().contiguous().t(), torch.stack([layer.weight_scale] * 2, -1)[..., 0]):
        layer._buffers["weight_scale"] = scale
        layer.to(BF16).to(F32)
        assert_same_bytes(layer.weight.clone(), want)


def test_codes_of_any_layout_survive_a_cast():
    layer = make_fp8(float_linear())
    want = layer.weight.clone()
    layer._buffers["weight_codes"] = layer.weight_codes.t().contiguous().t()
    assert_same_bytes(layer.half().float().weight.clone(), want)


def test_an_error_while_casting_loses_nothing():
    layer = make_fp8(float_linear())
    before = bytes_in(layer)

    def fails(tensor):
        if tensor.numel() == 16:  # the bias
            raise RuntimeError("out of memory")
        return tensor

    with pytest.raises(RuntimeError, match="out of memory"):
        layer._apply(fails)
    assert bytes_in(layer) == before


# --- copies ---
@kinds
def test_deepcopy(kind):
    layer = layers()[kind]
    twin = copy.deepcopy(layer)
    assert type(twin) is type(layer)
    assert (twin.scheme, twin.compute_dtype, twin.refusals) == (layer.scheme, layer.compute_dtype, layer.refusals)
    assert twin.backend.name == layer.backend.name
    assert bytes_in(twin) == bytes_in(layer)
    x = input_of(layer)
    assert_same_bytes(twin(x).detach(), layer(x).detach())
    before = bytes_in(layer)
    twin.weight_codes.zero_()
    twin.half()
    assert bytes_in(layer) == before
    assert layer.compute_dtype == F32


@kinds
def test_pickle(kind):
    layer = layers()[kind]
    twin = pickle.loads(pickle.dumps(layer))
    assert bytes_in(twin) == bytes_in(layer)
    assert twin.scheme == layer.scheme
    x = input_of(layer)
    assert_same_bytes(twin(x).detach(), layer(x).detach())
    assert_same_bytes(twin.half().float().weight.clone(), layer.weight.clone())


@kinds
def test_whole_module_through_torch_save(kind):
    layer = layers()[kind]
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    twin = torch.load(stream, weights_only=False)
    assert bytes_in(twin) == bytes_in(layer)


def test_the_backend_chosen_survives_copies():
    layer = make_fp8(float_linear())
    layer.select_backend("dequantized")
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.backend.name == "dequantized"
        assert_same_bytes(twin(randn(2, 32)).detach(), layer(randn(2, 32)).detach())


# --- state dicts ---
NAMES = {
    "linear": ["bias", "input_scale", "weight_codes", "weight_scale"],
    "dynamic": ["bias", "weight_codes", "weight_scale"],
    "embedding": ["weight_codes", "weight_scale"],
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_in_the_state_dict(kind):
    assert sorted(layers()[kind].state_dict()) == NAMES[kind]


@kinds
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(kind, assign):
    model, other = nn.Sequential(layers()[kind]), nn.Sequential(layers()[kind])
    model[0].weight_codes.copy_(model[0].weight_codes ^ 0x80)  # every sign is another
    model[0].weight_scale.mul_(3)
    assert bytes_in(other[0]) != bytes_in(model[0])
    state = copy.deepcopy(model.state_dict())
    assert str(other.load_state_dict(state, strict=True, assign=assign)) == "<All keys matched successfully>"
    assert bytes_in(other[0]) == bytes_in(model[0])
    if assign:
        assert other[0].weight_codes.data_ptr() == state["0.weight_codes"].data_ptr()
    assert_same_bytes(other.half().float()[0].weight.clone(), model[0].weight.clone())


@kinds
def test_state_dict_through_torch_save(kind):
    layer = layers()[kind]
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    assert {n: bytes_of(t) for n, t in state.items()} == {n: bytes_of(t) for n, t in layer.state_dict().items()}


def test_a_float_state_dict_is_refused_by_name():
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*weight_codes.*Unexpected key.*"weight"'):
        make_fp8(float_linear()).load_state_dict(float_linear().state_dict())


def test_state_dict_of_other_shapes_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch for weight_codes"):
        make_fp8(float_linear()).load_state_dict(make_fp8(float_linear(16, 16)).state_dict())


@pytest.mark.parametrize("dtype", FLOATS)
def test_state_dict_keeps_the_compute_dtype_of_the_model(dtype):
    layer = make_fp8(float_linear(dtype=dtype))
    layer.load_state_dict(make_fp8(float_linear()).state_dict())
    assert layer.weight.dtype == dtype
    assert layer.bias.dtype == dtype


def test_dtype_of_a_model_is_seen_by_its_parameters():
    """Many libraries ask the first floating tensor of a model for its dtype."""
    model = nn.Sequential(make_fp8(float_linear(dtype=BF16)))
    assert next(model.parameters()).dtype == BF16
    assert all(p.dtype == BF16 for p in model.parameters())
