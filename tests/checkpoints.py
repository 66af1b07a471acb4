"""Models and checkpoints that the loading tests share, and an oracle that takes nothing from anyfp8.

A `Draft` is a checkpoint before it is written: tensors and manifest are plain dicts that a test may spoil.
"""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from tests.helpers import bytes_of, randn

F8 = torch.float8_e4m3fn
E4M3 = "float8_e4m3fn"
WEIGHT_ONLY = {"weight_dtype": E4M3, "tile": [-1, -1], "scale_dtype": "float32", "act_dtype": None}
STATIC = WEIGHT_ONLY | {"act_dtype": E4M3, "act_dynamic": False}
DYNAMIC = WEIGHT_ONLY | {"act_dtype": E4M3, "act_dynamic": True, "act_tile": [1, -1]}
CHANNEL = {"tile": [1, -1]}
SCHEMES = {"static": STATIC, "dynamic": DYNAMIC, "weight_only": WEIGHT_ONLY}


# --- models ---
def seeded(make, seed=0):
    """make() with parameters that depend on `seed` alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().eval()


def mlp(seed=0, i=8, h=16, o=8):
    return seeded(lambda: nn.Sequential(nn.Linear(i, h), nn.GELU(), nn.Linear(h, o)), seed)


class Tied(nn.Module):
    """An embedding whose table is the head's weight as well."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, index):
        return self.head(self.emb(index))


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Doubling(nn.Linear):
    """A Linear with a forward of its own, which no FP8 layer may replace."""

    def forward(self, x):
        return 2 * super().forward(x)


class Nested(nn.Module):
    """Layers in a ModuleDict, a ModuleList and a Sequential, with a norm between."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"up": nn.Linear(8, 8), "up_proj": nn.Linear(8, 8)})
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))

    def forward(self, x):
        x = self.parts["up"](x) * self.parts["up_proj"](x)
        for layer in self.layers:
            x = layer(x)
        return x


class Within(nn.Module):
    """A model under a name: all its tensors get a prefix."""

    def __init__(self, name, inner):
        super().__init__()
        setattr(self, name, inner)

    def forward(self, *args):
        (inner,) = self.children()
        return inner(*args)


def stale(model):
    """A copy whose parameters and buffers are of another model, so that whatever isn't loaded shows."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and not isinstance(tensor, nn.parameter.UninitializedParameter):
                tensor.fill_(0.123)
    return model


def on_meta(make):
    with torch.device("meta"):
        return make().eval()


# --- checkpoints ---
@dataclass
class Draft:
    """tensors by name, and what `anyfp8.json` says: `layers` (its layer_config), `ignore`, `fields` (anything else)."""

    tensors: dict
    layers: dict
    ignore: list = field(default_factory=list)
    fields: dict = field(default_factory=dict)

    def manifest(self):
        return {"format": "anyfp8", "version": 1, "layer_config": self.layers, "ignore": self.ignore} | self.fields

    def write(self, folder, shards=1):
        """Write weights and manifest; returns the folder."""
        write_tensors(folder, self.tensors, shards)
        write_json(folder / "anyfp8.json", self.manifest())
        return folder

    def renamed(self, rename):
        """The same checkpoint with other module paths; rename: a function on them."""

        def on_name(name):
            path, dot, leaf = name.rpartition(".")
            return rename(path) + "." * bool(rename(path)) + leaf if dot or rename(path) else leaf

        tensors = {on_name(name): tensor for name, tensor in self.tensors.items()}
        layers = {rename(name): entry for name, entry in self.layers.items()}
        return Draft(tensors, layers, [rename(name) for name in self.ignore], dict(self.fields))

    def weight(self, name):
        """The real values of a quantized weight, float32."""
        codes, scale = self.tensors[join(name, "weight")].float(), self.tensors[join(name, "weight_scale")].float()
        return codes * (scale if scale.numel() == 1 else scale.reshape(-1, *[1] * (codes.dim() - 1)))


def join(path, leaf):
    return f"{path}.{leaf}" if path else leaf


def write_json(path, value):
    Path(path).write_text(json.dumps(value))


def write_tensors(folder, tensors, shards=1):
    """`model.safetensors`, or shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    index = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def encode(weight, channel=False, dtype=F8):
    """(codes, float32 scale of shape [1] or [out]) of a float weight."""
    weight = weight.detach().float()
    amax = weight.abs().flatten(1).amax(1) if channel else weight.abs().amax().reshape(1)
    top = torch.finfo(dtype).max
    scale = amax.clamp_min(1e-12) / top
    spread = scale.reshape(-1, *[1] * (weight.dim() - 1)) if channel else scale
    return (weight / spread).clamp(-top, top).to(dtype), scale


def draft(model, names, scheme=STATIC, channel=False, input_scale=0.02):
    """The checkpoint of a float model with the layers `names` in FP8, everything else as it is."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    layers = {}
    for name in names:
        weight = tensors[join(name, "weight")]
        tensors[join(name, "weight")], tensors[join(name, "weight_scale")] = encode(weight, channel)
        if scheme["act_dtype"] and not scheme["act_dynamic"]:
            tensors[join(name, "input_scale")] = torch.tensor([input_scale])
        tile = [1 if channel else -1] + [-1] * (weight.dim() - 1)
        layers[name] = scheme | {"tile": tile}
    return Draft(tensors, layers)


