"""anyfp8.buffers: what a model on meta has lost and no checkpoint holds."""

import copy

import pytest
import torch
from torch import nn

import anyfp8
from tests.helpers import assert_same_bytes, randn

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

IDS = torch.arange(1, 9)[None]


def llama():
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    )
    return transformers.LlamaForCausalLM(config).eval()


def qwen_image():
    """Keeps its rotary tables as plain attributes."""
    return diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()


def run_llama(model):
    return model(IDS).logits


def run_qwen_image(model):
    x, text = randn(1, 16, 16), randn(1, 5, 32, seed=1)
    time = torch.tensor([1.0])
    return model(x, encoder_hidden_states=text, timestep=time, img_shapes=[(1, 4, 4)], return_dict=False)[0]


class Holder(nn.Module):
    """Somebody's own module around a library's model."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize(("make", "run"), [(llama, run_llama), (qwen_image, run_qwen_image)])
def test_models_with_a_config_are_whole_again(make, run, hold, tmp_path):
    build = (lambda: Holder(make())) if hold else make
    torch.manual_seed(0)
    model = anyfp8.quantize(build(), "FP8_STATIC", calibration=run)
    anyfp8.save(model, tmp_path / "q")
    with torch.device("meta"):
        fresh = build()
    state = torch.get_rng_state()
    loaded = anyfp8.load(fresh, tmp_path / "q")
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_bytes(run(loaded), run(model))
    for name, buffer in model.named_buffers():
        assert_same_bytes(loaded.get_buffer(name), buffer)


@torch.no_grad()
def test_what_cannot_be_built_again_is_refused_and_nothing_changes(tmp_path):
    anyfp8.save(anyfp8.quantize(llama(), "FP8_DYNAMIC"), tmp_path / "q")
    with torch.device("meta"):
        fresh = llama()
    fresh.config.hidden_act = "no such function"
    with pytest.raises(anyfp8.LoadError, match=r"rotary_emb.*building LlamaForCausalLM again"):
        anyfp8.load(fresh, tmp_path / "q")
    assert all(buffer.is_meta for buffer in fresh.buffers())
    assert type(fresh.lm_head) is nn.Linear


@torch.no_grad()
def test_a_buffer_of_another_shape_than_the_config_says_is_refused(tmp_path):
    anyfp8.save(anyfp8.quantize(llama(), "FP8_DYNAMIC"), tmp_path / "q")
    with torch.device("meta"):
        fresh = llama()
        fresh.model.rotary_emb.register_buffer("inv_freq", torch.zeros(3), persistent=False)
    with pytest.raises(anyfp8.LoadError, match=r"inv_freq.*building it again from its config left it empty"):
        anyfp8.load(fresh, tmp_path / "q")


class Table(nn.Module):
    """A table that is no buffer, in a module that nobody can build again."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.tables = {"a": [torch.ones(8)]}

    def forward(self, x):
        return self.fc(x * self.tables["a"][0])


def test_a_lost_attribute_is_named(tmp_path):
    model = anyfp8.quantize(Table(), "FP8_DYNAMIC")
    anyfp8.save(model, tmp_path / "q")
    with torch.device("meta"):
        fresh = Table()
    with pytest.raises(anyfp8.LoadError, match=r"tables.*a tensor attribute on meta.*init_non_persistent_buffers"):
        anyfp8.load(fresh, tmp_path / "q")
    fresh = Table()
    x = randn(2, 8)
    assert_same_bytes(anyfp8.load(fresh, tmp_path / "q")(x), model(x))


def test_the_hook_may_fill_an_attribute(tmp_path):
    class Filled(Table):
        def init_non_persistent_buffers(self):
            self.tables = {"a": [torch.ones(8)]}

    model = anyfp8.quantize(Filled(), "FP8_DYNAMIC")
    anyfp8.save(model, tmp_path / "q")
    with torch.device("meta"):
        fresh = Filled()
    lazy = copy.deepcopy(fresh)
    lazy.init_non_persistent_buffers = lambda: None
    with pytest.raises(anyfp8.LoadError, match=r"tables.*left it on meta"):
        anyfp8.load(lazy, tmp_path / "q")
    assert lazy.tables["a"][0].is_meta
    x = randn(2, 8)
    assert_same_bytes(anyfp8.load(fresh, tmp_path / "q")(x), model(x))


# --- what needs no file ---
class Normed(nn.Module):
    """torch's older norms keep `weight` as an attribute that each call computes anew."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.conv = nn.utils.weight_norm(nn.Conv1d(8, 8, 3, padding=1))

    def forward(self, x):
        return self.conv(self.fc(x).mT).mT


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_a_weight_that_is_computed_at_each_call_is_not_lost(tmp_path):
    model = anyfp8.quantize(Normed(), "FP8_DYNAMIC")
    anyfp8.save(model, tmp_path / "q")
    with torch.device("meta"):
        fresh = Normed()
    x = randn(1, 5, 8)
    assert_same_bytes(anyfp8.load(fresh, tmp_path / "q")(x), model(x))
    assert anyfp8.report(model).skipped == {"conv": "its weight is computed at each call, by a hook"}


class Schedule:
    """An object that is no module, with a tensor in it."""

    def __init__(self):
        self.sigmas = torch.linspace(1, 2, 8)


class Scheduled(Table):
    def __init__(self):
        super().__init__()
        self.tables, self.schedule = {}, Schedule()

    def forward(self, x):
        return self.fc(x * self.schedule.sigmas)


def test_a_tensor_in_an_object_is_named(tmp_path):
    anyfp8.save(anyfp8.quantize(Scheduled(), "FP8_DYNAMIC"), tmp_path / "q")
    with torch.device("meta"):
        fresh = Scheduled()
    with pytest.raises(anyfp8.LoadError, match=r"schedule.*a tensor attribute on meta"):
        anyfp8.load(fresh, tmp_path / "q")
    anyfp8.load(Scheduled(), tmp_path / "q")


def test_an_attribute_that_no_forward_uses_may_stay_lost(tmp_path):
    class Merged(nn.Module):
        """As timm leaves its reparameterised blocks."""

        def __init__(self):
            super().__init__()
            self.fc, self.id_tensor = nn.Linear(8, 8), torch.eye(8)

        def fuse(self):
            return self.fc.weight + self.id_tensor

        def forward(self, x):
            return self.fc(x)

    class Helped(Merged):
        """Here a method that the forward of another module calls uses it."""

        def scaled(self, x):
            return self.fc(x) @ self.id_tensor

    class Holding(Holder):
        def forward(self, x):
            return self.inner.scaled(x)

    x = randn(2, 8)
    model = anyfp8.quantize(Merged(), "FP8_DYNAMIC")
    anyfp8.save(model, tmp_path / "q")
    with torch.device("meta"):
        fresh, holding = Merged(), Holding(Helped())
    assert_same_bytes(anyfp8.load(fresh, tmp_path / "q")(x), model(x))
    with pytest.raises(anyfp8.LoadError, match=r"inner\.id_tensor.*a tensor attribute on meta"):
        anyfp8.load(holding, tmp_path / "q")
