import json
import os
import pickle
import re
import shutil
import struct
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from anyfp8.checkpoint import PICKLES, Checkpoint, TensorRef
from anyfp8.errors import CheckpointError
from tests.helpers import assert_same_bytes, bytes_of, randn, safetensors_bytes, write_tensors

A, B, C = randn(2, 3, seed=1), randn(4, seed=2), randn(3, 2, seed=3)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Explodes:
    """Unpickling it proves that a pickle was opened."""

    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was opened')",)


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def write_pickle(path):
    path.write_bytes(pickle.dumps(Explodes()))
    return path


def write_json(path, value):
    path.write_text(json.dumps(value))
    return path


def write_index(folder, weight_map, name="model.safetensors.index.json"):
    return write_json(folder / name, {"metadata": {"total_size": 1}, "weight_map": weight_map})


def write_shards(folder, index=True):
    folder.mkdir(exist_ok=True)
    write_tensors(folder / SHARDS[0], {"a": A, "b": B})
    write_tensors(folder / SHARDS[1], {"c": C})
    if index:
        write_index(folder, {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]})
    return folder


def assert_reads(checkpoint, **want):
    assert checkpoint.tensors.keys() == want.keys()
    for name, tensor in want.items():
        ref = checkpoint.tensors[name]
        assert (ref.name, ref.shape, ref.nbytes) == (name, tuple(tensor.shape), tensor.nbytes)
        assert_same_bytes(ref.read(), tensor)


def refuse(source, message, **options):
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(source, **options)
    return str(caught.value)


# --- where tensors come from ---
@pytest.mark.parametrize("kind", [str, Path])
def test_one_file(tmp_path, kind):
    file = write_tensors(tmp_path / "some.safetensors", {"a": A, "b": B}, {"k": "v"})
    found = Checkpoint.open(kind(file))
    assert_reads(found, a=A, b=B)
    assert found.name == str(file)
    assert found.metadata == {"k": "v"}
    assert found.tensors["a"].file == "some.safetensors"
    assert str(found.tensors["a"]) == "a in some.safetensors"
    assert found.ignored == {}


def test_folder_with_one_file_of_any_name(tmp_path):
    write_tensors(tmp_path / "whatever.safetensors", {"a": A})
    found = Checkpoint.open(tmp_path)
    assert_reads(found, a=A)
    assert found.name == str(tmp_path)


def test_folder_with_index(tmp_path):
    found = Checkpoint.open(write_shards(tmp_path))
    assert_reads(found, a=A, b=B, c=C)
    assert found.tensors["c"].file == SHARDS[1]
    assert found.ignored == {}


def test_index_file(tmp_path):
    write_shards(tmp_path)
    assert_reads(Checkpoint.open(tmp_path / "model.safetensors.index.json"), a=A, b=B, c=C)


def test_index_file_of_any_name(tmp_path):
    write_shards(tmp_path, index=False)
    assert_reads(Checkpoint.open(write_index(tmp_path, {"c": SHARDS[1]}, "mine.json")), c=C)


def test_mapping():
    weight = torch.nn.Parameter(A.clone())
    found = Checkpoint.open({"w": weight, "fp8": B.to(torch.float8_e4m3fn), "n": torch.tensor(3)})
    assert_reads(found, w=A, fp8=B.to(torch.float8_e4m3fn), n=torch.tensor(3))
    assert found.name == "the mapping of tensors"
    assert str(found.tensors["w"]) == "w in the mapping"
    assert [ref.is_fp8 for ref in found.tensors.values()] == [False, True, False]
    read = found.tensors["w"].read()
    assert read.data_ptr() == weight.data_ptr()
    assert not read.requires_grad


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], "'w' in the mapping is not a tensor of a dtype that safetensors can hold"),
        (torch.zeros(2, dtype=torch.complex128), "'w' in the mapping is not a tensor of a dtype that safetensors"),
        (torch.zeros(2, device="meta"), "'w' in the mapping is a meta or sparse tensor"),
        (torch.eye(2).to_sparse(), "'w' in the mapping is a meta or sparse tensor"),
    ],
)
def test_mapping_of_other_things(value, message):
    refuse({"a": A, "w": value}, message)


def test_mapping_with_names_that_are_no_text():
    refuse({0: A}, "0")


