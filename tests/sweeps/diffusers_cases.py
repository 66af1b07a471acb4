"""Every model class of diffusers as a small case: how to build and to call it. The tables are in the files beside."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

UNCALLED = "no inference calls it"


class Case(NamedTuple):
    """build: makes the model, the same each time. run: model → its output, of inputs drawn from torch's generator.
    leave: pattern → why the layers it matches are left out with exclude=."""

    build: Callable[[], nn.Module]
    run: Callable[[nn.Module], Any]
    leave: Mapping[str, str] = MappingProxyType({})


def case(
    name: str, run: Callable[[nn.Module], Any], *, leave: Mapping[str, str] = MappingProxyType({}), **config: Any
) -> tuple[str, Case]:
    """A line of a table. name: the class, or "package.module.Class" inside diffusers where it is not exported, and
    after a "/" which variant of it; config: the arguments of its constructor."""
    path, slash, variant = name.partition("/")
    return family(path) + slash + variant, Case(lambda: model_class(path)(**config), run, leave)


def filled(line: tuple[str, Case], part: str) -> tuple[str, Case]:
    """A line whose model leaves parameters (those with `part` in their names) as memory happened to be."""
    name, (build, run, leave) = line

    def build_filled() -> nn.Module:
        model = build()
        for parameter_name, parameter in model.named_parameters():
            if part in parameter_name:
                nn.init.normal_(parameter, std=0.1)
        return model

    return name, Case(build_filled, run, leave)


def model_class(path: str) -> type[nn.Module]:
    """The class "Name" or "package.module.Name" of diffusers."""
    module, _, name = f"diffusers.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)


def family(name: str) -> str:
    """The class's bare name."""
    return name.partition("/")[0].rpartition(".")[2]


def every_class() -> set[str]:
    """All model classes that diffusers defines, exported or not (abstract bases left out)."""
    import diffusers.models
    import diffusers.pipelines

    for package in (diffusers.models, diffusers.pipelines):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                importlib.import_module(module.name)
            except ImportError:  # wants a package of its own (cv2, note-seq, PyAV); none of these defines a model
                continue
    found, queue = set(), [diffusers.ModelMixin]
    while queue:
        for each in queue.pop().__subclasses__():
            queue.append(each)
            found.add(each)
    return {each.__name__ for each in found if each.__module__.startswith("diffusers.") and each.__name__ not in BASES}


BASES = {"LegacyModelMixin"}  # no models: what some of them are derived from


OLD_MASKS = "its float forward fails: it calls get_extended_attention_mask, which transformers 5 has no more"

NOT_RUN = {
    "ControlNetXSAdapter": "its forward raises: it runs inside UNetControlNetXSModel, which is run",
    "MotionAdapter": "its forward does nothing: it runs inside UNetMotionModel, which is run",
    "SpectrogramContEncoder": OLD_MASKS,
    "SpectrogramNotesEncoder": OLD_MASKS,
    "IFWatermarker": "no forward and no layers: it draws a watermark",
    "LearnedClassifierFreeSamplingEmbeddings": "no forward and no layers: one parameter",
    "StableUnCLIPImageNormalizer": "no forward and no layers: a mean and a deviation",
}


# --- inputs ---
def randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def at(*steps: float) -> Tensor:
    """Timesteps, one a sample."""
    return torch.tensor(steps, dtype=torch.float32)
