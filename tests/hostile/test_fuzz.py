"""Mutated headers, indexes and configs: `load` raises AnyFP8Error and leaves the model alone, or loads what they mean.

How that is decided: `samples.expected` reads the mutated files again, without anyfp8, and computes every weight from
the stored bytes. So a mutation that only changes which bytes a name has (names swapped, a scale said to be BF16) has a
right answer, too. Where the config decides the meaning of a weight, which is its tile and nothing else in these
samples, the oracle takes it from the mutated config (`Sample.tile_path`). What else a config may say (another
activation scheme, another list of modules) changes no weight, and needs tensors that are not in the file, or leaves
some unused, so it is refused or harmless. In mutated headers and indexes the scheme must stay what it was, as the
config did; but for ComfyUI, whose header is its config and where a missing `input_scale` legally means weight-only.

Bytes of the weights' data are not mutated: any code is a weight.
"""

import json
import math
import tempfile
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

import anyfp8
from tests.checkpoints import Snapshot
from tests.helpers import safetensors_bytes
from tests.hostile.samples import SAMPLES, X, assert_right, expected, split_file

JUNK = (
    *(None, True, False, 0, 1, -1, 2, 8, 16, 31, 33, 64, 2.5, -0.0, 1e308, 2**63, 2**70, float("inf"), float("nan")),
    *(
        "",
        "x",
        "a",
        "b",
        "head",
        "re:.*",
        "re:(",
        "float8_e5m2",
        "e5m2",
        "tensor",
        "channel",
        "static",
        "dynamic",
        "none",
    ),
    *([], {}, [1], [1, 1], [32, 16], [16, 32], [2, 2], [[]], {"a": 1}, {"": None}, ["a", "b"], [None], [-1, -1]),
)
WORDS = (
    "F64",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E4M3FNUZ",
    "F8_E8M0",
    "U8",
    "I8",
    "I64",
    "F4",
    "BOOL",
    "C64",
)
LEAVES = (
    "weight",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "input_scale",
    "bias",
    "k_scale",
    "weight_packed",
)

HEADERS = (
    "anyfp8 block",
    "ct",
    "ct mxfp4",
    "auto-round",
    "fp8",
    "modelopt nvfp4",
    "comfy nvfp4",
    "torchao mx",
    "quanto",
)
INDEXES = ("anyfp8", "ct nvfp4", "fp8 static", "quark", "inc", "bfl")
CONFIGS = [name for name in SAMPLES if SAMPLES[name]().configs or SAMPLES[name]().metadata]

bounded = hypothesis.settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
)


