"""A folder of hostile headers: each is refused in words that name the file, and the tensor where one is at fault."""

import io
import json
import re
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from anyfp8.errors import CheckpointError
from anyfp8.header import DTYPES, FP8, MAX_HEADER, Entry, read_header
from tests.helpers import randn, safetensors_bytes

FILE = "model-00001.safetensors"


def read(raw):
    return read_header(io.BytesIO(raw), len(raw), FILE)


def entry(dtype="F32", shape=(1,), begin=0, end=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def refuse(raw, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read(raw)
    assert FILE in str(caught.value)
    assert len(str(caught.value)) < 2000, "a hostile file decides how long the message is"
    return str(caught.value)


# --- good files ---
def test_reads_what_safetensors_writes():
    tensors = {
        "w": randn(2, 3),
        "fp8": randn(5).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 4),
        "s": torch.ones(()),
    }
    raw = save(tensors, {"format": "pt", "note": "ü"})
    entries, metadata = read(raw)
    assert metadata == {"format": "pt", "note": "ü"}
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = entries[name]
        assert found.shape == tensor.shape
        assert DTYPES[found.dtype] == (tensor.dtype.itemsize * 8, tensor.dtype)
        assert raw[found.begin : found.end] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert {name for name, found in entries.items() if found.dtype in FP8} == {"fp8"}


def test_every_dtype_of_torch_that_safetensors_writes_is_known(tmp_path):
    for word, (bits, dtype) in DTYPES.items():
        if dtype is None:
            continue
        assert dtype.itemsize * 8 == bits
        save_file({"t": torch.zeros(3, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)}, tmp_path / word)
        raw = (tmp_path / word).read_bytes()
        assert read(raw)[0]["t"].dtype == word


def test_whitespace_after_the_header_is_part_of_it():
    raw = json.dumps({"a": entry()}).encode() + b"   "
    assert read(safetensors_bytes(raw, b"1234"))[0] == {"a": Entry("F32", (1,), 8 + len(raw), 12 + len(raw))}


def test_a_file_without_tensors():
    assert read(safetensors_bytes({})) == ({}, {})
    assert read(safetensors_bytes({"__metadata__": {"a": "b"}})) == ({}, {"a": "b"})
    assert read(safetensors_bytes({"__metadata__": None})) == ({}, {})


def test_order_in_the_header_need_not_be_order_in_the_file():
    entries, _ = read(safetensors_bytes({"b": entry(begin=4, end=8), "a": entry()}, b"1234abcd"))
    assert entries["b"].begin == entries["a"].end


def test_sub_byte_dtypes_round_up():
    entries, _ = read(safetensors_bytes({"a": entry("F4", [3], 0, 2), "b": entry("F6_E2M3", [4], 2, 5)}, b"12345"))
    assert [e.end - e.begin for e in entries.values()] == [2, 3]


@given(shape=st.lists(st.integers(0, 5), max_size=4), word=st.sampled_from(sorted(DTYPES)))
def test_any_shape_and_dtype(shape, word):
    bits = DTYPES[word][0]
    for n in shape:
        bits *= n
    size = -(-bits // 8)
    entries, _ = read(safetensors_bytes({"a": entry(word, shape, 0, size)}, bytes(size)))
    assert (entries["a"].shape, entries["a"].end - entries["a"].begin) == (tuple(shape), size)


# --- truncated and not safetensors at all ---
@pytest.mark.parametrize("raw", [b"", b"1234567", struct.pack("<Q", 5)[:7]])
def test_too_short(raw):
    refuse(raw, f"is truncated: {len(raw)} bytes, too short for a safetensors file")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, MAX_HEADER, MAX_HEADER + 1, 3])
def test_huge_header_length_allocates_nothing(length):
    raw = struct.pack("<Q", length) + b"{}"
    assert f"says its header has {length} bytes, but the file has 10" in refuse(raw, "not a safetensors file, or is tr")


def test_header_over_the_limit_is_refused_before_it_is_read():
    class Never(io.BytesIO):
        def read(self, count=-1):
            assert count == 8, "read more than the length"
            return super().read(count)

    with pytest.raises(CheckpointError, match=f"a header at most {MAX_HEADER}"):
        read_header(Never(struct.pack("<Q", MAX_HEADER + 1)), 2**40, FILE)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "header is not valid JSON"),
        (b"{", "header is not valid JSON"),
        (b'{"a": ', "header is not valid JSON"),
        (b"{} {}", "header is not valid JSON"),
        (b"\xff\xfe{}", "header is not valid JSON"),
        (b'{"\xff": 1}', "header is not valid JSON"),
        (b"[" * 200_000, "header is not valid JSON"),
        (b'{"a":' * 100_000, "header is not valid JSON"),
        (b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "header is not valid JSON|must have exactly"),
        (b'{"a": ' + b"9" * 5000 + b"}", "header is not valid JSON"),
        (b"[]", "header is not a JSON object"),
        (b'"model"', "header is not a JSON object"),
        (b"null", "header is not a JSON object"),
        (b"17", "header is not a JSON object"),
    ],
    ids=lambda v: v[:12].decode("latin-1") if isinstance(v, bytes) else "",
)
def test_not_a_json_object(raw, message):
    refuse(safetensors_bytes(raw), message)


