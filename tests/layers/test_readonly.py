"""`layer.weight`: reads like a tensor; every kind of write raises, because it would be lost."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anyfp8
from anyfp8 import ReadOnlyWeightError
from tests.helpers import FLOATS, assert_close, assert_same_bytes, float_linear, make_fp8, oracle_weight, randn

ones = torch.ones(16, 32)


def iadd(layer):
    layer.weight += 1


def isub(layer):
    layer.weight -= ones


def imul(layer):
    layer.weight *= 2


def itruediv(layer):
    layer.weight /= 2


def ipow(layer):
    layer.weight **= 2


def data_iadd(layer):
    layer.weight.data += ones


def data_imul(layer):
    layer.weight.data *= 2


def local_iadd(layer):
    w = layer.weight
    w += 1


def set_data(layer):
    layer.weight.data = ones


def set_grad(layer):
    layer.weight.grad = ones


def set_item(layer):
    layer.weight[0] = 0


def set_item_mask(layer):
    layer.weight[layer.weight > 0] = 0


def set_item_data(layer):
    layer.weight.data[1:3, ::2] = 0


def assign_parameter(layer):
    layer.weight = nn.Parameter(ones)


def assign_tensor(layer):
    layer.weight = ones


def assign_none(layer):
    layer.weight = None


def rows(layer):
    for row in layer.weight:
        row.zero_()


def no_grad_copy(layer):
    with torch.no_grad():
        layer.weight.copy_(ones)


WRITES = [
    *(iadd, isub, imul, itruediv, ipow, data_iadd, data_imul, local_iadd, set_data, set_grad, set_item, set_item_mask),
    *(set_item_data, assign_parameter, assign_tensor, assign_none, rows, no_grad_copy),
]
#: what is done to `layer.weight`
IN_PLACE = {
    "copy_": lambda w: w.copy_(ones),
    "zero_": lambda w: w.zero_(),
    "fill_": lambda w: w.fill_(1),
    "normal_": lambda w: w.normal_(),
    "uniform_": lambda w: w.uniform_(),
    "clamp_": lambda w: w.clamp_(-1, 1),
    "masked_fill_": lambda w: w.masked_fill_(ones > 0, 0),
    "index_add_": lambda w: w.index_add_(0, torch.tensor([0]), ones[:1]),
    "addmm_": lambda w: w.addmm_(ones[:, :4], ones[:4]),
    "lerp_": lambda w: w.lerp_(ones, 0.5),
    "resize_": lambda w: w.resize_(2, 2),
    "t_": lambda w: w.t_(),
    "method called on the class": lambda w: torch.Tensor.add_(w, 1),
    "torch.relu_": lambda w: torch.relu_(w),
    "torch.fill_": lambda w: torch.fill_(w, 1),
    "F.relu_": lambda w: F.relu_(w),
    "F.relu inplace": lambda w: F.relu(w, inplace=True),
    "F.relu inplace by position": lambda w: F.relu(w, True),
    "F.dropout inplace": lambda w: F.dropout(w, 0.5, True, True),
    "F.elu inplace": lambda w: F.elu(w, inplace=True),
    "F.normalize out": lambda w: F.normalize(torch.ones_like(w), out=w),
    "foreach": lambda w: torch._foreach_add_([w], 1),
    "foreach copy": lambda w: torch._foreach_copy_([w], [ones]),
    "out": lambda w: torch.add(ones, ones, out=w),
    "out of itself": lambda w: torch.neg(w, out=w),
    "out among several": lambda w: torch.sort(ones, out=(w, torch.zeros(16, 32, dtype=torch.int64))),
    "out view": lambda w: torch.mul(ones[0], 2, out=w[0]),
    "vector_to_parameters": lambda w: nn.utils.vector_to_parameters(ones.flatten(), [w]),
    "merged as PEFT does": lambda w: w.data.add_(ones),
    "detached": lambda w: w.detach().zero_(),
    "data copied": lambda w: w.data.copy_(ones),
}
VIEWS = {
    "index": lambda w: w[0],
    "slice": lambda w: w[2:4, ::2],
    "None index": lambda w: w[None],
    "view": lambda w: w.view(-1),
    "view dtype": lambda w: w.view(torch.int32),
    "reshape": lambda w: w.reshape(8, -1),
    "flatten": lambda w: w.flatten(),
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "movedim": lambda w: w.movedim(0, 1),
    "narrow": lambda w: w.narrow(0, 0, 2),
    "torch.narrow": lambda w: torch.narrow(w, 0, 0, 2),
    "select": lambda w: w.select(0, 1),
    "diagonal": lambda w: w.diagonal(),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "squeeze": lambda w: w.squeeze(),
    "unflatten": lambda w: w.unflatten(0, (4, 4)),
    "unfold": lambda w: w.unfold(0, 2, 2),
    "as_strided": lambda w: w.as_strided((2, 2), (1, 1)),
    "view_as": lambda w: w.view_as(ones),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "real": lambda w: w.real,
    "contiguous": lambda w: w.contiguous(),
    "to": lambda w: w.to(w.dtype),
    "float": lambda w: w.float(),
    "cpu": lambda w: w.cpu(),
    "requires_grad_": lambda w: w.requires_grad_(False),
    "view of a view": lambda w: w.t()[3].view(4, 4).T,
    "chunk": lambda w: w.chunk(2)[1],
    "torch.chunk": lambda w: torch.chunk(w, 2)[0],
    "split": lambda w: w.split(4)[1],
    "torch.split sizes": lambda w: torch.split(w, [4, 12])[1],
    "tensor_split": lambda w: w.tensor_split(2)[0],
    "hsplit": lambda w: w.hsplit(2)[0],
    "unbind": lambda w: w.unbind()[1],
    "torch.unbind": lambda w: torch.unbind(w, 1)[1],
    "iterator": lambda w: next(iter(w)),
    "unpacking": lambda w: (lambda first, *rest: first)(*w),
    "chunk of a chunk": lambda w: w.chunk(2)[0].unbind()[1],
    "broadcast_tensors": lambda w: torch.broadcast_tensors(w, ones)[0],
    "atleast_2d": lambda w: torch.atleast_2d(w),
}
INIT = {
    "normal_": nn.init.normal_,
    "uniform_": nn.init.uniform_,
    "zeros_": nn.init.zeros_,
    "constant_": lambda w: nn.init.constant_(w, 1),
    "trunc_normal_": nn.init.trunc_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "eye_": nn.init.eye_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.1),
}


@pytest.fixture
def layer():
    return make_fp8(float_linear())


def assert_refused(layer, write):
    codes, scale = layer.weight_codes.clone(), layer.weight_scale.clone()
    with pytest.raises(ReadOnlyWeightError, match=r"would be lost: .*Call anyfp8\.dequantize\(model\) first"):
        write()
    assert_same_bytes(layer.weight_codes, codes)
    assert_same_bytes(layer.weight_scale, scale)
    assert (ones == 1).all()


# --- writes ---
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_statements(layer, write):
    assert_refused(layer, lambda: write(layer))


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place_operations(layer, write):
    assert_refused(layer, lambda: write(layer.weight))


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_writes_through_views(layer, view):
    assert_same_bytes(view(layer.weight).clone(), view(oracle_weight(layer).float()))
    assert_refused(layer, lambda: view(layer.weight).zero_())


@pytest.mark.parametrize("init", INIT.values(), ids=INIT)
def test_init(layer, init):
    assert_refused(layer, lambda: init(layer.weight))


def test_init_of_a_convolution():
    layer = make_fp8(nn.Conv2d(2, 4, 3))
    assert_refused(layer, lambda: nn.init.dirac_(layer.weight))
    assert_refused(layer, layer.reset_parameters)


def test_apply_of_an_initialiser(layer):
    """The usual `model.apply(init_weights)`."""

    def init_weights(module):
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)

    assert_refused(layer, lambda: nn.Sequential(nn.ReLU(), layer).apply(init_weights))


def test_reset_parameters(layer):
    assert_refused(layer, layer.reset_parameters)


def test_register_parameter(layer):
    assert_refused(layer, lambda: layer.register_parameter("weight", nn.Parameter(ones)))
    layer.register_parameter("lora_A", nn.Parameter(ones))
    assert dict(layer.named_parameters())["lora_A"] is layer.lora_A


def test_deleting_the_weight(layer):
    with pytest.raises(AttributeError, match="weight"):
        del layer.weight


def test_setting_the_bias_is_fine(layer):
    layer.bias = nn.Parameter(torch.zeros(16))
    layer.bias.data += 1
    layer.bias = None
    assert layer(randn(2, 32)).shape == (2, 16)


# --- reads ---
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scheme", ["FP8", "FP8_STATIC", "FP8_BLOCK", "FP8_WEIGHT_ONLY"])
def test_decodes(scheme, dtype):
    layer = make_fp8(float_linear(130, 140, dtype=dtype), scheme)
    want = oracle_weight(layer)
    weight = layer.weight
    assert weight.dtype == dtype
    assert_same_bytes(weight.clone(), want if dtype == torch.float64 else want.float().to(dtype))
    assert not weight.requires_grad
    assert weight.grad is None
    assert isinstance(weight, torch.Tensor)


def test_each_read_is_fresh(layer):
    assert layer.weight is not layer.weight
    assert layer.weight.data_ptr() != layer.weight_codes.data_ptr()


def test_results_are_ordinary_writable_tensors(layer):
    w = layer.weight
    results = [w + 1, w.clone(), w.double(), w.to(torch.bfloat16), w.sum(), w @ w.t(), w[[0, 1]], w[w > 0], w.abs()]
    results += [torch.cat([w, w]), torch.stack([w, w]), F.linear(ones, w), w.new_zeros(2), torch.zeros_like(w)]
    for result in [*results, *torch.sort(w), *torch.linalg.svd(w)]:
        assert type(result) is torch.Tensor
        result.zero_()
    assert_same_bytes(layer.weight.clone(), oracle_weight(layer).float())


def test_reading_into_other_tensors(layer):
    target = torch.zeros(16, 32)
    target.copy_(layer.weight)
    target += layer.weight
    target[0] = layer.weight[0]
    torch.add(layer.weight, layer.weight, out=target)
    plain = nn.Linear(32, 16)
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
        plain.weight.data.add_(layer.weight)
    assert_same_bytes(plain.weight.detach(), target)


def test_reads_of_every_day(layer):
    w = layer.weight
    assert (w.shape, w.ndim, w.numel(), len(w), w.device.type) == ((16, 32), 2, 512, 16, "cpu")
    assert torch.equal(w, layer.weight)
    assert torch.allclose(w, layer.weight)
    assert w.tolist() == oracle_weight(layer).float().tolist()
    assert w.detach().numpy().shape == (16, 32)
    assert float(w.norm()) > 0
    assert "[[" in repr(w)
    assert nn.utils.parameters_to_vector([w]).shape == (512,)


def test_copies_of_the_weight(layer):
    want = layer.weight.clone()
    for twin in (copy.deepcopy(layer.weight), copy.copy(layer.weight), pickle.loads(pickle.dumps(layer.weight))):
        assert_same_bytes(twin.clone(), want)
    stream = io.BytesIO()
    torch.save({"w": layer.weight}, stream)
    stream.seek(0)
    assert_same_bytes(torch.load(stream, weights_only=True)["w"].clone(), want)


def test_a_parameter_made_from_the_weight_can_be_trained(layer):
    """Copies the weight out; `nn.Parameter(layer.weight)` itself is no write to the layer."""
    parameter = nn.Parameter(layer.weight.clone())
    (parameter.sum() * 2).backward()
    torch.optim.SGD([parameter], 1.0).step()
    assert_close(parameter, oracle_weight(layer) - 2)


def test_freezing_is_no_write(layer):
    """`module.weight.requires_grad = False` is in many training scripts; there is nothing to freeze or to lose."""
    layer.weight.requires_grad_(False)
    layer.weight.requires_grad = False
    layer.requires_grad_(False)


def test_the_weight_of_a_meta_layer_is_read_only_too():
    layer = make_fp8(float_linear()).to("meta")
    assert layer.weight.is_meta
    assert layer.weight.shape == (16, 32)
    with pytest.raises(ReadOnlyWeightError, match=r"anyfp8\.dequantize"):
        layer.weight.zero_()


def test_after_dequantize_writes_are_kept():
    model = nn.Sequential(make_fp8(float_linear()))
    want = oracle_weight(model[0])
    anyfp8.dequantize(model)
    model[0].weight.data += 1
    assert type(model[0]) is nn.Linear
    assert_close(model[0].weight, want + 1)
