"""Checkpoints are made once a session; each test loads them into a fresh model."""

import pytest

import anyfp8
from tests.life.models import CASES, bare_encoder, build, quantized


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Key of CASES → folder with its checkpoint."""
    made = {}

    def find(key):
        if key not in made:
            model = quantized(CASES[key])
            made[key] = tmp_path_factory.mktemp("life") / key
            anyfp8.save(model, made[key])
        return made[key]

    return find


@pytest.fixture
def loaded(folder):
    """Key of CASES (or "encoder") → a fresh model with its checkpoint loaded."""

    def load(key, **options):
        if key == "encoder":
            return bare_encoder()
        return anyfp8.load(build(CASES[key].name), folder(key), **options)

    return load
