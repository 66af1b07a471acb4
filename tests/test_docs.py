"""The examples in docstrings and in the README run as they stand."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import anyfp8

ROOT = Path(__file__).parent.parent
MODULES = [m.name for m in pkgutil.walk_packages(anyfp8.__path__, "anyfp8.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name, tmp_path):
    failed, _ = doctest.testmod(importlib.import_module(name), extraglobs={"folder": tmp_path})
    assert failed == 0


def test_docstrings_have_examples_at_all():
    finder = doctest.DocTestFinder()
    found = sum(len(t.examples) for name in MODULES for t in finder.find(importlib.import_module(name)))
    assert found >= 8


def test_the_readme_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(code.strip().splitlines()) <= 25
    exec(compile(code, "README.md", "exec"), {})
    assert "FP8 layers" in capsys.readouterr().out


def test_the_readme_names_its_two_commands():
    text = (ROOT / "README.md").read_text()
    for command in ("scripts/evaluate", "scripts/test"):
        assert command in text
        assert (ROOT / command).stat().st_mode & 0o111
