"""Stacked experts: in the file, in the model, in both, in neither."""

import copy
import pickle

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8 import FP8Linear
from tests.checkpoints import X, on_meta
from tests.helpers import assert_close, assert_same_bytes, randn

E, ROWS, COLUMNS = 3, 16, 8


class Stacked(nn.Module):
    """Experts as transformers has them: one parameter for all."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(randn(E, 2 * ROWS, COLUMNS))
        self.experts.down_proj = nn.Parameter(randn(E, COLUMNS, ROWS, seed=1))

    def forward(self, x):
        for gate_up, down in zip(self.experts.gate_up_proj, self.experts.down_proj, strict=True):
            gate, up = nn.functional.linear(x, gate_up).chunk(2, -1)
            x = x + nn.functional.linear(torch.tanh(gate) * up, down)
        return x


class Expert(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = names
        for name, shape in zip(names, ((COLUMNS, ROWS), (COLUMNS, ROWS), (ROWS, COLUMNS)), strict=True):
            setattr(self, name, nn.Linear(*shape, bias=False))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(torch.tanh(gate(x)) * up(x))


class Single(nn.Module):
    """Experts as modules of their own."""

    def __init__(self, names=("gate_proj", "up_proj", "down_proj")):
        super().__init__()
        self.experts = nn.ModuleList(Expert(names) for _ in range(E))

    def forward(self, x):
        for expert in self.experts:
            x = x + expert(x)
        return x


def mixtral():
    return Single(("w1", "w3", "w2"))


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["FP8_WEIGHT_ONLY", {"tile": (-1, -1)}, {"tile": (8, 8)}])
@pytest.mark.parametrize("make", [Single, mixtral])
def test_a_stack_in_the_file_goes_to_experts_one_by_one(make, scheme, tmp_path):
    model = anyfp8.quantize(Stacked(), scheme)
    anyfp8.save(model, tmp_path / "q")
    loaded = anyfp8.load(on_meta(make), tmp_path / "q")
    gate, up, down = loaded.experts[0].names
    for i, expert in enumerate(loaded.experts):
        assert {type(m) for m in expert.children()} == {FP8Linear}
        assert_same_bytes(getattr(expert, gate).weight, model.experts.gate_up_proj[i, :ROWS].as_subclass(torch.Tensor))
        assert_same_bytes(getattr(expert, up).weight, model.experts.gate_up_proj[i, ROWS:].as_subclass(torch.Tensor))
        assert_same_bytes(getattr(expert, down).weight, model.experts.down_proj[i].as_subclass(torch.Tensor))
    assert_close(loaded(X), model(X), 1e-5)


def test_blocks_that_reach_over_both_parts_are_refused(tmp_path):
    anyfp8.save(anyfp8.quantize(Stacked(), {"tile": (12, 8)}), tmp_path / "q")
    with pytest.raises(anyfp8.LoadError, match=r"gate_up_proj in .*: the model has its experts one by one.*12"):
        anyfp8.load(Single(), tmp_path / "q")


def test_a_stack_of_another_size_is_unexpected(tmp_path):
    anyfp8.save(anyfp8.quantize(Stacked(), "FP8_WEIGHT_ONLY"), tmp_path / "q")
    model = Single()
    model.experts.append(Expert(("gate_proj", "up_proj", "down_proj")))
    with pytest.raises(anyfp8.LoadError, match=r"(?s)missing.*experts\.3\.gate_proj\.weight"):
        anyfp8.load(model, tmp_path / "q")
    with pytest.raises(anyfp8.LoadError, match=r"(?s)not in the model.*experts\.gate_up_proj"):
        anyfp8.load(nn.ModuleDict({"experts": nn.ModuleList(list(model.experts)[:2])}), tmp_path / "q")


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["FP8_WEIGHT_ONLY", {"tile": (-1, -1)}, {"tile": (8, 8)}, "FP8_DYNAMIC"])
def test_experts_one_by_one_are_stacked_and_saved_and_come_back(scheme, tmp_path):
    single = anyfp8.quantize(Single(), scheme)
    anyfp8.save(single, tmp_path / "single")
    stacked = anyfp8.load(on_meta(Stacked), tmp_path / "single")
    anyfp8.save(stacked, tmp_path / "stacked")
    again = anyfp8.load(on_meta(Stacked), tmp_path / "stacked")
    assert_same_bytes(again(X), stacked(X))
    for i, expert in enumerate(single.experts):
        both = torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
        assert_same_bytes(again.experts.gate_up_proj[i].as_subclass(torch.Tensor), both)
    back = anyfp8.load(on_meta(Single), tmp_path / "stacked")
    assert_close(back(X), stacked(X), 1e-5)


def test_parts_whose_blocks_do_not_fit_together_are_not_saved(tmp_path):
    single = anyfp8.quantize(Single(), {"tile": (12, 8)})
    anyfp8.save(single, tmp_path / "single")
    stacked = anyfp8.load(on_meta(Stacked), tmp_path / "single")
    with pytest.raises(anyfp8.AnyFP8Error, match=r"gate_up_proj can't be saved: its parts"):
        anyfp8.save(stacked, tmp_path / "stacked")
    assert not (tmp_path / "stacked").exists()


# --- a stack is decoded as its experts are used ---
def stack():
    model = anyfp8.quantize(Stacked(), "FP8_WEIGHT_ONLY")
    return model, model.experts.parametrizations


@torch.no_grad()
def test_an_index_decodes_one_expert_alone(monkeypatch):
    model, chains = stack()
    decoder = chains.gate_up_proj[0]
    whole = decoder.decoded(torch.float32)
    asked = []
    plain = type(decoder).decoded
    monkeypatch.setattr(type(decoder), "decoded", lambda *args: asked.append(args[2:]) or plain(*args))
    weight = model.experts.gate_up_proj
    assert (weight.shape, weight.dtype, len(weight), weight.ndim) == ((E, 2 * ROWS, COLUMNS), torch.float32, E, 3)
    assert asked == []
    for index in (0, -1, torch.tensor(1)):
        assert_same_bytes(weight[index].as_subclass(torch.Tensor), whole[index])
    assert asked == [(0,), (-1,), (1,)]
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        weight[3]


@torch.no_grad()
@pytest.mark.parametrize(
    "use",
    [
        lambda w: w[1:],
        lambda w: w[torch.tensor([2, 0])],
        lambda w: w[torch.tensor([True, False, True])],
        lambda w: w[:, 3],
        lambda w: w.transpose(1, 2),
        lambda w: w.mT.contiguous(),
        lambda w: w.to(torch.bfloat16),
        lambda w: w.detach().sum(0),
        lambda w: torch.bmm(torch.ones(E, 2, COLUMNS), w.transpose(1, 2)),
        lambda w: torch.einsum("eij,ej->ei", w, torch.ones(E, COLUMNS)),
        lambda w: torch.stack(list(w)),
        lambda w: w.unbind()[2],
        lambda w: copy.deepcopy(w),
        lambda w: pickle.loads(pickle.dumps(w)),
        lambda w: nn.functional.linear(torch.ones(2, COLUMNS), w[1]),
        lambda w: torch.from_numpy(w.numpy().copy()),
    ],
)
def test_every_use_sees_the_same_numbers(use):
    model, chains = stack()
    want = use(chains.gate_up_proj[0].decoded(torch.float32))
    assert_same_bytes(use(model.experts.gate_up_proj).as_subclass(torch.Tensor), want)


@pytest.mark.parametrize(
    "write",
    [lambda w: w.mul_(2), lambda w: w[0].add_(1), lambda w: w.__setitem__(0, 1.0), lambda w: w.data.copy_(w + 1)],
)
def test_writing_to_a_stack_raises(write):
    model, _ = stack()
    with pytest.raises(anyfp8.ReadOnlyWeightError, match=r"anyfp8\.dequantize"):
        write(model.experts.gate_up_proj)


@torch.no_grad()
def test_a_stack_of_transformers_is_compiled_and_cast(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    ids = torch.arange(1, 33)[None]
    anyfp8.quantize(model, "FP8_STATIC", calibration=lambda m: m(ids), exclude="lm_head")
    want = model(ids).logits
    anyfp8.save(model, tmp_path / "q")
    with torch.device("meta"):
        fresh = transformers.MixtralForCausalLM(config)
    loaded = anyfp8.load(fresh, tmp_path / "q")
    assert_same_bytes(loaded(ids).logits, want)
    assert not [n for n, p in loaded.named_parameters() if "experts" in n and p.numel()]
    for implementation in ("eager", "batched_mm"):
        loaded.set_experts_implementation(implementation)
        assert_close(loaded(ids).logits, want, 1e-4)
    half = loaded.bfloat16()
    assert half.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.bfloat16
    assert half(ids).logits.dtype == torch.bfloat16