# --- mutations ---
def places(value):
    """(container, key) of everything inside a JSON value, containers before their contents."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


def mutate_json(draw, root):
    """Change one place of a JSON object, in place."""
    found = list(places(root))
    if not found:
        return
    container, key = draw.choice(found)
    value = container[key]
    what = draw.choice(("junk", "junk", "near", "delete", "rename", "swap", "wrap"))
    if what == "junk":
        container[key] = draw.choice(JUNK)
    elif what == "near" and isinstance(value, (int, float)):
        container[key] = value + draw.choice((-1, 1, 0.5, 16, 2**64))
    elif what == "near" and isinstance(value, str):
        container[key] = draw.choice((value.upper(), value[:-1], value + "x", value + "_", value.replace("a", "b")))
    elif what == "delete":
        del container[key]
    elif what == "rename" and isinstance(container, dict):
        container[draw.choice((f"{key}_", key[:-1], key.upper(), "x", "", key.replace("a", "b")))] = container.pop(key)
    elif what == "swap":
        other, at = draw.choice(found)
        if not isinstance(value, (dict, list)) and not isinstance(other[at], (dict, list)):
            container[key], other[at] = other[at], value
    else:
        container[key] = [value]


def mutate_text(draw, text):
    """Change a few bytes of it, or name one of its keys twice."""
    if draw.random() < 0.2 and (at := text.find(b":", draw.randrange(len(text)))) > 0:
        start = text.rfind(b'"', 0, text.rfind(b'"', 0, at))
        if start > 0:
            return text[:start] + text[start : at + 1] + b"1, " + text[start:]
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(len(text)) if text else 0
        new = bytes([draw.choice((0, 34, 44, 45, 48, 49, 57, 58, 91, 93, 123, 125, 128, 255, draw.randrange(256)))])
        what = draw.choice(("replace", "insert", "delete", "cut"))
        end = at if what == "insert" else len(text) if what == "cut" and draw.random() < 0.3 else at + 1
        text = text[:at] + (b"" if what in ("delete", "cut") else new) + text[end:]
    return text


def mutate_header(draw, path):
    header, data = split_file(path)
    names = [name for name in header if name != "__metadata__"]
    name, other = draw.choice(names), draw.choice(names)
    entry = header[name]
    what = draw.choice(
        ("dtype", "shape", "offsets", "swap", "rename", "fields", "json", "text", "length", "delete", "move")
    )
    length = None
    if what == "dtype":
        entry["dtype"] = draw.choice(WORDS)
        if draw.random() < 0.5:  # a shape that fits, so that it gets past the header's own check
            bits = {"F4": 4, "F64": 64, "I64": 64, "C64": 64, "F32": 32, "F16": 16, "BF16": 16}.get(entry["dtype"], 8)
            begin, end = entry["data_offsets"]
            entry["shape"] = [(end - begin) * 8 // bits]
    elif what == "shape":
        shape = list(entry["shape"])
        shapes = (shape[::-1], [*shape, 1], [1, *shape], [draw.choice((0, 1, -1, 2**40))], [], shape * 2)
        flat = [math.prod(shape)]
        entry["shape"] = draw.choice((*shapes, flat, [n for n in shape if n != 1], [1] * 70 + shape))
    elif what == "offsets":
        entry["data_offsets"][draw.randrange(2)] += draw.choice((-8, -1, 1, 8, -(2**40), 2**64))
    elif what == "swap":  # other bytes under the name
        header[name], header[other] = header[other], header[name]
    elif what == "move":  # other bytes, as the same dtype and shape
        entry["data_offsets"], header[other]["data_offsets"] = header[other]["data_offsets"], entry["data_offsets"]
    elif what == "rename":
        stem = name.rpartition(".")[0]
        header[draw.choice((f"{stem}.{draw.choice(LEAVES)}", name.upper(), f"model.{name}", other))] = header.pop(name)
    elif what == "fields":
        entry[draw.choice((*entry, "stride"))] = draw.choice(JUNK)
    elif what == "json":
        mutate_json(draw, header)
    elif what == "delete":
        del header[name]
    raw = json.dumps(header).encode()
    if what == "text":
        raw = mutate_text(draw, raw)
    elif what == "length":
        length = draw.choice((0, 1, len(raw) - 1, len(raw) + 1, len(raw) + 8, 2**31, 2**63, 2**64 - 1))
    path.write_bytes(safetensors_bytes(raw, data, length=length))


def mutate_index(draw, path):
    index = json.loads(path.read_text())
    table = index["weight_map"]
    name, other = draw.choice(list(table)), draw.choice(list(table))
    entries = (
        "../x.safetensors",
        "/etc/passwd",
        "",
        ".",
        "..",
        "x.safetensors",
        "./" + table[name],
        "config.json",
        None,
        1,
    )
    entries += (table[name] + "/", f"x/../{table[name]}", "\x00", "a\\b", "C:x", table[name].upper())
    what = draw.choice(("swap", "remove", "rename", "entry", "other", "all", "json", "text", "add"))
    if what == "swap":
        table[name], table[other] = table[other], table[name]
    elif what == "remove":
        del table[name]
    elif what == "rename":
        table[draw.choice((f"{name}_", f"model.{name}", name.upper(), other))] = table.pop(name)
    elif what == "entry":
        table[name] = draw.choice(entries)
    elif what == "other":
        table[name] = draw.choice(sorted(set(table.values())))
    elif what == "all":
        entry = draw.choice((*entries, *sorted(set(table.values()))))
        index["weight_map"] = dict.fromkeys(table, entry)
    elif what == "add":
        table[draw.choice(("x", "a.weight_scale_2", "head.input_scale", ""))] = draw.choice(
            (table[name], "x.safetensors")
        )
    elif what == "json":
        mutate_json(draw, index)
    text = json.dumps(index).encode()
    path.write_bytes(mutate_text(draw, text) if what == "text" else text)


def mutate_config(draw, folder, sample):
    """A change of a JSON file beside the weights, or of a JSON record in their header."""
    records = [key for key in sample.metadata or () if sample.metadata[key].startswith("{")]
    name = draw.choice([*sample.configs, *(["__metadata__"] if records else [])])
    if name == "__metadata__":
        header, data = split_file(folder / "model.safetensors")
        key = draw.choice(records)
        record = json.loads(header["__metadata__"][key])
        mutate_json(draw, record)
        text = json.dumps(record)
        if draw.random() < 0.2:
            text = mutate_text(draw, text.encode()).decode("latin-1")
        header["__metadata__"][key] = text
        (folder / "model.safetensors").write_bytes(safetensors_bytes(header, data))
        return
    config = json.loads((folder / name).read_text())
    for _ in range(draw.choice((1, 1, 2))):
        mutate_json(draw, config)
    text = json.dumps(config).encode()
    (folder / name).write_bytes(mutate_text(draw, text) if draw.random() < 0.2 else text)


# --- the check ---
SCHEMES = {}


def check(name, mutate, shards=1, same_scheme=True):
    """Write, mutate, load: refused with the model untouched, or right."""
    sample = SAMPLES[name]()
    sample.shards = shards
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        sample.write(folder)
        mutate(folder, sample)
        model = sample.model()
        before = Snapshot(model, X)
        try:
            model = anyfp8.load(model, folder, **sample.options)
        except anyfp8.AnyFP8Error:
            before.assert_unchanged()
            return False
        layers, plain = expected(folder, sample)
        assert_right(model, layers, plain)
        if same_scheme and not name.startswith("comfy"):
            assert {m: str(model.get_submodule(m).scheme) for m in layers} == schemes(name)
        return True


def schemes(name):
    """The schemes of the unspoiled sample."""
    if name not in SCHEMES:
        sample = SAMPLES[name]()
        with tempfile.TemporaryDirectory() as folder:
            model = anyfp8.load(sample.model(), sample.write(Path(folder)), **sample.options)
        SCHEMES[name] = {m: str(model.get_submodule(m).scheme) for m in sample.readings}
    return SCHEMES[name]


def fuzz(mutate, name, examples, must_load=True, **options):
    """Try many mutations; some must be refused, and (must_load) some must load, or the mutations would be pointless."""
    results = []

    @hypothesis.settings(bounded, max_examples=examples)
    @hypothesis.given(st.randoms(use_true_random=False))
    def run(draw):
        results.append(check(name, lambda folder, sample: mutate(draw, folder, sample), **options))

    run()
    assert not all(results)
    assert any(results) or not must_load


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name):
    fuzz(lambda draw, folder, sample: mutate_header(draw, folder / "model.safetensors"), name, 60)


@pytest.mark.parametrize("name", INDEXES)
def test_indexes(name):
    def mutate(draw, folder, sample):
        mutate_index(draw, folder / "model.safetensors.index.json")

    fuzz(mutate, name, 40, shards=2)


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name):
    # of quanto's map almost every word counts
    fuzz(mutate_config, name, 35, must_load=not name.startswith("quanto"), same_scheme=False)


@pytest.mark.parametrize("wrong", ["a weight", "a plain tensor", "an input scale"])
def test_the_check_sees_a_wrong_load(monkeypatch, wrong):
    """A loader that says nothing and is wrong must fail it, or the other tests prove nothing."""
    load = anyfp8.load

    def wrongly(*args, **options):
        model = load(*args, **options)
        if wrong == "a weight":
            model.b.weight_scale *= 2
        elif wrong == "an input scale":
            model.b.input_scale *= 2
        else:
            model.norm.bias.data[0] += 1
        return model

    monkeypatch.setattr(anyfp8, "load", wrongly)
    with pytest.raises(AssertionError, match=r"^(b|norm\.bias): another"):
        check("ct static", lambda folder, sample: None)


@pytest.mark.parametrize("error", [ValueError("boom"), OSError("boom")])
def test_the_check_sees_another_exception(monkeypatch, error):
    def fails(*args, **options):
        raise error

    monkeypatch.setattr(anyfp8, "load", fails)
    with pytest.raises(type(error), match="boom"):
        check("ct static", lambda folder, sample: None)


def test_the_check_sees_a_changed_model(monkeypatch):
    def fails(model, *args, **options):
        model.head.bias.data[0] += 1
        raise anyfp8.LoadError(())

    monkeypatch.setattr(anyfp8, "load", fails)
    with pytest.raises(AssertionError, match="other bytes"):
        check("ct static", lambda folder, sample: None)