def test_header_in_another_encoding():
    """The format is UTF-8; safetensors refuses this file, so its two readers must not see different tensors."""
    refuse(safetensors_bytes(json.dumps({"a": entry()}).encode("utf-16-le"), b"1234"), "header is not valid JSON")


def test_a_pickle_is_not_safetensors():
    stream = io.BytesIO()
    torch.save({"a": torch.ones(2)}, stream)
    refuse(stream.getvalue(), "not a safetensors file, or is truncated")


# --- names and metadata ---
def test_duplicate_tensor():
    one = json.dumps(entry())
    refuse(safetensors_bytes(f'{{"a": {one}, "b": {one}, "a": {one}}}'.encode(), b"1234"), "header names 'a' twice")


def test_duplicate_field_of_a_tensor():
    raw = b'{"a": {"dtype": "F32", "shape": [1], "shape": [2], "data_offsets": [0, 4]}}'
    refuse(safetensors_bytes(raw, b"1234"), "header names 'shape' twice")


def test_duplicate_metadata():
    raw = b'{"__metadata__": {}, "__metadata__": {"x": "y"}}'
    refuse(safetensors_bytes(raw), "header names '__metadata__' twice")


def test_a_duplicate_among_many_names_is_found_in_linear_time():
    # comparing each with each would end in the suite's time limit
    names = [f'"{i}":0' for i in range(60_000)] + ['"11999":0']
    refuse(safetensors_bytes(f"{{{','.join(names)}}}".encode()), "header names '11999' twice")


@pytest.mark.parametrize("metadata", [[], [1], "x", "", 0, 1, False, {"a": 1}, {"a": None}, {"a": {"b": "c"}}])
def test_bad_metadata(metadata):
    refuse(safetensors_bytes({"__metadata__": metadata}), "__metadata__ must map strings to strings")


# --- entries ---
@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "F32",
        [],
        {},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "data_offsets": [0, 4]},
        entry() | {"extra": 1},
        entry() | {"offset": 0},
    ],
)
def test_entry_without_exactly_its_fields(value):
    refuse(safetensors_bytes({"blocks.0.w": value}, b"1234"), "tensor 'blocks.0.w': must have exactly dtype, shape and")


@pytest.mark.parametrize("dtype", ["F33", "f32", "float32", "", "F8_E4M3FN", None, 32, ["F32"], {}])
def test_unknown_dtype(dtype):
    text = refuse(
        safetensors_bytes({"w": entry() | {"dtype": dtype}}, b"1234"), "tensor 'w': unknown dtype .*; known: F"
    )
    assert "F8_E4M3" in text


@pytest.mark.parametrize(
    "shape", [None, 4, "4", {}, [-1], [1.0], [True], ["1"], [None], [[1]], [2**63], [1e400], [-0.0], [1, -1, -1]]
)
def test_shape_is_a_list_of_sizes(shape):
    refuse(safetensors_bytes({"w": entry() | {"shape": shape}}, b"1234"), "tensor 'w': shape .* is not a list of sizes")


@pytest.mark.parametrize(
    "offsets",
    [
        None,
        4,
        "04",
        [],
        [0],
        [0, 4, 8],
        [-4, 0],
        [0, -4],
        [0.0, 4.0],
        [False, 4],
        ["0", "4"],
        [0, 2**63],
        [2**64, 2**65],
    ],
)
def test_offsets_are_two_sizes(offsets):
    refuse(
        safetensors_bytes({"w": entry() | {"data_offsets": offsets}}, b"1234"),
        "tensor 'w': data_offsets .* are not two sizes",
    )


@pytest.mark.parametrize(
    ("bad", "span", "needs"),
    [
        (entry("F32", [2], 0, 4), 4, 8),
        (entry("F32", [1], 0, 8), 8, 4),
        (entry("F32", [1], 4, 0), -4, 4),
        (entry("F32", [0], 0, 4), 4, 0),
        (entry("F32", [], 0, 8), 8, 4),
        (entry("F64", [1], 0, 4), 4, 8),
        (entry("F8_E4M3", [4, 2], 0, 4), 4, 8),
        (entry("F4", [9], 0, 4), 4, 5),
    ],
)
def test_shape_and_offsets_contradict_each_other(bad, span, needs):
    refuse(
        safetensors_bytes({"blocks.0.w": bad}, b"12345678"),
        rf"tensor 'blocks.0.w': its data_offsets span {span} bytes, but .* needs {needs}$",
    )


