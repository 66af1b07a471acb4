"""Checkpoints that other tools wrote: the weights they mean and the outputs they compute (see `golden/README.md`)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import anyfp8
from tests.helpers import assert_same_bytes, max_relative_error, sqnr

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/case.json"))
#: every how many rows `weights.safetensors` has
STEP = 5

pytestmark = pytest.mark.filterwarnings("ignore:::(transformers|diffusers|timm|huggingface_hub|torch).*")


def case_of(name):
    return json.loads((GOLDEN / name / "case.json").read_text())


def build(case):
    """The float model, with weights that are not the checkpoint's."""
    spec = case["model"]
    library = pytest.importorskip(spec["library"])
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        if spec["library"] == "transformers":
            kind = getattr(library, spec["class"])
            config = kind.config_class.from_dict(dict(spec["config"]))
            config._attn_implementation = "eager"
            model = kind(config)
        elif spec["library"] == "diffusers":
            model = getattr(library, spec["class"])(**spec["config"])
        else:
            model = getattr(library.models.vision_transformer, spec["class"])(**spec["config"])
    return model.float().eval()


def outputs(model, name):
    """Key → (got, wanted) of every output in the case."""
    case, tensors = case_of(name), load_file(GOLDEN / name / "io.safetensors")
    inputs = {key[3:]: value for key, value in tensors.items() if key.startswith("in.")}
    found = {}
    for key, spec in case["outputs"].items():
        with torch.no_grad():
            out = model(*[inputs[arg] for arg in spec["args"]]) if "args" in spec else model(**inputs)
        out = out if isinstance(out, torch.Tensor) else getattr(out, spec["field"])
        found[key] = (out, tensors[f"out.{key}"])
    return found


def assert_right(model, name):
    case, weights = case_of(name), load_file(GOLDEN / name / "weights.safetensors")
    assert weights
    for key, want in weights.items():
        module, _, leaf = key.rpartition(".")
        got = getattr(model.get_submodule(module), leaf).detach()[::STEP]
        assert got.shape == want.shape, key
        assert max_relative_error(got, want) <= case["weights_rtol"], key
    for key, (got, want) in outputs(model, name).items():
        assert got.shape == want.shape, key
        assert sqnr(got, want) >= case["outputs"][key]["sqnr_db"], key


@pytest.mark.parametrize("name", CASES)
def test_a_golden_checkpoint(name):
    case = case_of(name)
    model = anyfp8.load(build(case), GOLDEN / name / case["source"], **case.get("load", {}))
    assert_right(model, name)


@pytest.mark.parametrize("name", CASES)
def test_the_same_after_save_and_load(name, tmp_path):
    case = case_of(name)
    model = anyfp8.load(build(case), GOLDEN / name / case["source"], **case.get("load", {}))
    anyfp8.save(model, tmp_path / "saved", max_shard_size="100KB")
    again = anyfp8.load(build(case), tmp_path / "saved", backend=case.get("load", {}).get("backend", "auto"))
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert_same_bytes(after[key], value)
    for (got, _), (want, _) in zip(outputs(again, name).values(), outputs(model, name).values(), strict=True):
        assert_same_bytes(got, want)


def is_weight_only(name):
    outputs = case_of(name)["outputs"].values()
    return "fpw8a16" in name or "_wo_" in name or any(spec.get("weight_only_sqnr_db") == "exact" for spec in outputs)


@pytest.mark.parametrize("name", [name for name in CASES if not is_weight_only(name)])
def test_a_weight_only_load_falls_short_of_the_bound(name):
    """Otherwise the bound would not see whether inputs are quantized."""
    case = case_of(name)
    options = case.get("load", {}) | {"backend": "dequantized"}
    model = anyfp8.load(build(case), GOLDEN / name / case["source"], **options)
    for key, (got, want) in outputs(model, name).items():
        assert sqnr(got, want) < case["outputs"][key]["sqnr_db"], key


def test_a_wrong_scale_is_seen():
    name = "ct_timm_vit_fp8_dynamic"
    case = case_of(name)
    model = anyfp8.load(build(case), GOLDEN / name / case["source"])
    layer = next(m for m in model.modules() if isinstance(m, anyfp8.FP8Linear))
    layer.weight_scale[5] *= 1.01
    with pytest.raises(AssertionError, match="weight"):
        assert_right(model, name)


def test_what_a_stock_loader_would_make_of_it():
    """The fault this library exists for: codes taken as weights. The comparison must be far below its bound."""
    name = "ct_timm_vit_fp8_static"
    case = case_of(name)
    model = build(case)
    tensors = load_file(GOLDEN / name / case["source"] / "model.safetensors")
    model.load_state_dict({k: t.float() for k, t in tensors.items()}, strict=False)
    ((got, want),) = outputs(model, name).values()
    assert sqnr(got, want) < 10


def test_exceptions_of_golden_files_have_reasons():
    manifest = anyfp8.inspect(GOLDEN / "auto-round-fp8_static-kv" / "checkpoint")
    assert len(manifest.exceptions) == 4
    assert {reason.split(":")[0] for reason in manifest.exceptions.values()} == {"a KV-cache or attention scale"}
    assert any("KV-cache" in note for note in manifest.notes)


@pytest.mark.parametrize("name", CASES)
def test_golden_manifests_have_no_loose_ends(name):
    case = case_of(name)
    manifest = anyfp8.inspect(GOLDEN / name / case["source"], dialect=case.get("load", {}).get("dialect"))
    assert manifest.problems == ()
    assert manifest.unclaimed == {}
    assert manifest.layers


def test_every_folder_is_described_and_there_are_enough():
    text = (GOLDEN / "README.md").read_text()
    assert len(CASES) >= 12
    assert [name for name in CASES if f"`{name}`" not in text] == []
    assert all(case_of(name)["peer"] and case_of(name)["peer_version"] for name in CASES)
    assert sum(p.stat().st_size for p in GOLDEN.rglob("*")) < 16e6


def test_build_gives_other_weights_than_the_checkpoint():
    case = case_of("ct_timm_vit_fp8_static")
    model = build(case)
    assert isinstance(model, nn.Module)
    tensors = load_file(GOLDEN / "ct_timm_vit_fp8_static" / "checkpoint" / "model.safetensors")
    assert not torch.equal(model.patch_embed.proj.weight, tensors["patch_embed.proj.weight"].float())
