"""Valid tiny checkpoints of every dialect, their exact values by an oracle of its own, and ways to write them wrong.

A `Sample` is a checkpoint before it is written; tests spoil it. The oracle reads the written files again, with nothing
of anyfp8's, and computes every weight in float32 from the stored bytes.
"""

import json
import struct
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from tests.checkpoints import F8, seeded, stale, write_json
from tests.helpers import bytes_of, code_values, randn, safetensors_bytes

N, K = 32, 64
E8M0 = torch.float8_e8m0fnu
WORDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint64: "U64",
}
FP8_WORDS = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


class Block(nn.Module):
    """a and b are quantized in the files, norm and head are plain."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(K, N), nn.Linear(N, K)
        self.norm, self.head = nn.LayerNorm(K), nn.Linear(K, 8)

    def forward(self, x):
        return self.head(self.norm(self.b(torch.tanh(self.a(x)))))


class Flux(nn.Module):
    """The same under the names that tell BFL's files."""

    def __init__(self):
        super().__init__()
        self.double_blocks = nn.ModuleList([Block()])

    def forward(self, x):
        return self.double_blocks[0](x)


X = randn(3, K, seed=5)


# --- what a layer's tensors mean ---
@dataclass
class Reading:
    """Where one layer's values are, and how they become its weight.

    format: "fp8" (which one, the stored dtype says; U8 is e4m3fn) or "fp4". scale: its name, "" if there is none. kind:
    of the scale, "float", "e8m0" or "e4m3". tile: what shares a scale if it is neither one a weight nor one a row.
    factor: the name of a scale that multiplies it (divide: divides). input: (name, how) of the input's scale, how:
    "times", "divides" (1 / value) or "amax" (value / 448).
    """

    codes: str
    scale: str
    format: str = "fp8"
    kind: str = "float"
    tile: tuple = (-1, -1)
    factor: str | None = None
    divide: bool = False
    transposed: bool = False
    high_first: bool = False
    swizzled: bool = False
    input: tuple | None = None


