"""Every way in which a load can fail: it says what is wrong, where, and the model is as it was."""

import contextlib
import json
import mmap
import struct

import pytest
import torch
from torch import nn

import anyfp8
from tests.checkpoints import (
    DYNAMIC,
    F8,
    STATIC,
    WEIGHT_ONLY,
    Doubling,
    Shared,
    Snapshot,
    Tied,
    X,
    draft,
    mlp,
    on_meta,
    seeded,
    stale,
    write_json,
    write_tensors,
)


class Victim(nn.Module):
    """fc1 and fc2 are FP8 in the file; the rest is plain."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.plain = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.norm(self.plain(self.fc2(torch.tanh(self.fc1(x))))) * self.gain


class Case:
    """What a case spoils: the checkpoint's draft, the files after writing, the model, or the call's options."""

    def __init__(self, folder, place):
        self.folder, self.place = folder, place
        self.make, self.inputs = Victim, (X,)
        self.options = {}
        self.shards = 1
        self.source = folder
        self.spoil_files = lambda: None
        self.use(Victim, ["fc1", "fc2"])

    def use(self, make, names, scheme=STATIC, channel=False, inputs=(X,)):
        """Another model and checkpoint."""
        self.make, self.inputs = make, inputs
        written = draft(seeded(make), names, scheme, channel)
        self.draft, self.tensors, self.layers = written, written.tensors, written.layers

    def channel(self):
        self.use(Victim, ["fc1", "fc2"], channel=True)

    def model(self):
        if self.place == "meta":
            return on_meta(self.make)
        model = stale(seeded(self.make)).train()
        for module in model.modules():
            module.eval() if isinstance(module, nn.BatchNorm1d) else None
            module.register_forward_hook(lambda m, args, out: None)
        for parameter in list(model.parameters())[::2]:
            if not isinstance(parameter, nn.parameter.UninitializedParameter):
                parameter.requires_grad_(False)
        return model


CASES = {}


def case(match, *, places=("real", "meta"), strict_only=False):
    """Register a function that spoils a `Case`; match: what the message must hold. strict_only: legal if lenient."""

    def register(spoil):
        for place in places:
            CASES[f"{spoil.__name__}-{place}"] = (spoil, match, place, {})
        if not strict_only:
            CASES[f"{spoil.__name__}-{places[0]}-lenient"] = (spoil, match, places[0], {"strict": False})
        return spoil

    return register


# --- tensors missing, or too many ---
@case(r"fc1\.weight_scale")
def weight_scale_missing(c):
    del c.tensors["fc1.weight_scale"]


@case(r"fc2\.input_scale.*static")
def input_scale_missing(c):
    del c.tensors["fc2.input_scale"]


@case(r"fc1\.weight\b")
def fp8_weight_missing(c):
    del c.tensors["fc1.weight"]


@case(r"fc1\.weight\b")
def whole_fp8_layer_missing(c):
    c.draft.tensors = c.tensors = {n: t for n, t in c.tensors.items() if not n.startswith("fc1.")}


@case(r"fc1\.bias", strict_only=True)
def bias_of_an_fp8_layer_missing(c):
    del c.tensors["fc1.bias"]


@case(r"gain", strict_only=True)
def parameter_missing(c):
    del c.tensors["gain"]


@case(r"plain\.weight", places=("meta",))
def parameter_missing_on_meta(c):
    del c.tensors["plain.weight"]


@case(r"norm\.running_mean", strict_only=True)
def buffer_missing(c):
    del c.tensors["norm.running_mean"]


@case(r"head\.bias", strict_only=True)
def extra_parameter(c):
    c.tensors["head.bias"] = torch.ones(3)


@case(r"head\.weight", strict_only=True)
def fp8_layer_of_another_model(c):
    other = draft(seeded(lambda: nn.ModuleDict({"head": nn.Linear(8, 8)})), ["head"])
    c.tensors |= other.tensors
    c.layers |= other.layers


@case(r"fc1\.weight_scale_2", strict_only=True)
def second_scale(c):
    c.tensors["fc1.weight_scale_2"] = torch.ones(1)


@case(r"norm\.weight_scale", strict_only=True)
def scale_beside_a_float_weight(c):
    c.tensors["norm.weight_scale"] = torch.ones(1)


@case(r"act\.input_scale", strict_only=True)
def scale_of_no_module(c):
    c.tensors["act.input_scale"] = torch.ones(1)


@case(r"fc1\.input_scale", strict_only=True)
def input_scale_of_a_dynamic_layer(c):
    c.layers["fc1"] = DYNAMIC


@case(r"fc1\.input_scale", strict_only=True)
def input_scale_of_a_weight_only_layer(c):
    c.layers["fc1"] = WEIGHT_ONLY


@case(r"fc1\.weight_zero_point", strict_only=True)
def zero_point(c):
    c.tensors["fc1.weight_zero_point"] = torch.ones(1)


@case(r"plain\.weight")
def fp8_weight_without_scale_or_entry(c):
    c.tensors["plain.weight"] = c.tensors["plain.weight"].to(F8)


@case(r"fc1\.weight.*no layer_config entry")
def fp8_weight_without_entry(c):
    del c.layers["fc1"]


@case(r"gain.*F8_E4M3")
def fp8_tensor_that_is_no_weight(c):
    c.tensors["gain"] = c.tensors["gain"].to(F8)


@case(r"table.*F8_E5M2")
def fp8_tensor_of_no_module(c):
    c.tensors["table"] = torch.ones(3).to(torch.float8_e5m2)


# --- shapes ---
@case(r"fc1\.weight .*\[8, 16\].*\[16, 8\]")
def transposed_weight(c):
    c.tensors["fc1.weight"] = c.tensors["fc1.weight"].t().contiguous()


@case(r"fc1\.weight .*\[15, 8\].*\[16, 8\]")
def short_weight(c):
    c.tensors["fc1.weight"] = c.tensors["fc1.weight"].view(torch.uint8)[:15].view(F8)


@case(r"plain\.bias .*\[1\].*\[8\]")
def bias_that_would_broadcast(c):
    c.tensors["plain.bias"] = torch.ones(1)


@case(r"gain .*\[8, 1\].*\[8\]")
def parameter_of_another_rank(c):
    c.tensors["gain"] = torch.ones(8, 1)


@case(r"fc1\.bias .*\[\].*\[16\]")
def scalar_bias(c):
    c.tensors["fc1.bias"] = torch.ones(())


@case(r"fc1\.weight_scale .*\[1, 16\]")
def transposed_scale(c):
    c.channel()
    c.tensors["fc1.weight_scale"] = c.tensors["fc1.weight_scale"].reshape(1, 16)


@case(r"fc1\.weight_scale .*\[15\]")
def short_scale(c):
    c.channel()
    c.tensors["fc1.weight_scale"] = c.tensors["fc1.weight_scale"][:15]


@case(r"fc1\.weight_scale .*\[17\]")
def long_scale(c):
    c.channel()
    c.tensors["fc1.weight_scale"] = torch.ones(17)


@case(r"fc1\.weight_scale .*\[8\]")
def scale_along_the_inputs(c):
    c.channel()
    c.tensors["fc1.weight_scale"] = torch.ones(8)


@case(r"fc1\.weight_scale .*\[1\]")
def one_scale_for_a_layer_per_channel(c):
    c.channel()
    c.tensors["fc1.weight_scale"] = torch.ones(1)


@case(r"fc1\.weight_scale .*\[16\]")
def many_scales_for_a_layer_per_tensor(c):
    c.tensors["fc1.weight_scale"] = torch.ones(16)


@case(r"fc1\.weight_scale .*\[0\]")
def empty_scale(c):
    c.tensors["fc1.weight_scale"] = torch.ones(0)


@case(r"fc1\.weight_scale .*\[2, 4\]")
def transposed_block_grid(c):
    c.layers["fc1"]["tile"] = [4, 4]
    c.tensors["fc1.weight_scale"] = torch.ones(2, 4)


@case(r"fc1\.weight_scale .*\[4, 3\]")
def block_grid_of_another_tile(c):
    c.layers["fc1"]["tile"] = [4, 4]
    c.tensors["fc1.weight_scale"] = torch.ones(4, 3)


@case(r"fc1\.input_scale .*\[8\]")
def vector_input_scale(c):
    c.tensors["fc1.input_scale"] = torch.ones(8)


@case(r"fc1\.input_scale .*\[0\]")
def empty_input_scale(c):
    c.tensors["fc1.input_scale"] = torch.ones(0)


# --- values ---
def _spoil_value(name, value, at=0):
    def spoil(c):
        c.channel()
        c.tensors[name][at] = value

    spoil.__name__ = f"{name.replace('.', '_')}_is_{value}".replace("-", "minus_")
    case(rf"{name} .*(NaN|infinite|negative|is 0)".replace(".weight", r"\.weight").replace(".input", r"\.input"))(spoil)


for _value in (float("nan"), float("inf"), float("-inf"), -1.0):
    _spoil_value("fc1.weight_scale", _value, at=7)
    _spoil_value("fc2.input_scale", _value)
_spoil_value("fc2.input_scale", 0.0)
_spoil_value("fc2.input_scale", -0.0)


@case(r"fc1\.weight .*2 of its codes")
def nan_codes(c):
    codes = c.tensors["fc1.weight"].view(torch.uint8)
    codes[3, 2], codes[15, 7] = 0x7F, 0xFF


@case(r"fc1\.weight ")
def nan_codes_of_fnuz(c):
    c.layers["fc1"]["weight_dtype"] = "float8_e4m3fnuz"
    codes = c.tensors["fc1.weight"].view(torch.uint8).clone().clamp(max=0x70)
    codes[0, 0] = 0x80
    c.tensors["fc1.weight"] = codes.view(torch.float8_e4m3fnuz)


@case(r"fc1\.weight ")
def infinite_codes(c):
    c.layers["fc1"]["weight_dtype"] = "float8_e5m2"
    codes = c.tensors["fc1.weight"].view(torch.uint8).clone().clamp(max=0x70)
    codes[0, 0], codes[1, 1] = 0x7C, 0xFC
    c.tensors["fc1.weight"] = codes.view(torch.float8_e5m2)


@case(r"fc1\.weight_scale .*infinite")
def scale_beyond_float32(c):
    c.layers["fc1"]["scale_dtype"] = "float64"
    c.tensors["fc1.weight_scale"] = torch.tensor([1e300], dtype=torch.float64)


@case(r"fc1\.input_scale .*is 0")
def input_scale_below_float32(c):
    c.tensors["fc1.input_scale"] = torch.tensor([1e-300], dtype=torch.float64)


# --- dtypes ---
def _spoil_scale_dtype(dtype):
    def spoil(c):
        c.tensors["fc1.weight_scale"] = torch.ones(1).to(dtype)

    spoil.__name__ = f"scale_stored_as_{str(dtype).removeprefix('torch.')}"
    case(r"fc1\.weight_scale ")(spoil)


for _dtype in (torch.int32, torch.uint8, torch.bool, torch.float16, torch.bfloat16, F8, torch.float8_e8m0fnu):
    _spoil_scale_dtype(_dtype)


@case(r"fc2\.input_scale .*I64")
def integer_input_scale(c):
    c.tensors["fc2.input_scale"] = torch.ones(1, dtype=torch.int64)


@case(r"fc1\.weight .*float8_e4m3fn.*float8_e5m2")
def weight_of_another_fp8_format(c):
    c.layers["fc1"]["weight_dtype"] = "float8_e5m2"


def _float_weight_listed(scheme, scale):
    def spoil(c):
        c.use(Victim, ["fc1", "fc2"], scheme)
        c.tensors["fc1.weight"] = seeded(Victim).fc1.weight.detach().clone()
        if not scale:
            del c.tensors["fc1.weight_scale"]

    kind = "static" if scheme is STATIC else "dynamic" if scheme is DYNAMIC else "weight_only"
    spoil.__name__ = f"float_weight_listed_{kind}_{'with' if scale else 'without'}_scale"
    case(r"fc1\.weight .*(float32|F32)")(spoil)


for _scheme in (STATIC, DYNAMIC, WEIGHT_ONLY):
    _float_weight_listed(_scheme, True)
    _float_weight_listed(_scheme, False)


@case(r"fc1\.weight ")
def integer_weight_listed(c):
    c.tensors["fc1.weight"] = torch.ones(16, 8, dtype=torch.int8)


@case(r"plain\.weight .*I64")
def integers_for_a_float_parameter(c):
    c.tensors["plain.weight"] = torch.ones(8, 8, dtype=torch.int64)


@case(r"plain\.weight .*BOOL")
def booleans_for_a_float_parameter(c):
    c.tensors["plain.weight"] = torch.ones(8, 8, dtype=torch.bool)


@case(r"plain\.weight .*C64")
def complex_numbers_for_a_float_parameter(c):
    c.tensors["plain.weight"] = torch.ones(8, 8, dtype=torch.complex64)


@case(r"plain\.weight .*U8")
def packed_bytes_for_a_float_parameter(c):
    c.tensors["plain.weight"] = torch.ones(8, 4, dtype=torch.uint8)


@case(r"norm\.num_batches_tracked .*F32")
def float_for_an_integer_buffer(c):
    c.tensors["norm.num_batches_tracked"] = torch.tensor(1.5)


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("ids", torch.zeros(2, dtype=torch.uint8))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("short", torch.zeros(2, dtype=torch.float16))

    def forward(self, x):
        return self.fc(x)


@case(r"ids")
def integers_that_do_not_fit(c):
    c.use(Buffers, ["fc"])
    c.tensors["ids"] = torch.tensor([300, 2])


@case(r"mask")
def integers_for_booleans(c):
    c.use(Buffers, ["fc"])
    c.tensors["mask"] = torch.tensor([7, 0])


@case(r"ids")
def complex_numbers_for_integers(c):
    c.use(Buffers, ["fc"])
    c.tensors["ids"] = torch.tensor([1 + 2j, 0])


# --- the manifest ---
def _spoil_fields(name, match, **fields):
    def spoil(c):
        c.draft.fields.update(fields)

    spoil.__name__ = name
    case(match)(spoil)


_spoil_fields("unknown_field", "'layer_cfg'.*valid: .*layer_config", layer_cfg={})
_spoil_fields("unknown_version", "version 2", version=2)
_spoil_fields("version_of_another_type", "version '1'", version="1")
_spoil_fields("another_format", "'other'", format="other")
_spoil_fields("no_layer_config", "layer_config", layer_config=None)
_spoil_fields("layer_config_is_a_list", "layer_config", layer_config=[])
_spoil_fields("entry_is_a_string", "layer_config", layer_config={"fc1": "FP8_STATIC"})
_spoil_fields("ignore_is_a_string", "ignore", ignore="plain")
_spoil_fields("ignore_holds_a_number", "ignore", ignore=[1])


def _spoil_entry(name, match, **entry):
    def spoil(c):
        c.layers["fc1"] = c.layers["fc1"] | entry

    spoil.__name__ = name
    case(match)(spoil)


_spoil_entry("unknown_scheme_key", r"fc1: .*'granularity'.*valid: .*tile", granularity="tensor")
_spoil_entry("unknown_weight_dtype", r"fc1: .*float8_e3m4", weight_dtype="float8_e3m4")
_spoil_entry("unknown_act_dtype", r"fc1: .*int8", act_dtype="int8")
_spoil_entry("unknown_scale_dtype", r"fc1: .*int32", scale_dtype="int32")
_spoil_entry("weight_dtype_null", r"fc1: .*weight_dtype", weight_dtype=None)
_spoil_entry("tile_of_zero", r"fc1: .*tile", tile=[0, -1])
_spoil_entry("tile_of_a_fraction", r"fc1: .*tile", tile=[1.0, -1])
_spoil_entry("tile_of_text", r"fc1: .*tile", tile="tensor")
_spoil_entry("tile_empty", r"fc1: .*tile", tile=[])
_spoil_entry("tile_of_another_rank", r"fc1.*tile", tile=[1, 1, 1])
_spoil_entry("static_per_token", r"fc1: .*act_tile", act_tile=[1, -1])
_spoil_entry("act_dynamic_is_text", r"fc1: .*act_dynamic", act_dynamic="false")
_spoil_entry("weight_only_but_dynamic", r"fc1: .*weight-only", act_dtype=None, act_dynamic=True)


@case(r"fc1: listed in layer_config and in ignore")
def listed_and_ignored(c):
    c.draft.ignore.append("fc1")


@case(r"ghost\.weight")
def entry_without_tensors(c):
    c.layers["ghost"] = STATIC


@case(r"norm\.weight")
def entry_for_a_float_layer(c):
    c.layers["norm"] = WEIGHT_ONLY | {"tile": [-1]}


def _spoil_json(name, match, change):
    def spoil(c):
        path = c.folder / "anyfp8.json"
        c.spoil_files = lambda: path.write_text(change(path.read_text()))

    spoil.__name__ = name
    case(match)(spoil)


_spoil_json("manifest_is_no_json", r"anyfp8\.json", lambda text: text[:-1])
_spoil_json("manifest_is_a_list", r"anyfp8\.json", lambda text: f"[{text}]")
_spoil_json("manifest_is_empty", r"anyfp8\.json", lambda text: "")
_spoil_json(
    "layer_listed_twice",
    r"anyfp8\.json.*fc1",
    lambda text: text.replace('"fc1": ', f'"fc1": {json.dumps(WEIGHT_ONLY)}, "fc1": ', 1),
)
_spoil_json("field_given_twice", r"anyfp8\.json.*ignore", lambda text: text.replace("{", '{"ignore": ["fc2"], ', 1))
_spoil_json("deeply_nested_json", r"anyfp8\.json", lambda text: "[" * 100_000)


# --- files ---
@case(r"model-00002-of-00003\.safetensors.*truncated")
def truncated_shard(c):
    c.shards = 3
    shard = c.folder / "model-00002-of-00003.safetensors"
    c.spoil_files = lambda: shard.write_bytes(shard.read_bytes()[:-1])


@case(r"model\.safetensors.*trailing")
def trailing_bytes(c):
    file = c.folder / "model.safetensors"
    c.spoil_files = lambda: file.write_bytes(file.read_bytes() + b"\0")


@case(r"model\.safetensors")
def a_file_that_is_no_safetensors(c):
    c.spoil_files = lambda: (c.folder / "model.safetensors").write_bytes(b"\x80\x02}q\x00." * 10)


@case(r"model\.safetensors")
def an_empty_file(c):
    c.spoil_files = lambda: (c.folder / "model.safetensors").write_bytes(b"")


@case(r"fc1\.weight")
def overlapping_tensors(c):
    def spoil():
        file = c.folder / "model.safetensors"
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        header["fc1.weight"]["data_offsets"] = header["fc2.weight"]["data_offsets"]
        text = json.dumps(header).encode().ljust(length)
        file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    c.spoil_files = spoil


def _spoil_index(name, match, change):
    def spoil(c):
        c.shards = 2

        def spoil_files():
            path = c.folder / "model.safetensors.index.json"
            index = json.loads(path.read_text())
            change(index["weight_map"], c)
            write_json(path, index)

        c.spoil_files = spoil_files

    spoil.__name__ = name
    case(match)(spoil)


def _outside(where):
    def change(weight_map, c):
        (c.folder.parent / "secret.safetensors").write_bytes((c.folder / weight_map["gain"]).read_bytes())
        weight_map["gain"] = where(c)

    return change


_spoil_index("traversal", r"gain.*outside", _outside(lambda c: "../secret.safetensors"))
_spoil_index("traversal_in_the_middle", r"gain.*outside", _outside(lambda c: "x/../../secret.safetensors"))
_spoil_index("absolute_path", r"gain.*outside", _outside(lambda c: str(c.folder.parent / "secret.safetensors")))
_spoil_index("index_names_a_missing_file", r"gain.*gone\.safetensors", lambda m, c: m.update(gain="gone.safetensors"))
_spoil_index(
    "index_names_another_shard", r"gain", lambda m, c: m.update(gain=next(f for f in m.values() if f != m["gain"]))
)
_spoil_index("index_names_an_unknown_tensor", r"ghost", lambda m, c: m.update(ghost=m["gain"]))
_spoil_index("index_names_a_pickle", r"gain.*bin", lambda m, c: m.update(gain="model.bin"))
_spoil_index("index_is_a_list", r"weight_map", lambda m, c: (m.clear(), m.update(gain=1)))


@case(r"00001-of-00003")
def shards_incomplete_without_index(c):
    c.shards = 3

    def spoil():
        (c.folder / "model.safetensors.index.json").unlink()
        (c.folder / "model-00002-of-00003.safetensors").unlink()

    c.spoil_files = spoil


@case(r"gain")
def tensor_in_two_shards_without_index(c):
    c.shards = 2

    def spoil():
        (c.folder / "model.safetensors.index.json").unlink()
        for i in (1, 2):
            write_tensors(c.folder / "t", {"gain": torch.ones(8)})
            (c.folder / "t" / "model.safetensors").rename(c.folder / f"model-0000{i}-of-00002.safetensors")

    c.spoil_files = spoil


@case(r"a\.safetensors, b\.safetensors")
def two_files_without_a_hint(c):
    def spoil():
        (c.folder / "model.safetensors").rename(c.folder / "a.safetensors")
        (c.folder / "b.safetensors").write_bytes((c.folder / "a.safetensors").read_bytes())

    c.spoil_files = spoil


@case(r"model\.bin.*pickle")
def only_pickles(c):
    c.spoil_files = lambda: (c.folder / "model.safetensors").rename(c.folder / "model.bin")


@case(r"weights\.pt is a pickle")
def a_pickle_as_source(c):
    c.source = c.folder / "weights.pt"
    c.spoil_files = lambda: c.source.write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")


@case(r"holds no \.safetensors")
def an_empty_folder(c):
    c.source = c.folder / "empty"
    c.spoil_files = c.source.mkdir


@case(r"nowhere.* does not exist")
def no_such_path(c):
    c.source = c.folder / "nowhere"


@case(r"weights\.gguf")
def another_kind_of_file(c):
    c.source = c.folder / "weights.gguf"
    c.spoil_files = lambda: c.source.write_bytes(b"GGUF")


# --- dialects ---
@case(r"quant_method 'exl9'")
def unknown_quant_method(c):
    def spoil():
        (c.folder / "anyfp8.json").unlink()
        write_json(c.folder / "config.json", {"quantization_config": {"quant_method": "exl9"}})

    c.spoil_files = spoil


@case(r"2 FP8 tensors \(fc1\.weight, fc2\.weight\)")
def no_manifest_at_all(c):
    c.spoil_files = (c.folder / "anyfp8.json").unlink


@case(r"2 FP8 tensors \(fc1\.weight, fc2\.weight\)")
def fp8_in_a_mapping(c):
    c.source = c.tensors


@case(r"anyfp8.*compressed-tensors|compressed-tensors.*anyfp8")
def two_dialects(c):
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}}
    c.spoil_files = lambda: write_json(c.folder / "config.json", config)


@case(r"unknown dialect 'gptq'; known: anyfp8")
def unknown_dialect(c):
    c.options["dialect"] = "gptq"


@case(r"anyfp8\.json is missing")
def a_dialect_that_is_not_there(c):
    c.options["dialect"] = "anyfp8"
    c.spoil_files = (c.folder / "anyfp8.json").unlink


# --- options ---
@case(r"unknown backend 'cuda'; known: .*native")
def unknown_backend(c):
    c.options["backend"] = "cuda"


@case(r"conv.*no FP8 convolution")
def native_convolution(c):
    c.use(lambda: nn.ModuleDict({"conv": nn.Conv2d(3, 4, 1)}), ["conv"], STATIC, inputs=())
    c.options["backend"] = "native"


@case(r"fc1.*weight-only")
def native_weight_only(c):
    c.use(Victim, ["fc1"], WEIGHT_ONLY)
    c.options["backend"] = "native"


@case(r"fc2.*auto_round:torch_fp8_static needs")
def static_backend_for_a_dynamic_layer(c):
    c.use(Victim, ["fc2"], DYNAMIC)
    c.options["backend"] = "auto_round:torch_fp8_static"


def _spoil_option(name, match, **options):
    def spoil(c):
        c.options.update(options)

    spoil.__name__ = name
    case(match)(spoil)


_spoil_option("dtype_is_text", "dtype.*bfloat16", dtype="bfloat16")
_spoil_option("dtype_is_an_integer_type", "dtype.*int32", dtype=torch.int32)
_spoil_option("dtype_is_fp8", "dtype.*float8_e4m3fn", dtype=F8)
_spoil_option("device_meta", "meta", device="meta")
_spoil_option("device_unknown", "warp9", device="warp9")
_spoil_option("rename_is_no_regex", r"rename.*\(fc", rename={"(fc": "x"})
_spoil_option("rename_names_no_group", r"rename", rename={"(fc1)": r"\2"})
_spoil_option("rename_maps_two_onto_one", r"fc2\.weight|fc1\.weight", rename={"fc1": "fc2"})


@case(r"fc2\.weight|fc1\.weight")
def rename_maps_equal_codes_with_other_scales_onto_one(c):
    def make():
        return nn.ModuleDict({"a": nn.Linear(8, 8)})

    both = draft(seeded(lambda: nn.ModuleDict({"fc1": nn.Linear(8, 8)})), ["fc1"])
    c.use(make, [], inputs=())
    c.tensors.clear()
    c.tensors |= both.tensors | {n.replace("fc1", "fc2"): t for n, t in both.tensors.items()}
    c.tensors["fc2.weight_scale"] = c.tensors["fc2.weight_scale"] * 2
    c.layers |= {"fc1": STATIC, "fc2": STATIC}
    c.options["rename"] = {"fc.": "a"}


# --- names ---
@case(r"fc1\.weight", strict_only=True)
def rename_that_loses_a_layer(c):
    c.options["rename"] = {"fc1": "lost"}


@case(r"none of|fc1_lost\.weight")
def nothing_matches(c):
    c.options["rename"] = lambda path: f"{path}_lost"


@case(r"fc1\.weight", strict_only=True)
def an_ambiguous_prefix(c):
    """Two places of the model would take the file's names."""
    c.make = lambda: nn.ModuleDict({"a": Victim(), "b": Victim()})
    c.inputs = ()


