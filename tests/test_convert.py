"""convert and save into other formats: the decoded weights stay, and the formats' own packages read what we wrote."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8.numerics import dequantize
from anyfp8.writers import WRITERS
from tests.checkpoints import seeded
from tests.helpers import max_relative_error, sqnr

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(p.parent for p in GOLDEN.glob("*/case.json"))
FOREIGN = [name for name in WRITERS if name != "anyfp8"]


def readable(folder):
    """(source, dialect) of a golden folder, or None if it is one that must be refused."""
    case = json.loads((folder / "case.json").read_text())
    if case.get("expect") == "refuse":
        return None
    return folder / case["source"], case.get("load", {}).get("dialect")


def decoded(source, dialect=None):
    """Layer → (weight as float32, input scale, scheme without the dtype that its scales are stored in)."""
    manifest = anyfp8.inspect(source, dialect=dialect)
    assert not manifest.problems
    out = {}
    for name, spec in manifest.layers.items():
        values, scheme = spec.read(), spec.scheme
        codes, scale, zero = values["weight_codes"], values["weight_scale"], values.get("weight_zero_point")
        weight = dequantize(codes, scale, scheme.weight_dtype, scheme.tile, torch.float32, zero)
        out[name] = (weight, values.get("input_scale"), {k: v for k, v in dict(scheme).items() if k != "scale_dtype"})
    return out, set(manifest.plain)


@pytest.mark.parametrize("to", WRITERS)
@pytest.mark.parametrize("folder", CASES, ids=lambda p: p.name)
def test_round_trip_is_bit_exact(folder, to, tmp_path):
    found = readable(folder)
    if found is None:
        with pytest.raises(anyfp8.AnyFP8Error, match="pickle"):
            anyfp8.convert(folder / "checkpoint", tmp_path / "out", to=to)
        return
    source, dialect = found
    before, plain = decoded(source, dialect)
    if not before:
        with pytest.raises(anyfp8.AnyFP8Error, match="no FP8 layer"):
            anyfp8.convert(source, tmp_path / "out", to=to, dialect=dialect)
        return
    refusal = None
    try:
        anyfp8.convert(source, tmp_path / "out", to=to, dialect=dialect)
    except anyfp8.AnyFP8Error as error:
        refusal = str(error)
    if refusal is not None:
        assert to != "anyfp8" or "load it into the model" in refusal, "our own format says everything that a file says"
        assert not (tmp_path / "out").exists(), "refused before anything is written"
        return
    after, plain_after = decoded(tmp_path / "out")
    assert after.keys() == before.keys()
    assert plain_after == plain
    for name, (weight, input_scale, scheme) in before.items():
        # NVFP4's outer scale multiplies in some formats and divides in others: its reciprocal is rounded once
        bound = 2e-7 if scheme["weight_dtype"] == "float4_e2m1fn" and scheme["tile"] == (1, 16) else 0
        assert max_relative_error(after[name][0], weight) <= bound, name
        assert after[name][2] == scheme, name
        assert (input_scale is None) == (after[name][1] is None), name
        if input_scale is not None:
            torch.testing.assert_close(after[name][1], input_scale, rtol=1e-6, atol=0)


def test_every_format_says_at_least_three_golden_files(tmp_path):
    said = dict.fromkeys(WRITERS, 0)
    for folder in CASES:
        found = readable(folder)
        manifest = None if found is None else anyfp8.inspect(found[0], dialect=found[1])
        if manifest is None or not manifest.layers:
            continue
        for to in WRITERS:
            writer = anyfp8.convert.__globals__["writers"].get(to)
            layers = [anyfp8.convert.__globals__["_layer"](spec) for spec in manifest.layers.values()]
            said[to] += not any(map(writer.refuse, layers)) and not writer.refuse_all(layers)
    assert min(said.values()) >= 3, said


def tiny_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return seeded(lambda: transformers.LlamaForCausalLM(config))


def hf_folder(model, scheme, folder, **kwargs):
    """The model quantized and saved by us, with transformers' config.json and a file of the user's beside it."""
    ids = torch.arange(32).reshape(2, 16)
    anyfp8.quantize(model, scheme, calibration=[{"input_ids": ids}], exclude="lm_head")
    anyfp8.save(model, folder, **kwargs)
    model.config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return ids


@pytest.mark.parametrize("scheme", ["FP8", "FP8_STATIC", "FP8_DYNAMIC", "FP8_WEIGHT_ONLY"])
def test_transformers_with_compressed_tensors_reads_it(scheme, tmp_path):
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    model = tiny_llama()
    ids = hf_folder(model, scheme, tmp_path / "ours", max_shard_size=60_000)
    anyfp8.convert(tmp_path / "ours", tmp_path / "theirs", to="compressed-tensors")
    assert (tmp_path / "theirs" / "tokenizer.json").exists()
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
        assert sqnr(theirs(ids).logits, model(ids).logits) > 60
        fresh = anyfp8.load(tiny_llama(), tmp_path / "theirs")
        assert torch.equal(fresh(ids).logits, model(ids).logits)


def test_transformers_reads_its_block_format(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = tiny_llama()
    scheme = {"tile": [32, 32], "act_dtype": "float8_e4m3fn", "act_dynamic": True, "act_tile": [1, 32]}
    ids = hf_folder(model, scheme, tmp_path / "ours")
    anyfp8.convert(tmp_path / "ours", tmp_path / "theirs", to="transformers")
    anyfp8.set_backend(model, "dequantized")  # what transformers computes on a CPU
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
        assert sqnr(theirs(ids).logits, model(ids).logits) > 80


@pytest.mark.parametrize("to", FOREIGN)
def test_save_in_a_foreign_format_loads_again(to, tmp_path):
    model = seeded(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    x = torch.randn(3, 32)
    anyfp8.quantize(model, "FP8", calibration=[x])
    anyfp8.save(model, tmp_path / "out", format=to)
    fresh = anyfp8.load(
        seeded(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))), tmp_path / "out"
    )
    assert torch.equal(fresh(x), model(x))
    anyfp8.save(model, tmp_path / "out", format=to)  # its own folder may be replaced


@pytest.mark.parametrize(
    ("to", "scheme", "match"),
    [
        ("compressed-tensors", {"weight_dtype": "float8_e5m2"}, r"(?s)\{0,2\}.*e5m2"),
        ("auto-round", "FP8_DYNAMIC", r"(?s)\{0,2\}.*static or unquantized"),
        ("transformers", "FP8_STATIC", r"(?s)\{0,2\}.*not per channel"),
        ("modelopt", "FP8_WEIGHT_ONLY", r"(?s)\{0,2\}.*no algorithm"),
        ("comfy", "FP8_DYNAMIC", r"(?s)\{0,2\}.*one scale a weight"),
    ],
)
def test_what_a_format_cannot_say_is_refused_first(to, scheme, match, tmp_path):
    model = seeded(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    anyfp8.quantize(model, scheme, calibration=[torch.randn(3, 32)])
    with pytest.raises(anyfp8.AnyFP8Error, match=match):
        anyfp8.save(model, tmp_path / "out", format=to)
    anyfp8.save(model, tmp_path / "ours")
    with pytest.raises(anyfp8.AnyFP8Error, match=match):
        anyfp8.convert(tmp_path / "ours", tmp_path / "out", to=to)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours"]


def test_unknown_formats_are_listed(tmp_path):
    with pytest.raises(anyfp8.AnyFP8Error, match=r"'gguf'; valid: anyfp8, compressed-tensors"):
        anyfp8.save(nn.Linear(2, 2), tmp_path / "out", format="gguf")


def test_convert_refuses_a_source_with_problems(tmp_path):
    source = shutil.copytree(CASES[0] / "checkpoint", tmp_path / "bad")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["act_dynamic"] = False
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("weight_scale"))
    save_file({k: v for k, v in tensors.items() if k != lost}, source / "model.safetensors")
    with pytest.raises(anyfp8.LoadError, match=lost.replace(".", r"\.")):
        anyfp8.convert(source, tmp_path / "out", to="anyfp8")
    assert not (tmp_path / "out").exists()