@dataclass
class Sample:
    tensors: dict
    readings: dict
    configs: dict = field(default_factory=dict)
    metadata: dict | None = None
    options: dict = field(default_factory=dict)
    make: type = Block
    shards: int = 1
    #: called with the folder when everything is written
    spoil_files: list = field(default_factory=list)
    #: where the files say the tile of a module: (file, *path), "{}" standing for the module
    tile_path: tuple | None = None

    def write(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        weight_map = {}
        for i in range(self.shards):
            name = f"model-{i + 1:05d}-of-{self.shards:05d}.safetensors" if self.shards > 1 else "model.safetensors"
            part = {n: self.tensors[n] for n in sorted(self.tensors)[i :: self.shards]}
            (folder / name).write_bytes(pack(part, self.metadata))
            weight_map |= dict.fromkeys(part, name)
        if self.shards > 1:
            write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
        for name, config in self.configs.items():
            write_json(folder / name, config)
        for spoil in self.spoil_files:
            spoil(folder)
        return folder

    def model(self):
        return stale(seeded(self.make))

    def change_header(self, change, file="model.safetensors"):
        self.spoil_files.append(lambda folder: change_header(folder / file, change))

    def change_index(self, change):
        self.spoil_files.append(lambda folder: change_json(folder / "model.safetensors.index.json", change))


def pack(tensors, metadata=None):
    """A .safetensors file of any dtypes."""
    header, data = {} if metadata is None else {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        raw = bytes_of(tensor)
        header[name] = {"dtype": WORDS[tensor.dtype], "shape": list(tensor.shape)}
        header[name]["data_offsets"] = [len(data), len(data) + len(raw)]
        data += raw
    raw = json.dumps(header).encode()
    return safetensors_bytes(raw + b" " * (-len(raw) % 8), data)


def split_file(path):
    """(header object, data) of a .safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def change_header(path, change):
    """Rewrite a file with another header; change: edits it in place, or returns bytes or another object."""
    header, data = split_file(path)
    new = change(header)
    path.write_bytes(safetensors_bytes(header if new is None else new, data))


def change_json(path, change):
    value = json.loads(path.read_text())
    new = change(value)
    write_json(path, value if new is None else new)


# --- the oracle ---
def stored_tensors(folder):
    """name → (dtype word, shape, bytes), of the files that the index names, or of the only one."""
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] if index.exists() else None
    files = {"model.safetensors"} if weight_map is None else set(weight_map.values())
    found = {}
    for file in files:
        header, data = split_file(folder / file)
        for name, entry in header.items():
            if name != "__metadata__" and (weight_map is None or weight_map.get(name) == file):
                begin, end = entry["data_offsets"]
                found[name] = (entry["dtype"], tuple(entry["shape"]), data[begin:end])
    return found


def numbers(entry):
    """float32 values of a stored tensor."""
    word, shape, raw = entry
    if word == "BF16":
        values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif word in FP8_WORDS:
        values = code_values(FP8_WORDS[word])[np.frombuffer(raw, np.uint8)]
    else:
        kinds = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "U8": "u1", "I8": "i1"}
        values = np.frombuffer(raw, f"<{kinds[word]}")
    return values.astype(np.float32).reshape(shape)


def says(stored, grid):
    """May a scale of this shape be meant for this grid? Same order, sizes of 1 aside, or flat."""
    if len(stored) == len(grid) or int(np.prod(stored)) == 1:
        return tuple(stored) == tuple(grid) or int(np.prod(stored)) == int(np.prod(grid)) == 1
    flat = len(stored) == 1 and stored[0] == np.prod(grid)
    return flat or [n for n in stored if n != 1] == [n for n in grid if n != 1]


def oracle_weight(found, reading, shape, tile):
    """float32 weight [out, in] of a layer, from the stored bytes."""
    # compressed-tensors and auto-round take codes under the other name, too
    word, own, raw = found.get(reading.codes) or found[f"{reading.codes}_packed"]
    data = np.frombuffer(raw, np.uint8)
    if reading.format == "fp4":
        assert word in ("U8", "I8"), f"FP4 codes in {word}"
        data = data.reshape(own)
        low, high = FP4[data & 15], FP4[data >> 4]
        pair = (high, low) if reading.high_first else (low, high)
        values = np.stack(pair, -1).reshape(own[0], own[1] * 2)
    else:
        assert word in (*FP8_WORDS, "U8"), f"FP8 codes in {word}"
        values = code_values(FP8_WORDS.get(word, "float8_e4m3fn"))[data].astype(np.float32).reshape(own)
    values = values.T if reading.transposed else values
    assert values.shape == shape, f"{values.shape} is not {shape}"
    if not reading.scale:  # bare: the codes are the values
        return values
    with np.errstate(over="ignore"):
        return values * oracle_scale(found, reading, shape, tile)


def oracle_scale(found, reading, shape, tile):
    """float32 multipliers, of the weight's shape."""
    entry = found[reading.scale]
    if reading.kind == "e8m0":
        assert entry[0] in ("U8", "F8_E8M0"), f"exponents in {entry[0]}"
        exponents = np.frombuffer(entry[2], np.uint8).astype(np.int32) - 127
        scale = np.ldexp(np.float32(1), exponents).astype(np.float32).reshape(entry[1])
    elif reading.kind == "e4m3":
        assert entry[0] in ("F8_E4M3", "U8"), f"block scales in {entry[0]}"
        scale = numbers(("F8_E4M3", *entry[1:]))
    else:
        assert entry[0] in ("F64", "F32", "F16", "BF16", "F8_E4M3"), f"scales in {entry[0]}"
        scale = numbers(entry)
    if scale.size == 1 and reading.kind == "float":
        tile = (-1, -1)
    elif reading.kind == "float" and scale.size == shape[0] == scale.shape[0]:
        tile = (1, -1)
    cells = [np.arange(n) * 0 if t == -1 else np.arange(n) // t for n, t in zip(shape, tile, strict=True)]
    grid = tuple(int(c[-1]) + 1 for c in cells)
    if reading.swizzled:
        rows, columns = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing="ij")
        patch = rows // 128 * -(-grid[1] // 4) + columns // 4
        at = patch * 512 + rows % 32 * 16 + rows % 128 // 32 * 4 + columns % 4
        scale = scale.reshape(-1)[at]
    else:
        assert says(scale.shape, grid), f"a scale of shape {scale.shape} was taken for {grid}"
        scale = scale.reshape(grid)
    if reading.factor is not None:
        factor = numbers(found[reading.factor]).reshape(())
        scale = scale / factor if reading.divide else scale * factor
    return scale[np.ix_(*cells)]


def said_tile(folder, sample, module, default):
    """The tile that the files state for a module, where they do."""
    if sample.tile_path is None:
        return default
    file, *path = sample.tile_path
    if file == "__metadata__":
        value = json.loads(split_file(folder / "model.safetensors")[0]["__metadata__"][f"{module}.weight"])
    else:
        value = json.loads((folder / file).read_text())
    try:
        for key in path:
            value = value[key.format(module)]
    except (KeyError, TypeError, IndexError):
        return default
    if not value or (isinstance(value, list) and set(value) == {-1}):  # nothing said, or "all of it" of any rank
        return default
    rows, columns = (1, value) if isinstance(value, int) else value
    return (rows, columns) if path[-1] == "tile" else (max(rows, 1), columns)


def expected(folder, sample):
    """What the written files mean: module → (float32 weight, input scale or None), name → float32 plain tensor."""
    found = stored_tensors(folder)
    model = dict(seeded(sample.make).named_modules())
    layers = {}
    for module, reading in sample.readings.items():
        shape = tuple(model[module].weight.shape)
        weight = oracle_weight(found, reading, shape, said_tile(folder, sample, module, reading.tile))
        act = None
        if reading.input is not None and reading.input[0] in found:
            value = numbers(found[reading.input[0]]).reshape(())
            act = {"times": value, "divides": 1 / value, "amax": value / np.float32(448)}[reading.input[1]]
        layers[module] = (weight, act)
    names = [name for name, _ in seeded(sample.make).named_parameters() if name.rpartition(".")[0] not in layers]
    names += [f"{module}.bias" for module in layers]
    return layers, {name: numbers(found[name]) for name in names}


def assert_right(model, layers, plain, modules=None):
    """The loaded model holds exactly these weights, input scales and plain tensors."""
    for module in layers if modules is None else modules:
        (want, act), layer = layers[module], model.get_submodule(module)
        got = layer.weight.detach()
        assert got.shape == want.shape, f"{module}: {tuple(got.shape)} is not {want.shape}"
        assert np.array_equal(got.float().numpy(), want), f"{module}: another weight"
        loaded = getattr(layer, "input_scale", None)
        if loaded is not None:
            assert act is not None, f"{module}: an input scale from nowhere"
            assert float(loaded) == float(act), f"{module}: another input scale"
    for name, want in plain.items():
        got = model.get_parameter(name).detach()
        assert np.array_equal(got.numpy(), want.astype(np.float32)), f"{name}: another value"


# --- values ---
def fp8(n, k, seed):
    return (randn(n, k, seed=seed) * 60).clamp(-400, 400).to(F8)


def fp4(n, k, seed):
    return torch.randint(0, 256, (n, k // 2), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def floats(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.01 + 0.001


def exponents(*shape, seed=0):
    return torch.randint(115, 125, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def e4m3(*shape, seed=0):
    return (floats(*shape, seed=seed) * 1000).to(F8)


def swizzle(grid):
    """cuBLAS's layout, element by element, padded with zeros to tiles of 128 × 4."""
    rows, columns = -(-grid.shape[0] // 128) * 128, -(-grid.shape[1] // 4) * 4
    out = torch.zeros(rows * columns, dtype=torch.uint8)
    for r in range(grid.shape[0]):
        for c in range(grid.shape[1]):
            at = (r // 128 * (columns // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            out[at] = grid.view(torch.uint8)[r, c]
    return out.reshape(rows, columns).view(grid.dtype)


SHAPES = {"a": (N, K), "b": (K, N)}


def rest(prefix=""):
    """The plain tensors."""
    model = seeded(Block).state_dict()
    return {prefix + name: t for name, t in model.items() if name not in ("a.weight", "b.weight")}


def plain_sample(make_layer, **more):
    """A sample whose layers a and b come from make_layer(module, rows, columns, seed) → (tensors, reading)."""
    prefix = "double_blocks.0." if more.get("make") is Flux else ""
    tensors, readings = rest(prefix), {}
    for seed, (name, (rows, columns)) in enumerate(SHAPES.items()):
        own, readings[prefix + name] = make_layer(prefix + name, rows, columns, seed)
        tensors |= own
    return Sample(tensors, readings, **more)


def grid(rows, columns, tile):
    return tuple(1 if t == -1 else -(-n // t) for n, t in zip((rows, columns), tile, strict=True))


def fp8_layer(tile, *, scale="weight_scale", act=None, shape=None, dtype=torch.float32):
    """One FP8 layer with float scales; act: (leaf, value, how). shape: of the stored scale."""

    def make(m, rows, columns, seed):
        tensors = {f"{m}.weight": fp8(rows, columns, seed)}
        cells = grid(rows, columns, tile)
        stored = floats(*cells, seed=seed + 10).to(dtype)
        tensors[f"{m}.{scale}"] = stored.reshape(cells if shape is None else shape)
        reading = Reading(f"{m}.weight", f"{m}.{scale}", tile=tile)
        if act is not None:
            tensors[f"{m}.{act[0]}"] = torch.tensor(act[1] * (seed + 1), dtype=dtype)
            reading.input = (f"{m}.{act[0]}", act[2])
        return tensors, reading

    return make


INPUT = ("input_scale", 0.03125, "times")


def mx8_layer(leaf="weight_scale", swizzled=False):
    def make(m, rows, columns, seed):
        scale = exponents(rows, columns // 32, seed=seed + 10)
        tensors = {f"{m}.weight": fp8(rows, columns, seed), f"{m}.{leaf}": swizzle(scale) if swizzled else scale}
        return tensors, Reading(f"{m}.weight", f"{m}.{leaf}", kind="e8m0", tile=(1, 32), swizzled=swizzled)

    return make


def mx4_layer(m, rows, columns, seed):
    """llm-compressor's names."""
    tensors = {f"{m}.weight_packed": fp4(rows, columns, seed)}
    tensors[f"{m}.weight_scale"] = exponents(rows, columns // 32, seed=seed + 10)
    return tensors, Reading(f"{m}.weight_packed", f"{m}.weight_scale", "fp4", "e8m0", (1, 32))


def nv4_packed(m, rows, columns, seed):
    """llm-compressor's names: the outer scales divide."""
    tensors = {f"{m}.weight_packed": fp4(rows, columns, seed)}
    tensors[f"{m}.weight_scale"] = e4m3(rows, columns // 16, seed=seed + 10)
    tensors[f"{m}.weight_global_scale"] = torch.tensor([99.5])
    tensors[f"{m}.input_global_scale"] = torch.tensor([64.0])
    reading = Reading(
        f"{m}.weight_packed", f"{m}.weight_scale", "fp4", "e4m3", (1, 16), f"{m}.weight_global_scale", True
    )
    reading.input = (f"{m}.input_global_scale", "divides")
    return tensors, reading


def nv4_layer(swizzled=False, high_first=False):
    """ModelOpt's names: the outer scales multiply."""

    def make(m, rows, columns, seed):
        scale = e4m3(rows, columns // 16, seed=seed + 10)
        tensors = {f"{m}.weight": fp4(rows, columns, seed), f"{m}.weight_scale": swizzle(scale) if swizzled else scale}
        tensors |= {f"{m}.weight_scale_2": torch.tensor(0.0123), f"{m}.input_scale": torch.tensor(0.03125)}
        reading = Reading(f"{m}.weight", f"{m}.weight_scale", "fp4", "e4m3", (1, 16), f"{m}.weight_scale_2")
        reading.swizzled, reading.high_first, reading.input = swizzled, high_first, (f"{m}.input_scale", "times")
        return tensors, reading

    return make


def quantization(**config):
    return {"config.json": {"model_type": "m", "quantization_config": config}}


# --- the samples ---
SAMPLES = {}


def sample(name):
    def register(build):
        SAMPLES[name] = build
        return build

    return register


def _anyfp8(tile, act, **scheme):
    entry = {"weight_dtype": "float8_e4m3fn", "tile": list(tile), "scale_dtype": "float32", "act_dtype": None} | scheme
    manifest = {"format": "anyfp8", "version": 1, "ignore": ["head"], "layer_config": {"a": entry, "b": dict(entry)}}
    path = ("anyfp8.json", "layer_config", "{}", "tile")
    return plain_sample(fp8_layer(tile, act=act), configs={"anyfp8.json": manifest}, tile_path=path)


@sample("anyfp8")
def anyfp8_static():
    return _anyfp8((-1, -1), INPUT, act_dtype="float8_e4m3fn", act_dynamic=False)


@sample("anyfp8 block")
def anyfp8_block():
    return _anyfp8((16, 16), None)


F8_ARGS = {"num_bits": 8, "type": "float"}


def _ct(layer, weights, inputs, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["head"]}
    return plain_sample(layer, configs=quantization(**config), **more)


@sample("ct")
def ct_channel():
    inputs = F8_ARGS | {"strategy": "token", "dynamic": True}
    return _ct(fp8_layer((1, -1)), F8_ARGS | {"strategy": "channel"}, inputs)


@sample("ct static")
def ct_static():
    args = F8_ARGS | {"strategy": "tensor"}
    return _ct(fp8_layer((-1, -1), act=INPUT), args, args)


@sample("ct block")
def ct_block():
    where = ("config.json", "quantization_config", "config_groups", "group_0", "weights", "block_structure")
    return _ct(fp8_layer((16, 16)), F8_ARGS | {"strategy": "block", "block_structure": [16, 16]}, None, tile_path=where)


@sample("ct mxfp4")
def ct_mxfp4():
    args = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return _ct(mx4_layer, args, args | {"dynamic": True})


@sample("ct nvfp4")
def ct_nvfp4():
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return _ct(nv4_packed, args, args | {"dynamic": "local"})


AR = {"quant_method": "auto-round", "sym": True, "act_sym": True, "extra_config": {"head": {"bits": 16}}}


@sample("auto-round")
def ar_static():
    config = AR | {"bits": 8, "data_type": "fp", "group_size": -1, "act_bits": 8, "act_data_type": "fp"}
    config |= {"act_group_size": 0, "act_dynamic": False}
    return plain_sample(fp8_layer((1, -1), act=INPUT), configs=quantization(**config))


MX_WORDS = {"group_size": 32, "data_type": "mx_fp", "act_group_size": 32, "act_data_type": "mx_fp", "act_dynamic": True}


@sample("auto-round mxfp8")
def ar_mxfp8():
    return plain_sample(mx8_layer(), configs=quantization(**AR | MX_WORDS | {"bits": 8, "act_bits": 8}))


@sample("auto-round mxfp4")
def ar_mxfp4():
    return plain_sample(mx4_layer, configs=quantization(**AR | MX_WORDS | {"bits": 4, "act_bits": 4}))


@sample("fp8")
def fp8_block():
    config = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    config["modules_to_not_convert"] = ["head"]
    where = ("config.json", "quantization_config", "weight_block_size")
    return plain_sample(fp8_layer((16, 16), scale="weight_scale_inv"), configs=quantization(**config), tile_path=where)


@sample("fp8 static")
def fp8_static():
    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["head"]}
    return plain_sample(fp8_layer((-1, -1), act=INPUT), configs=quantization(**config))


def _modelopt(layer, algo, **more):
    hf_quant = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": algo, "exclude_modules": ["head"]} | more,
    }
    where = ("hf_quant_config.json", "quantization", "group_size")
    return plain_sample(layer, configs={"hf_quant_config.json": hf_quant}, tile_path=where)


@sample("modelopt")
def modelopt_fp8():
    return _modelopt(fp8_layer((-1, -1), act=INPUT, shape=()), "FP8")


@sample("modelopt nvfp4")
def modelopt_nvfp4():
    return _modelopt(nv4_layer(), "NVFP4", group_size=16)


@sample("modelopt mxfp8")
def modelopt_mxfp8():
    return _modelopt(mx8_layer(), "MXFP8", group_size=32)


@sample("modelopt quantizers")
def modelopt_quantizers():
    act = ("input_quantizer._amax", 3.5, "amax")
    return plain_sample(fp8_layer((-1, -1), scale="weight_quantizer._scale", act=act))


@sample("quark")
def quark_static():
    tensor = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True, "ch_axis": None}
    spec = {"weight": tensor, "input_tensors": tensor, "output_tensors": None, "bias": None}
    config = {"quant_method": "quark", "global_quant_config": spec, "exclude": ["head"], "layer_quant_config": {}}
    return plain_sample(fp8_layer((-1, -1), act=INPUT, shape=()), configs=quantization(**config))


@sample("inc")
def neural_compressor():
    def layer(m, rows, columns, seed):
        scale, act = floats(seed=seed + 10).bfloat16(), torch.tensor(0.03125).bfloat16()
        tensors = {f"{m}.weight": fp8(columns, rows, seed), f"{m}.dequant_weights.scale": scale}
        tensors |= {f"{m}.quant_input.scale": act, f"{m}.quant_input.scale_inv": 1 / act}
        names = (f"{m}.weight", f"{m}.dequant_weights.scale")
        return tensors, Reading(*names, transposed=True, input=(f"{m}.quant_input.scale", "times"))

    config = {"fp8_config": "E4M3", "use_qdq": "True", "mode": "LOAD", "blocklist": {"names": ["head"]}}
    return plain_sample(layer, configs=quantization(**config | {"allowlist": {"names": [], "types": ["Linear"]}}))


def label(format="float8_e4m3fn", **more):
    return torch.tensor(list(json.dumps({"format": format} | more).encode()), dtype=torch.uint8)


def _labelled(layer, format):
    built = plain_sample(layer)
    built.tensors |= {f"{m}.comfy_quant": label(format) for m in SHAPES}
    return built


@sample("comfy")
def comfy_labels():
    return _labelled(fp8_layer((-1, -1), act=INPUT, shape=()), "float8_e4m3fn")


@sample("comfy marker")
def comfy_marker():
    act = ("scale_input", 0.03125, "times")
    built = plain_sample(fp8_layer((-1, -1), scale="scale_weight", act=act, shape=()))
    built.tensors["scaled_fp8"] = torch.empty(0, dtype=F8)
    return built


@sample("comfy header")
def comfy_header():
    layers = {m: {"format": "float8_e4m3fn"} for m in SHAPES}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    return plain_sample(fp8_layer((1, -1), act=INPUT), metadata=metadata)


@sample("comfy nvfp4")
def comfy_nvfp4():
    return _labelled(nv4_layer(swizzled=True, high_first=True), "nvfp4")


@sample("comfy mxfp8")
def comfy_mxfp8():
    return _labelled(mx8_layer(swizzled=True), "mxfp8")


@sample("bfl")
def bfl_fp8r():
    return plain_sample(fp8_layer((1, -1), shape=(-1,)), make=Flux)


@sample("bfl nvfp4")
def bfl_nvfp4():
    return plain_sample(nv4_layer(), make=Flux)


def record(kind, block, inputs=None, **data):
    data = {"block_size": block, "act_quant_kwargs": inputs} | data
    return json.dumps({"_type": kind, "_data": data, "_tensor_data_names": ["qdata", "scale"]})


def _torchao(layer, records):
    built = plain_sample(layer)
    for m, reading in built.readings.items():
        built.tensors[f"{m}._weight_qdata"] = built.tensors.pop(f"{m}.weight")
        built.tensors[f"{m}._weight_scale"] = built.tensors.pop(f"{m}.weight_scale")
        reading.codes, reading.scale = f"{m}._weight_qdata", f"{m}._weight_scale"
    built.metadata = {f"{m}.weight": text for m, text in records.items()}
    built.tile_path = ("__metadata__", "_data", "block_size")
    return built


@sample("torchao")
def torchao_float8():
    where = {"_type": "PerRow", "_data": {"dim": -1}}
    inputs = {"_data": {"float8_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}, "granularity": where}}
    built = _torchao(
        fp8_layer((1, -1)), {"a": record("Float8Tensor", [1, K], inputs), "b": record("Float8Tensor", [1, N])}
    )
    built.configs = quantization(quant_method="torchao", modules_to_not_convert=["head"])
    return built


@sample("torchao mx")
def torchao_mx():
    return _torchao(mx8_layer(), {m: record("MXTensor", 32, is_swizzled_scales=False) for m in SHAPES})


def _quanto(activations, act):
    built = plain_sample(fp8_layer((1, -1), act=act))
    for m, reading in built.readings.items():
        built.tensors[f"{m}.weight._data"] = built.tensors.pop(f"{m}.weight")
        built.tensors[f"{m}.weight._scale"] = built.tensors.pop(f"{m}.weight_scale")
        reading.codes, reading.scale = f"{m}.weight._data", f"{m}.weight._scale"
        built.tensors |= {f"{m}.output_scale": torch.tensor(1.0)}
        if act is None:
            built.tensors |= {f"{m}.input_scale": torch.tensor(1.0)}
    entry = {"weights": "qfloat8_e4m3fn", "activations": activations}
    built.configs = {"quanto_qmap.json": {m: dict(entry) for m in SHAPES}}
    return built


@sample("quanto")
def quanto_static():
    return _quanto("qfloat8_e4m3fn", INPUT)


@sample("quanto weight-only")
def quanto_weight_only():
    return _quanto("none", None)


@sample("bare")
def bare():
    built = plain_sample(fp8_layer((-1, -1)), options={"dialect": "bare"})
    for m, reading in built.readings.items():
        del built.tensors[f"{m}.weight_scale"]
        reading.scale = ""
    return built