@case(r"net\.fc1\.weight", strict_only=True)
def a_prefix_of_some_names_only(c):
    tensors, layers = dict(c.tensors), dict(c.layers)
    c.tensors.clear(), c.layers.clear()
    c.tensors |= {(n if n == "gain" else f"net.{n}"): t for n, t in tensors.items()}
    c.layers |= {f"net.{n}": entry for n, entry in layers.items()}


@case(r"gain", strict_only=True)
def a_prefix_with_a_tensor_missing(c):
    c.draft = c.draft.renamed(lambda path: f"net.{path}" if path else "net")
    del c.draft.tensors["net.gain"]


# --- the model ---
class Table(nn.Module):
    """A buffer that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(3), persistent=False)


class Raising(Table):
    def init_non_persistent_buffers(self):
        raise ValueError("boom")


class Forgetful(Table):
    def init_non_persistent_buffers(self):
        pass


class Vandal(Table):
    def init_non_persistent_buffers(self):
        self.table = torch.ones(3)
        self.register_buffer("table", None)


def _spoil_hook(make, match):
    def spoil(c):
        c.use(lambda: nn.ModuleDict({"ok": nn.Linear(8, 8), "rope": make()}), ["ok", "rope.fc"], inputs=())

    spoil.__name__ = f"buffer_hook_{make.__name__}".lower()
    case(match, places=("meta",))(spoil)


_spoil_hook(Table, r"rope\.table: .*init_non_persistent_buffers")
_spoil_hook(Raising, r"rope.*boom")
_spoil_hook(Forgetful, r"rope\.table")
_spoil_hook(Vandal, r"rope\.table")


@case(r"head\.weight.*emb\.weight|emb\.weight.*head\.weight")
def tied_weights_that_differ(c):
    c.use(Tied, [], inputs=(torch.arange(5),))
    c.tensors["head.weight"] = c.tensors["head.weight"] + 1


@case(r"head\.weight.*emb\.weight|emb\.weight.*head\.weight")
def tied_weights_of_two_float_dtypes(c):
    c.use(Tied, [], inputs=(torch.arange(5),))
    c.tensors["head.weight"] = c.tensors["head.weight"].bfloat16()


def tied_by_memory():
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    return model


@case(r"b\.weight.*a\.weight|a\.weight.*b\.weight", places=("real",))
def tied_by_memory_that_differ(c):
    c.use(tied_by_memory, [], inputs=())
    c.model = tied_by_memory  # a deepcopy would part them
    c.tensors["b.weight"] = c.tensors["b.weight"] + 1


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(2, 8, 4))
        self.down_proj = nn.Parameter(torch.ones(2, 4, 4))


def _experts(c, names=("gate_proj", "up_proj", "down_proj"), count=2):
    c.use(lambda: nn.ModuleDict({"experts": Experts()}), [], inputs=())
    c.tensors.clear()
    c.tensors |= {f"experts.{i}.{n}.weight": torch.full((4, 4), 1.0 + i) for i in range(count) for n in names}


@case(r"experts\.down_proj.*expert 1")
def one_expert_missing(c):
    _experts(c)
    del c.tensors["experts.1.down_proj.weight"]


@case(r"experts\.2\.\w+\.weight .*\[4, 4\]")
def one_expert_too_many(c):
    _experts(c, count=3)


@case(r"experts\.gate_up_proj")
def experts_stored_stacked_and_one_by_one(c):
    _experts(c)
    c.draft.tensors = c.tensors = {"experts.gate_up_proj": torch.zeros(2, 8, 4)} | c.tensors


@case(r"second\.weight")
def shared_layer_stored_twice_with_other_weights(c):
    c.use(Shared, [])
    c.tensors["second.weight"] = c.tensors["second.weight"] + 1


@case(r"second")
def shared_layer_stored_twice_with_other_scales(c):
    c.use(Shared, ["first", "second"])
    c.tensors["second.weight_scale"] = c.tensors["second.weight_scale"] * 2


@case(r"second")
def shared_layer_stored_twice_with_other_input_scales(c):
    c.use(Shared, ["first", "second"])
    c.tensors["second.input_scale"] = c.tensors["second.input_scale"] * 2


@case(r"second")
def shared_layer_stored_twice_with_other_schemes(c):
    c.use(Shared, ["first", "second"])
    c.layers["second"] = WEIGHT_ONLY
    del c.tensors["second.input_scale"]


@case(r"second")
def shared_layer_stored_as_fp8_and_as_float(c):
    c.use(Shared, ["first"])


class OwnScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.k_scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.fc(x)


@case(r"k_scale .*\[1\].*\[4\]")
def own_parameter_called_like_a_scale_of_another_shape(c):
    c.use(OwnScale, ["fc"])
    c.tensors["k_scale"] = torch.ones(1)


@case(r"k_scale", strict_only=True)
def own_parameter_called_like_a_scale_missing(c):
    c.use(OwnScale, ["fc"])
    del c.tensors["k_scale"]


@case(r"lazy\.weight.*run the model once", places=("real",))
def lazy_layer(c):
    c.use(lambda: nn.ModuleDict({"lazy": nn.Linear(8, 8), "x": nn.Linear(8, 8)}), ["lazy", "x"], inputs=())
    c.make = lambda: nn.ModuleDict({"lazy": nn.LazyLinear(8), "x": nn.Linear(8, 8)})


# --- mappings ---
def _spoil_mapping(name, match, value):
    def spoil(c):
        c.use(Victim, [])
        c.tensors["plain.weight"] = value
        c.source = c.tensors

    spoil.__name__ = f"mapping_with_{name}"
    case(match)(spoil)


_spoil_mapping("a_meta_tensor", r"plain\.weight.*meta", torch.ones(8, 8, device="meta"))
_spoil_mapping("a_sparse_tensor", r"plain\.weight", torch.eye(8).to_sparse())
_spoil_mapping("a_list", r"plain\.weight", [1.0])
_spoil_mapping("a_quantized_tensor", r"plain\.weight", torch.ones(8, 8, dtype=torch.complex128))
_spoil_mapping("an_fp8_tensor", r"plain\.weight", torch.ones(8, 8).to(F8))
_spoil_mapping("a_wrong_shape", r"plain\.weight .*\[2, 2\].*\[8, 8\]", torch.ones(2, 2))


# --- the test ---
@pytest.mark.parametrize("name", CASES)
def test_a_failed_load_says_why_and_leaves_the_model_alone(tmp_path, name):
    spoil, match, place, options = CASES[name]
    folder = tmp_path / "checkpoint"
    c = Case(folder, place)
    spoil(c)
    c.options |= options
    model = c.model()
    if c.source is not c.tensors:
        c.draft.write(folder, c.shards)
        c.spoil_files()
    before = Snapshot(model, *(c.inputs if place == "real" else ()))
    plan_problems = None
    with contextlib.suppress(anyfp8.AnyFP8Error):
        plan_problems = anyfp8.plan(model, c.source, **c.options).problems
    before.assert_unchanged()
    with pytest.raises(anyfp8.AnyFP8Error, match=f"(?s){match}") as caught:
        anyfp8.load(model, c.source, **c.options)
    before.assert_unchanged()
    if plan_problems:
        assert caught.value.problems == plan_problems
    with pytest.raises(anyfp8.AnyFP8Error, match="was not loaded"):
        anyfp8.report(model)


def test_the_victim_loads_where_nothing_is_spoiled(tmp_path):
    for place in ("real", "meta"):
        c = Case(tmp_path / place, place)
        model = anyfp8.load(c.model(), c.draft.write(tmp_path / place))
        assert list(anyfp8.report(model).layers) == ["fc1", "fc2"]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.fc1.bias.data.add_(1e-6),
        lambda m: m.norm.running_var.mul_(1.001),
        lambda m: m.fc1.eval(),
        lambda m: m.fc2.register_forward_hook(lambda *a: None),
        lambda m: setattr(m, "gain", nn.Parameter(m.gain.detach().clone())),
        lambda m: setattr(m, "fc2", Doubling(16, 8)),
        lambda m: m.plain.weight.requires_grad_(not m.plain.weight.requires_grad),
        lambda m: setattr(m.fc1, "extra", 1),
        lambda m: m.norm.register_buffer("running_mean", m.norm.running_mean.clone()),
    ],
)
def test_the_snapshot_sees_any_change(tmp_path, change):
    model = Case(tmp_path, "real").model()
    before = Snapshot(model, X)
    before.assert_unchanged()
    change(model)
    with pytest.raises(AssertionError, match=r"."):
        before.assert_unchanged()


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:FutureWarning")
def test_a_scripted_model_is_refused(tmp_path):
    """Its code is compiled: a layer that was put into it would not be called."""
    folder = draft(mlp(), ["0", "2"]).write(tmp_path)
    scripted = torch.jit.script(mlp())
    before = scripted(X)
    for call in (anyfp8.plan, anyfp8.load):
        with pytest.raises(anyfp8.AnyFP8Error, match=r"(?i)script"):
            call(scripted, folder)
    assert torch.equal(scripted(X), before)


# --- failures of the machine, and of what was loaded before ---
def test_a_file_that_cannot_be_mapped(tmp_path, monkeypatch):
    """Some network file systems have no mmap: that must show before anything is changed, plain shards included."""
    c = Case(tmp_path, "real")
    tensors = dict(c.tensors)
    write_tensors(tmp_path, tensors)
    write_json(tmp_path / "anyfp8.json", c.draft.manifest())
    plain = {n: t for n, t in tensors.items() if n.split(".")[0] not in c.layers}
    fp8 = {n: t for n, t in tensors.items() if n not in plain}
    (tmp_path / "model.safetensors").unlink()
    weight_map = {}
    for i, part in enumerate((fp8, plain)):
        write_tensors(tmp_path / "t", part)
        name = f"model-0000{i + 1}-of-00002.safetensors"
        (tmp_path / "t" / "model.safetensors").rename(tmp_path / name)
        weight_map |= dict.fromkeys(part, name)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    real, calls = mmap.mmap, []

    def fail_second(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(19, "No such device")
        return real(*args, **kwargs)

    model = c.model()
    before = Snapshot(model, X)
    monkeypatch.setattr(mmap, "mmap", fail_second)
    with pytest.raises(anyfp8.AnyFP8Error, match=r"model-0000\d-of-00002\.safetensors.*No such device"):
        anyfp8.load(model, tmp_path)
    monkeypatch.undo()
    before.assert_unchanged()


@pytest.mark.parametrize("spoil", ["missing scale", "nan codes", "extra"])
def test_a_failed_load_over_an_fp8_model_leaves_it_as_it_was(tmp_path, spoil):
    model = anyfp8.load(stale(mlp()), draft(mlp(), ["0", "2"]).write(tmp_path / "good"))
    report = anyfp8.report(model).to_dict()
    before = Snapshot(model, X)
    bad = draft(mlp(seed=1), ["0", "2"])
    if spoil == "missing scale":
        del bad.tensors["2.weight_scale"]
    elif spoil == "nan codes":
        bad.tensors["2.weight"].view(torch.uint8)[0, 0] = 0x7F
    else:
        bad.tensors["extra"] = torch.ones(1)
    with pytest.raises(anyfp8.LoadError, match=r"2\.weight|extra"):
        anyfp8.load(model, bad.write(tmp_path / "bad"))
    before.assert_unchanged()
    assert anyfp8.report(model).to_dict() == report


def test_an_fp8_layer_whose_forward_was_replaced_is_not_loaded_over(tmp_path):
    folder = draft(mlp(), ["0", "2"], DYNAMIC).write(tmp_path)
    model = anyfp8.load(stale(mlp()), folder)
    inner = model[0].forward
    model[0].forward = lambda x: inner(x)
    before = Snapshot(model, X)
    with pytest.raises(anyfp8.LoadError, match=r"0\.weight.*forward was replaced"):
        anyfp8.load(model, folder)
    before.assert_unchanged()


def test_every_problem_is_listed_at_once(tmp_path):
    c = Case(tmp_path, "meta")
    del c.tensors["fc1.weight_scale"], c.tensors["gain"]
    c.tensors["fc2.weight"].view(torch.uint8)[0, 0] = 0x7F
    c.tensors["plain.weight"] = torch.ones(3, 3)
    c.tensors["extra.bias"] = torch.ones(1)
    c.draft.ignore.append("fc2")
    with pytest.raises(
        anyfp8.LoadError, match=r"(?s)6 problems.*contradict.*missing.*not in the model.*shape.*unusable"
    ) as caught:
        anyfp8.load(c.model(), c.draft.write(tmp_path))
    assert {p.name for p in caught.value.problems} == {
        "fc1.weight_scale",
        "gain",
        "fc2.weight",
        "plain.weight",
        "extra.bias",
        "fc2",
    }
    assert str(tmp_path) in str(caught.value)


def test_names_are_folded_and_the_closest_name_is_offered(tmp_path):
    make = lambda: nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(8, 8) for _ in range(12))})  # noqa: E731
    written = draft(seeded(make), [f"blocks.{i}" for i in range(12)], DYNAMIC)
    written.renamed(lambda path: path.replace("blocks", "block")).write(tmp_path)
    with pytest.raises(anyfp8.LoadError, match=r"block\.\{0…11\}\.weight") as caught:
        anyfp8.load(seeded(make), tmp_path)
    assert "blocks.0.weight" in str(caught.value)
    assert len(str(caught.value)) < 1000