# --- the oracle ---
def qdq(x, entry, input_scale):
    """An input after quantization, in its own dtype."""
    if not entry["act_dtype"]:
        return x
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448 if entry["act_dynamic"] else input_scale
    return ((x.float() / scale).clamp(-448, 448).to(F8).float() * scale).to(x.dtype)


def oracle(model, written):
    """The float model with the file's weights decoded and the inputs of quantized layers rounded by a hook."""
    model = copy.deepcopy(model)
    tensors = dict(written.tensors)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, entry in written.layers.items():
        tensors[join(name, "weight")] = written.weight(name)
        del tensors[join(name, "weight_scale")]
        scale = tensors.pop(join(name, "input_scale"), None)
        if not isinstance(modules[name], nn.Embedding):
            modules[name].register_forward_pre_hook(lambda m, args, e=entry, s=scale: (qdq(args[0], e, s), *args[1:]))
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in own:  # not so: scales of the KV cache and other named exceptions
                own[name].copy_(tensor)
    return model.eval()


X = randn(5, 8, seed=1)


# --- is a model untouched? ---
class Snapshot:
    """Everything about a model that a failed call must leave alone: objects, types, bytes, hooks, modes and output."""

    def __init__(self, model, *inputs):
        self.model, self.inputs = model, inputs
        self.state = self._state()
        self.tensors = {id(t): (t, self._bytes(t)) for t in self._tensors()}
        self.output = self._output()

    def _tensors(self):
        for module in self.model.modules():
            for table in (module._parameters, module._buffers):
                yield from (t for t in table.values() if t is not None)

    @staticmethod
    def _bytes(tensor):
        if tensor.is_meta or isinstance(tensor, nn.parameter.UninitializedParameter):
            return type(tensor)
        return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, bytes_of(tensor)

    def _state(self):
        """Per path: the module, its type, and its attributes (dicts one level deep), all compared by identity."""
        out = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            attributes = {}
            for key, value in module.__dict__.items():
                inside = dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else value
                attributes[key] = inside
            out[path] = (module, type(module), attributes)
        return out

    def _output(self):
        if not self.inputs:
            return None
        with torch.no_grad():
            return self.model(*self.inputs).clone()

    def assert_unchanged(self):
        now = self._state()
        assert now.keys() == self.state.keys(), "other modules"
        for path, (module, kind, attributes) in self.state.items():
            assert now[path][0] is module, f"{path!r} is another object"
            assert now[path][1] is kind, f"{path!r} is a {now[path][1].__name__}, was a {kind.__name__}"
            self._same(path, attributes, now[path][2])
        for tensor, stored in self.tensors.values():
            assert self._bytes(tensor) == stored, "a tensor has other bytes"
        if self.inputs:
            assert bytes_of(self._output()) == bytes_of(self.output), "another output"

    @staticmethod
    def _same(path, before, after):
        assert before.keys() == after.keys(), f"{path!r} has other attributes"
        for key, value in before.items():
            if isinstance(value, dict):
                assert list(value) == list(after[key]), f"{path!r}: {key} has other entries"
                assert all(after[key][k] is v for k, v in value.items()), f"{path!r}: {key} holds another object"
            else:
                assert after[key] is value or after[key] == value, f"{path!r}: {key} changed"


# --- other producers' checkpoints ---
FP8_ARGS = {"num_bits": 8, "type": "float", "strategy": "tensor"}
CT_TENSOR = FP8_ARGS
CT_CHANNEL = FP8_ARGS | {"strategy": "channel"}
CT_TOKEN = FP8_ARGS | {"strategy": "token", "dynamic": True}


def group(targets, weights=CT_TENSOR, inputs=None, **more):
    """One of compressed-tensors' config groups."""
    return {"targets": targets, "weights": weights, "input_activations": inputs} | more


def compressed(folder, written, groups, **config):
    """The draft's tensors as a compressed-tensors checkpoint; groups: a list, or a dict by name."""
    groups = {f"group_{i}": g for i, g in enumerate(groups)} if isinstance(groups, list) else groups
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": []} | config
    write_tensors(folder, written.tensors)
    write_json(folder / "config.json", {"model_type": "mlp", "quantization_config": config})
    return folder


AR_WEIGHT_ONLY = {"bits": 8, "data_type": "fp", "group_size": 0, "sym": True}
AR_STATIC = AR_WEIGHT_ONLY | {
    "group_size": -1,
    "act_bits": 8,
    "act_data_type": "fp",
    "act_group_size": 0,
    "act_dynamic": False,
}


def auto_round(folder, written, config=AR_STATIC, **more):
    """The draft's tensors as an auto-round checkpoint."""
    config = {"quant_method": "auto-round", "autoround_version": "0.16.1"} | config | more
    write_tensors(folder, written.tensors)
    write_json(folder / "config.json", {"model_type": "mlp", "quantization_config": config})
    return folder
