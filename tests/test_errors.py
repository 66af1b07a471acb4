import ast
import inspect
import pickle
from pathlib import Path

import pytest

import anyfp8
from anyfp8 import errors
from anyfp8.errors import HEADINGS, AnyFP8Error, BackendError, LoadError, Problem, describe

CLASSES = {
    name: item for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, AnyFP8Error)
}


# --- the tree ---
def test_the_docstring_draws_every_class_and_no_other():
    drawn = [line.split("── ")[1].split("(")[0].split()[0] for line in errors.__doc__.splitlines() if "── " in line]
    assert sorted(drawn) == sorted(set(CLASSES) - {"AnyFP8Error"})
    assert "AnyFP8Error(RuntimeError)" in errors.__doc__


def test_every_error_is_one_of_ours():
    assert issubclass(AnyFP8Error, RuntimeError)
    assert len(CLASSES) >= 8
    for name, item in CLASSES.items():
        assert item.__doc__, name
        assert getattr(anyfp8, name) is item, f"{name} is not public"


def test_every_bases_drawn_are_the_real_ones():
    for line in errors.__doc__.splitlines():
        if "── " in line and "(" in line.split("── ")[1].split()[0]:
            name, base = line.split("── ")[1].split()[0].removesuffix(")").split("(")
            assert base in [b.__name__ for b in CLASSES[name].__mro__]


def test_every_kind_of_problem_has_a_heading():
    """`describe` prints by heading: a kind without one would be counted, but never shown."""
    kinds = set()
    for file in Path(inspect.getfile(anyfp8)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            position = {"Problem": 0, "problem_of": 0, "problem": 0, "refuse": 1}.get(called)
            if position is not None and len(node.args) > position:
                kinds |= {
                    c.value
                    for c in ast.walk(node.args[position])
                    if isinstance(c, ast.Constant) and isinstance(c.value, str) and c.value
                }
    assert {"missing", "unexpected", "invalid", "contradiction"} <= kinds
    assert kinds <= set(HEADINGS)


# --- describe ---
def test_describe_groups_by_kind_and_folds_names():
    problems = [
        Problem("unexpected", "extra.weight", file="b.safetensors"),
        Problem("missing", "blocks.0.fc.weight_scale", "no scale", "a.safetensors"),
        Problem("missing", "blocks.1.fc.weight_scale", "no scale", "a.safetensors"),
        Problem("missing", "blocks.2.fc.weight_scale", "no scale", "a.safetensors"),
        Problem("missing", "head.bias"),
        Problem("missing", "blocks.3.fc.weight_scale", "no scale", "c.safetensors"),
        Problem("invalid", "blocks.0.fc.weight", "2 of its codes are NaN", "a.safetensors"),
    ]
    assert describe(problems, "the/folder", "Try again.").splitlines() == [
        "the/folder can't be loaded (7 problems):",
        "  missing from the checkpoint:",
        "    blocks.{0…2}.fc.weight_scale in a.safetensors: no scale",
        "    head.bias",
        "    blocks.3.fc.weight_scale in c.safetensors: no scale",
        "  in the checkpoint, but not in the model:",
        "    extra.weight in b.safetensors",
        "  unusable values:",
        "    blocks.0.fc.weight in a.safetensors: 2 of its codes are NaN",
        "  Try again.",
    ]


def test_describe_of_one_problem():
    assert describe([Problem("missing", "a")]) == (
        "the checkpoint can't be loaded (1 problem):\n  missing from the checkpoint:\n    a"
    )


@pytest.mark.parametrize("kind", HEADINGS)
def test_describe_prints_every_kind(kind):
    assert describe([Problem(kind, "the.name", "the detail", "the-file")]).splitlines()[1:] == [
        f"  {HEADINGS[kind]}:",
        "    the.name in the-file: the detail",
    ]


def test_describe_loses_no_problem():
    """Different details of one name, and one name in two files, all appear."""
    problems = [Problem("invalid", "a", f"detail {i}", f"file{j}") for i in range(2) for j in range(2)]
    text = describe(problems)
    assert all(f"a in file{j}: detail {i}" in text for i in range(2) for j in range(2))


# --- LoadError ---
def test_load_error_keeps_every_problem():
    problems = [Problem("missing", "a"), Problem("invalid", "b", "bad", "f")]
    error = LoadError(problems, "here")
    assert error.problems == tuple(problems)
    assert str(error) == describe(problems, "here")
    with pytest.raises(AnyFP8Error, match="here can't be loaded"):
        raise error


@pytest.mark.parametrize(("source", "hint"), [("", ""), ("the/folder", ""), ("the/folder", "Closest name: b")])
def test_load_error_pickles(source, hint):
    error = LoadError([Problem("missing", "a", "d", "f")], source, hint)
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is LoadError
    assert twin.problems == error.problems
    assert str(twin) == str(error)


# --- BackendError ---
def test_backend_error_groups_layers_by_reason():
    error = BackendError("can't:", {"a.0": "too old", "a.1": "too old", "c": "a convolution"})
    assert str(error).splitlines() == ["can't:", "    a.{0,1}: too old", "    c: a convolution"]
    assert error.refusals == {"a.0": "too old", "a.1": "too old", "c": "a convolution"}
    assert BackendError("alone").refusals == {}


def test_backend_error_pickles():
    error = BackendError("can't:", {"a.0": "too old"})
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.refusals) == (str(error), error.refusals)


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"LoadError", "BackendError"}))
def test_plain_errors_pickle(name):
    twin = pickle.loads(pickle.dumps(CLASSES[name]("what, where")))
    assert type(twin) is CLASSES[name]
    assert str(twin) == "what, where"