def test_empty_mapping():
    assert Checkpoint.open({}).tensors == {}


def test_subfolder(tmp_path):
    write_shards(tmp_path / "transformer")
    assert_reads(Checkpoint.open(tmp_path, subfolder="transformer"), a=A, b=B, c=C)
    refuse(tmp_path, "transformers does not exist", subfolder="transformers")


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_tensors(tmp_path / "x.safetensors", {"a": A})
    assert_reads(Checkpoint.open("~/x.safetensors"), a=A)


def test_headers_only(tmp_path):
    """A sparse file of a terabyte: opening it must neither read nor map it."""
    file = tmp_path / "x.safetensors"
    size = 2**40
    raw = safetensors_bytes({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    file.write_bytes(raw)
    try:
        os.truncate(file, len(raw) + size)
    except OSError:
        pytest.skip("no sparse files here")
    assert Checkpoint.open(file).tensors["w"].nbytes == size


# --- what can't be a source ---
def test_source_that_does_not_exist(tmp_path):
    refuse(tmp_path / "nope", r"nope does not exist \(and is not a hub id of the form owner/name\)")
    refuse(str(tmp_path / "nope.safetensors"), "nope.safetensors does not exist")
    refuse("", "holds|does not exist")


def test_other_files(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    refuse(tmp_path / "x.gguf", r"x.gguf is neither a .safetensors file nor a .safetensors.index.json")


@pytest.mark.parametrize("suffix", PICKLES)
def test_pickle_file_is_refused_unopened(tmp_path, suffix):
    file = write_pickle(tmp_path / f"pytorch_model{suffix}")
    text = refuse(file, f"pytorch_model{suffix} is a pickle, which anyfp8 never opens")
    assert "safetensors" in text


@pytest.mark.parametrize("suffix", PICKLES)
def test_folder_of_pickles(tmp_path, suffix):
    write_pickle(tmp_path / f"pytorch_model{suffix}")
    refuse(tmp_path, rf"holds only pickle files \(pytorch_model{suffix}\), which anyfp8 never opens")


def test_pickles_beside_safetensors_are_ignored_and_listed(tmp_path):
    write_pickle(tmp_path / "pytorch_model.bin")
    write_pickle(tmp_path / "optimizer.pt")
    file = write_tensors(tmp_path / "model.safetensors", {"a": A})
    for source in (tmp_path, file):
        found = Checkpoint.open(source)
        assert_reads(found, a=A)
        assert found.ignored == {
            "optimizer.pt": "a pickle, never opened",
            "pytorch_model.bin": "a pickle, never opened",
        }


def test_index_of_pickles(tmp_path):
    write_pickle(tmp_path / "pytorch_model.bin")
    index = write_index(tmp_path, {"a": "pytorch_model.bin"}, "pytorch_model.bin.index.json")
    refuse(index, r"pytorch_model\.bin")


def test_empty_folder(tmp_path):
    text = refuse(tmp_path, "holds no .safetensors file")
    assert "subfolder" not in text


def test_pipeline_folder_names_the_way_out(tmp_path):
    write_json(tmp_path / "model_index.json", {"_class_name": "FluxPipeline"})
    write_shards(tmp_path / "transformer")
    refuse(tmp_path, 'is a diffusers pipeline: pass a component, e.g. subfolder="transformer"')


def test_folder_named_like_a_file(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    refuse(tmp_path, "safetensors")


def test_dangling_symlink(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    refuse(tmp_path, "model.safetensors")


# --- which file is meant ---
@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model", "pytorch_model"])
def test_well_known_names_are_preferred(tmp_path, stem):
    write_tensors(tmp_path / f"{stem}.safetensors", {"a": A})
    write_tensors(tmp_path / "consolidated.safetensors", {"a": B})
    found = Checkpoint.open(tmp_path)
    assert_reads(found, a=A)
    assert found.ignored == {"consolidated.safetensors": f"{stem}.safetensors was chosen"}


def test_ambiguous_folder(tmp_path):
    write_tensors(tmp_path / "one.safetensors", {"a": A})
    write_tensors(tmp_path / "two.safetensors", {"a": B})
    refuse(tmp_path, r"holds several files: one.safetensors, two.safetensors. Pass the one that is meant")


def test_ambiguous_indexes(tmp_path):
    write_shards(tmp_path, index=False)
    for name in ("one", "two"):
        write_index(tmp_path, {"a": SHARDS[0]}, f"{name}.safetensors.index.json")
    refuse(tmp_path, r"holds several files: one.safetensors.index.json, two.safetensors.index.json")
    write_index(tmp_path, {"c": SHARDS[1]})
    assert_reads(Checkpoint.open(tmp_path), c=C)


def test_index_wins_over_a_single_file(tmp_path):
    write_shards(tmp_path)
    write_tensors(tmp_path / "model.safetensors", {"a": A * 0, "b": B * 0, "c": C * 0})
    write_tensors(tmp_path / "consolidated.safetensors", {"a": A * 0})
    found = Checkpoint.open(tmp_path)
    assert_reads(found, a=A, b=B, c=C)
    assert found.ignored == {
        "consolidated.safetensors": "the index does not name it",
        "model.safetensors": "the index does not name it",
    }


def test_index_decides_per_tensor(tmp_path):
    """Stale copies in other shards are not taken, whatever the order of the files."""
    write_tensors(tmp_path / "one.safetensors", {"a": A, "b": B * 0, "old": A})
    write_tensors(tmp_path / "two.safetensors", {"a": A * 0, "b": B})
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    found = Checkpoint.open(tmp_path)
    assert_reads(found, a=A, b=B)
    assert found.ignored == {
        "b in one.safetensors": "a stale copy: model.safetensors.index.json points to two.safetensors",
        "old in one.safetensors": "model.safetensors.index.json does not name it",
        "a in two.safetensors": "a stale copy: model.safetensors.index.json points to one.safetensors",
    }


def test_shards_without_index(tmp_path):
    write_pickle(tmp_path / "pytorch_model-00001-of-00002.bin")
    found = Checkpoint.open(write_shards(tmp_path, index=False))
    assert_reads(found, a=A, b=B, c=C)
    assert found.ignored == {"pytorch_model-00001-of-00002.bin": "a pickle, never opened"}


@pytest.mark.parametrize(
    "names",
    [
        ["model-00001-of-00002"],
        ["model-00002-of-00002"],
        ["model-00001-of-00003", "model-00003-of-00003"],
        ["model-00000-of-00002", "model-00001-of-00002"],
        ["model-00001-of-00002", "other-00002-of-00002"],
        ["model-00001-of-00002", "model-00002-of-00003"],
        ["model-00001-of-00001", "model-00001-of-00002", "model-00002-of-00002"],
    ],
)
def test_incomplete_shards_without_index(tmp_path, names):
    for i, name in enumerate(names):
        write_tensors(tmp_path / f"{name}.safetensors", {f"t{i}": A})
    text = refuse(tmp_path, "that are not one complete set, and no index")
    assert all(name in text for name in names)


def test_a_tensor_in_two_shards_without_index(tmp_path):
    write_shards(tmp_path, index=False)
    write_tensors(tmp_path / SHARDS[1], {"c": C, "a": A * 0})
    refuse(tmp_path, f"tensor 'a' is in {SHARDS[0]} and in {SHARDS[1]}, and no index decides")


def test_shards_beside_a_single_file(tmp_path):
    write_shards(tmp_path, index=False)
    write_tensors(tmp_path / "model.safetensors", {"a": B})
    found = Checkpoint.open(tmp_path)
    assert_reads(found, a=B)
    assert found.ignored == dict.fromkeys(SHARDS, "model.safetensors was chosen")


# --- a bad index ---
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not readable JSON"),
        ("{", "is not readable JSON"),
        ("\xff", "is not readable JSON"),
        ("[" * 100_000, "is not readable JSON"),
        ("[]", "is not a JSON object"),
        ("null", "is not a JSON object"),
        ("{}", "has no weight_map from tensor names to file names"),
        ('{"weight_map": []}', "has no weight_map from tensor names to file names"),
        ('{"weight_map": {"a": 1}}', "has no weight_map from tensor names to file names"),
        ('{"weight_map": {"a": ["x"]}}', "has no weight_map from tensor names to file names"),
        ('{"weight_map": {"a": null}}', "has no weight_map from tensor names to file names"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "names 'a' twice"),
    ],
    ids=range(12),
)
def test_bad_index(tmp_path, content, message):
    (tmp_path / "model.safetensors.index.json").write_bytes(content.encode("latin-1"))
    refuse(tmp_path, f"model.safetensors.index.json {message}")


def test_missing_shard(tmp_path):
    write_shards(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    refuse(tmp_path, f"model.safetensors.index.json: tensor 'c' is said to be in '{SHARDS[1]}', which does not exist")


def test_shard_that_is_a_folder(tmp_path):
    write_shards(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    (tmp_path / SHARDS[1]).mkdir()
    refuse(tmp_path, f"tensor 'c' is said to be in '{SHARDS[1]}', which does not exist")


def test_tensor_absent_from_its_shard(tmp_path):
    write_shards(tmp_path)
    write_index(tmp_path, {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]})
    refuse(tmp_path, f"index.json says that tensor 'b' is in '{SHARDS[1]}', but it is not there")


@pytest.mark.parametrize("damage", ["cut", "garbage", "header"])
def test_damaged_shard_is_named(tmp_path, damage):
    write_shards(tmp_path)
    raw = (tmp_path / SHARDS[1]).read_bytes()
    raw = {"cut": raw[:-3], "garbage": raw + b"x", "header": struct.pack("<Q", 2**60) + raw[8:]}[damage]
    (tmp_path / SHARDS[1]).write_bytes(raw)
    refuse(tmp_path, SHARDS[1])


# --- staying inside the folder ---
OUTSIDE = [
    "../secret.safetensors",
    "sub/../../secret.safetensors",
    "sub/..",
    "..",
    "",
    "/",
    "//x",
    "a//b",
    "..\\secret.safetensors",
    "sub\\..\\..\\secret.safetensors",
    "C:\\secret.safetensors",
    "C:secret.safetensors",
    "\\\\server\\share\\x.safetensors",
    "x\x00.safetensors",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_traversal(tmp_path, name):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    write_tensors(tmp_path / "secret.safetensors", {"a": A})
    write_index(folder, {"a": name})
    refuse(folder, f"tensor 'a' is said to be in {re.escape(repr(name))}, which is outside the checkpoint's folder")


def test_absolute_path(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    secret = write_tensors(tmp_path / "secret.safetensors", {"a": A})
    write_index(folder, {"a": str(secret)})
    refuse(folder, "which is outside the checkpoint's folder")
    write_tensors(folder / "x.safetensors", {"a": A})
    write_index(folder, {"a": str(folder / "x.safetensors")})  # absolute is refused even where it leads inside
    refuse(folder, "which is outside the checkpoint's folder")


def test_symlinked_subfolder_that_leaves(tmp_path):
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    write_tensors(elsewhere / "x.safetensors", {"a": A})
    (folder / "sub").symlink_to(elsewhere)
    write_index(folder, {"a": "sub/x.safetensors"})
    refuse(folder, "tensor 'a' is said to be in 'sub/x.safetensors', which leads outside the checkpoint's folder")


def test_symlink_in_a_subfolder_that_leaves(tmp_path):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    secret = write_tensors(tmp_path / "secret.safetensors", {"a": A})
    (folder / "sub" / "x.safetensors").symlink_to(secret)
    write_index(folder, {"a": "sub/x.safetensors"})
    refuse(folder, "which leads outside the checkpoint's folder")


def test_real_subfolder_is_fine(tmp_path):
    (tmp_path / "sub").mkdir()
    write_tensors(tmp_path / "sub" / "x.safetensors", {"a": A})
    write_index(tmp_path, {"a": "sub/x.safetensors"})
    assert_reads(Checkpoint.open(tmp_path), a=A)


def test_plain_symlinks_are_followed(tmp_path):
    """The hub's cache: snapshots/<commit>/<name> are links to ../../blobs/<hash>."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write_shards(tmp_path / "plain")
    write_json(tmp_path / "plain" / "config.json", {"x": 1})
    blobs.mkdir()
    for i, file in enumerate(sorted((tmp_path / "plain").iterdir())):
        shutil.move(file, blobs / f"{i:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i:064x}")
    found = Checkpoint.open(snapshot)
    assert_reads(found, a=A, b=B, c=C)
    assert found.configs == {"config.json": {"x": 1}}
    assert_reads(Checkpoint.open(snapshot / "model.safetensors.index.json"), a=A, b=B, c=C)
    assert_reads(Checkpoint.open(snapshot / SHARDS[1]), c=C)


# --- JSON beside the weights ---
def test_configs_are_read_and_others_are_not(tmp_path):
    write_tensors(tmp_path / "model.safetensors", {"a": A})
    known = ["anyfp8.json", "config.json", "quantization_config.json", "hf_quant_config.json", "quanto_qmap.json"]
    for name in known:
        write_json(tmp_path / name, {"from": name})
    (tmp_path / "tokenizer.json").write_text("not JSON")
    for source in (tmp_path, tmp_path / "model.safetensors"):
        assert Checkpoint.open(source).configs == {name: {"from": name} for name in known}


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not readable JSON"), ("[1]", "is not a JSON object"), ("[" * 10**5, "JSON")]
)
def test_broken_config(tmp_path, content, message):
    write_tensors(tmp_path / "model.safetensors", {"a": A})
    (tmp_path / "config.json").write_text(content)
    refuse(tmp_path, f"config.json .*{message}|config.json {message}")


def test_metadata_of_all_files_is_merged(tmp_path):
    write_shards(tmp_path)
    write_tensors(tmp_path / SHARDS[0], {"a": A, "b": B}, {"format": "pt", "one": "1"})
    write_tensors(tmp_path / SHARDS[1], {"c": C}, {"format": "pt", "two": "2"})
    assert Checkpoint.open(tmp_path).metadata == {"format": "pt", "one": "1", "two": "2"}


# --- the hub ---
def test_hub_id(tmp_path, monkeypatch):
    calls = []

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options))
        return str(write_shards(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert_reads(Checkpoint.open("owner/some-model.v1", revision="abc", token="secret"), a=A, b=B, c=C)
    ((repo_id, options),) = calls
    assert repo_id == "owner/some-model.v1"
    assert (options["revision"], options["token"]) == ("abc", "secret")
    assert options["allow_patterns"] == ["*.safetensors", "*.json"]


def test_hub_id_with_subfolder(tmp_path, monkeypatch):
    patterns = []

    def snapshot_download(repo_id, **options):
        patterns.extend(options["allow_patterns"])
        write_shards(tmp_path / "transformer")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert_reads(Checkpoint.open("owner/pipeline", subfolder="transformer"), a=A, b=B, c=C)
    assert patterns == ["transformer/*.safetensors", "transformer/*.json"]


def test_local_folder_wins_over_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("owner").mkdir()
    write_shards(tmp_path / "owner" / "name")
    assert_reads(Checkpoint.open("owner/name"), a=A, b=B, c=C)


def http_error():
    class Response:
        headers: dict = {}  # noqa: RUF012
        status_code = 404
        request = None

    return huggingface_hub.errors.RepositoryNotFoundError("404 Client Error", response=Response())


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("no connection, and not in the cache"),
        HFValidationError("bad name"),
        http_error(),
        OSError("disk full"),
        ConnectionError("offline"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_hub_errors_are_explained(monkeypatch, error):
    def snapshot_download(*args, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    text = refuse("owner/name", "'owner/name' is no file or folder here, and the hub could not provide it: ")
    assert str(error) in text


@pytest.mark.parametrize("source", ["name", "a/b/c", "owner/na me", "./owner/name", "owner/", Path("owner/name")])
def test_what_is_no_hub_id_is_not_asked_for(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refuse(source, "does not exist")


# --- reading ---
def test_reading_codes_copies_nothing(tmp_path):
    codes = {"a": A.to(torch.float8_e4m3fn), "b": B.to(torch.float8_e4m3fn)}
    found = Checkpoint.open(write_tensors(tmp_path / "x.safetensors", codes))
    first, again = found.tensors["a"].read(), found.tensors["a"].read()
    assert first.data_ptr() == again.data_ptr() != 0
    other = found.tensors["b"].read()
    assert other.data_ptr() == first.data_ptr() + first.nbytes  # as they lie in the file


def test_floats_are_aligned_as_torch_aligns_them_and_copied_only_for_that(tmp_path):
    tensors = {f"t{i}": randn(3000 + i) for i in range(4)}  # larger than a page, whose memory is given back
    file = write_tensors(tmp_path / "x.safetensors", tensors)
    refs = Checkpoint.open(file).tensors
    begins = {name: ref._source[1] for name, ref in refs.items()}
    assert any(begin % 64 for begin in begins.values())
    for name, ref in refs.items():
        read, again = ref.read(), ref.read()
        assert read.data_ptr() % 64 == 0
        assert (read.data_ptr() == again.data_ptr()) == (begins[name] % 64 == 0)
        assert_same_bytes(read, tensors[name])
        read.add_(1)
        assert_same_bytes(ref.read(), read if begins[name] % 64 == 0 else tensors[name])


def test_each_tensor_has_a_storage_of_its_own(tmp_path):
    tensors = {"a": A, "fp8": B.to(torch.float8_e4m3fn), "h": C.to(torch.bfloat16), "n": torch.tensor([1, 2])}
    found = Checkpoint.open(write_tensors(tmp_path / "x.safetensors", tensors))
    read = {name: ref.read() for name, ref in found.tensors.items()}
    for name, tensor in read.items():
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{name} drags the rest of the file along"
    torch.save(read, tmp_path / "saved.pt")
    assert (tmp_path / "saved.pt").stat().st_size < 8000
    back = torch.load(tmp_path / "saved.pt", weights_only=True)
    for name, tensor in tensors.items():
        assert_same_bytes(back[name], tensor)


def test_writing_does_not_change_the_file(tmp_path):
    file = write_tensors(tmp_path / "x.safetensors", {"a": A, "b": B})
    before = file.read_bytes()
    read = Checkpoint.open(file).tensors["a"].read()
    read.mul_(0).add_(7)
    assert read.tolist() == torch.full_like(A, 7).tolist()
    del read
    assert file.read_bytes() == before
    assert_reads(Checkpoint.open(file), a=A, b=B)


def test_tensors_outlive_the_file(tmp_path):
    file = write_tensors(tmp_path / "x.safetensors", {"a": A})
    found = Checkpoint.open(file)
    read = found.tensors["a"].read()
    file.unlink()
    del found
    assert_same_bytes(read, A)


@pytest.mark.parametrize("spaces", range(8))
def test_misaligned_tensors(tmp_path, spaces):
    """Nothing in the format promises alignment: a header of any length, and a tensor of 3 bytes before the others."""
    odd = torch.tensor([1, 2, 3], dtype=torch.uint8)
    data = bytes_of(odd) + bytes_of(A) + bytes_of(B.bfloat16())
    header = {"o": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
    header["a"] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [3, 27]}
    header["b"] = {"dtype": "BF16", "shape": [4], "data_offsets": [27, 35]}
    raw = json.dumps(header).encode() + b" " * spaces
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(raw, data))
    found = Checkpoint.open(tmp_path)
    assert_reads(found, o=odd, a=A, b=B.bfloat16())
    assert found.tensors["a"].read().data_ptr() % 4 == 0
    found.tensors["a"].read().zero_()


def test_empty_tensors(tmp_path):
    empty = {"e": torch.zeros(0, 3), "f": torch.zeros(2, 0, 5, dtype=torch.bfloat16)}
    assert_reads(Checkpoint.open(write_tensors(tmp_path / "x.safetensors", {"a": A, **empty})), a=A, **empty)
    assert_reads(Checkpoint.open(write_tensors(tmp_path / "y.safetensors", empty)), **empty)


def test_scalars(tmp_path):
    one = torch.tensor(2.5)
    assert_reads(Checkpoint.open(write_tensors(tmp_path / "x.safetensors", {"s": one})), s=one)


def test_dtypes_that_torch_lacks(tmp_path):
    header = {"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(header, b"123"))
    ref = Checkpoint.open(tmp_path).tensors["w"]
    assert ref.nbytes == 3
    assert not ref.is_fp8
    for reading in (ref.read, lambda: ref.torch_dtype):
        with pytest.raises(CheckpointError, match=r"w in x\.safetensors has dtype F4, which torch can't hold"):
            reading()


def test_refs_compare_by_what_the_header_says(tmp_path):
    file = write_tensors(tmp_path / "x.safetensors", {"a": A})
    first, second = (Checkpoint.open(file).tensors["a"] for _ in range(2))
    assert first == second
    assert first != TensorRef("a", "x.safetensors", "F32", (3, 2), A)
    assert "mmap" not in repr(first)
