import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfp8.folding import fold


@pytest.mark.parametrize(
    ("names", "want"),
    [
        ([], []),
        (["a"], ["a"]),
        ([""], [""]),
        (["a.0.b", "a.1.b"], ["a.{0,1}.b"]),
        (["a.0.b", "a.1.b", "a.2.b"], ["a.{0…2}.b"]),
        (["a.0", "a.1", "a.2", "a.5", "a.7", "a.8"], ["a.{0…2,5,7,8}"]),
        (["a.3.b"], ["a.3.b"]),
        (["a.0.b", "head", "a.1.b"], ["a.{0,1}.b", "head"]),
        (["a.0.q", "a.0.k", "a.1.q", "a.1.k"], ["a.{0,1}.q", "a.{0,1}.k"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], ["a.{0,1}.b.{0,1}"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], ["a.0.b.{0,1}", "a.1.b.0"]),
        (["a.1", "a.01", "a.1a"], ["a.1", "a.01", "a.1a"]),  # only canonical numbers fold
        (["a.2", "a.10", "a.1"], ["a.{1,2,10}"]),
        (["0", "1", "2"], ["{0…2}"]),
        (["a.0", "a.0", "a.1", "a.0"], ["a.{0,1}"]),
        (["b1.fc", "b2.fc"], ["b1.fc", "b2.fc"]),
    ],
)
def test_fold(names, want):
    assert fold(names) == want


def test_fold_takes_any_iterable_once():
    assert fold(f"a.{i}" for i in range(3)) == ["a.{0…2}"]


def unfold(text):
    """The names that a folded name stands for."""
    parts = []
    for part in text.split("."):
        numbers = re.fullmatch(r"\{(.*)\}", part)
        if not numbers:
            parts.append([part])
            continue
        found = []
        for run in numbers[1].split(","):
            first, _, last = run.partition("…")
            found += [str(n) for n in range(int(first), int(last or first) + 1)]
        parts.append(found)
    return [".".join(choice) for choice in itertools.product(*parts)]


part = st.one_of(st.integers(0, 12).map(str), st.sampled_from(["a", "b", "fc", "01", "", "x2"]))
names = st.lists(st.lists(part, min_size=1, max_size=4).map(".".join), max_size=30)


@given(names=names)
def test_folding_loses_and_invents_nothing(names):
    unfolded = [name for text in fold(names) for name in unfold(text)]
    assert sorted(unfolded) == sorted(set(names))


def test_unfold_sees_a_lost_name():
    assert unfold("a.{0…2,5}.b") == ["a.0.b", "a.1.b", "a.2.b", "a.5.b"]
    assert unfold("a.{0…1}.b") != ["a.0.b"]


def test_unicode_digits_do_not_fold():
    assert fold(["a.²", "a.٣", "a.3"]) == ["a.²", "a.٣", "a.3"]