@pytest.mark.parametrize(
    ("shape", "end"),
    [
        ([2**62, 2**62], 4),  # in 64 bits this product is 0
        ([2**62, 4], 0),
        ([2**62] * 400, 4),  # this one has thousands of digits, which Python refuses to print
    ],
)
def test_huge_dimensions(shape, end):
    refuse(safetensors_bytes({"w": entry(shape=shape, end=end)}, b"1234"), "tensor 'w': .*shape")


def test_very_many_dimensions_take_no_time():
    """Their product has a million digits: forming it would end in the suite's time limit."""
    refuse(safetensors_bytes({"w": entry(shape=[2**62] * 20_000)}, b"1234"), "tensor 'w': .*shape")


def test_dimensions_that_torch_cannot_count():
    """No element, so the bytes agree; but torch can't make a tensor of this shape, and reading would fail later."""
    refuse(safetensors_bytes({"w": entry(shape=[0, 2**62, 2**62], end=0)}), "tensor 'w'.*shape")


# --- layout ---
def test_overlap():
    refuse(
        safetensors_bytes({"a": entry(shape=[2], end=8), "b": entry(begin=4, end=8)}, b"12345678"),
        "tensor 'b' overlaps the tensor before it",
    )


def test_the_same_bytes_twice():
    refuse(safetensors_bytes({"a": entry(), "b": entry()}, b"1234"), "tensor 'b' overlaps the tensor before it")


def test_hole_between_tensors():
    refuse(
        safetensors_bytes({"a": entry(), "b": entry(begin=8, end=12)}, b"123456789012"),
        "tensor 'b' leaves unused bytes before it",
    )


def test_hole_before_the_first_tensor():
    refuse(safetensors_bytes({"a": entry(begin=4, end=8)}, b"12345678"), "tensor 'a' leaves unused bytes before it")


def test_trailing_garbage():
    refuse(safetensors_bytes({"a": entry()}, b"1234extra"), "has 5 bytes of trailing garbage after the last tensor")
    refuse(safetensors_bytes({}, b"x"), "has 1 bytes of trailing garbage after the last tensor")


@pytest.mark.parametrize("missing", [1, 3, 4, 5, 8])
def test_truncated_data(missing):
    raw = safetensors_bytes({"a": entry(), "b": entry(begin=4, end=8)}, b"12345678")
    name = "b" if missing <= 4 else "a"
    refuse(
        raw[:-missing], f"is truncated: tensor '{name}' ends at byte {len(raw) - (0 if name == 'b' else 4)}, but the"
    )


def test_huge_offsets():
    raw = safetensors_bytes({"a": entry("U8", [2**62], 0, 2**62)}, b"1234")
    refuse(raw, f"is truncated: tensor 'a' ends at byte {2**62 + len(raw) - 4}, but the file has {len(raw)} bytes")


def test_empty_tensor_beyond_the_end():
    refuse(safetensors_bytes({"a": entry(), "b": entry(shape=[0], begin=9, end=9)}, b"1234"), "tensor 'b'")


def test_empty_tensors_between_others():
    header = {"a": entry(), "z": entry(shape=[0], begin=4, end=4), "b": entry(begin=4, end=8)}
    assert len(read(safetensors_bytes(header, b"12345678"))[0]) == 3


# --- everything at once ---
@given(data=st.data())
def test_any_damage_is_refused_or_harmless(data):
    """Flip, cut or insert bytes: either a CheckpointError, or entries that lie inside the file and fill it."""
    raw = bytearray(save({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.uint8)}, {"k": "v"}))
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if kind == "flip":
            raw[where] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del raw[where : where + data.draw(st.integers(1, 3))]
        else:
            raw[where:where] = data.draw(st.binary(min_size=1, max_size=3))
    try:
        entries, metadata = read(bytes(raw))
    except CheckpointError:
        return
    (length,) = struct.unpack("<Q", raw[:8])
    covered = sorted((e.begin, e.end) for e in entries.values())
    assert [begin for begin, _ in covered] == [8 + length, *[end for _, end in covered]][: len(covered)]
    assert all(isinstance(v, str) for v in metadata.values())


def test_names_may_hold_anything_printable_or_not():
    for name in ["a\nb", "\x00", "🦊", "../../etc", "", "a" * 300, "\ud800"]:
        raw = json.dumps({name: entry("F33")}).encode()
        refuse(safetensors_bytes(raw, b"1234"), re.escape(repr(name)[:100]))
