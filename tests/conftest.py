"""Caches go to a temporary folder that is removed again; hypothesis tries the same examples every time; one thread."""

import os
import tempfile

import hypothesis
import torch
from hypothesis.configuration import set_hypothesis_home_dir

hypothesis.settings.register_profile(
    "anyfp8",
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("anyfp8")

_CACHES = tempfile.TemporaryDirectory(prefix="anyfp8-tests-")


def pytest_configure():
    """Where hypothesis keeps its constants and inductor its kernels; collecting the tests already writes some."""
    set_hypothesis_home_dir(_CACHES.name)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(_CACHES.name, "inductor")
    torch.set_num_threads(1)  # the tensors are small: threads only wait for each other


def pytest_unconfigure():
    _CACHES.cleanup()
