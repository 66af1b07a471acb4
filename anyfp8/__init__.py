"""anyfp8: load any FP8 checkpoint into any PyTorch module, and compute exactly what its author meant."""

from anyfp8.backends import register_backend
from anyfp8.convert import convert
from anyfp8.dialects import register_dialect
from anyfp8.errors import (
    AnyFP8Error,
    BackendError,
    CalibrationError,
    CheckpointError,
    DialectError,
    LoadError,
    ReadOnlyWeightError,
    SchemeError,
)
from anyfp8.layers import FP8Conv1d, FP8Conv2d, FP8Conv3d, FP8Embedding, FP8Linear, register_layer
from anyfp8.load import inspect, load, plan
from anyfp8.loaded import dequantize, set_backend
from anyfp8.manifest import Manifest
from anyfp8.plan import Plan
from anyfp8.quantize import quantize
from anyfp8.report import LoadReport, report
from anyfp8.save import save
from anyfp8.scheme import QuantizationScheme

__all__ = [
    "AnyFP8Error",
    "BackendError",
    "CalibrationError",
    "CheckpointError",
    "DialectError",
    "FP8Conv1d",
    "FP8Conv2d",
    "FP8Conv3d",
    "FP8Embedding",
    "FP8Linear",
    "LoadError",
    "LoadReport",
    "Manifest",
    "Plan",
    "QuantizationScheme",
    "ReadOnlyWeightError",
    "SchemeError",
    "convert",
    "dequantize",
    "inspect",
    "load",
    "plan",
    "quantize",
    "register_backend",
    "register_dialect",
    "register_layer",
    "report",
    "save",
    "set_backend",
]

__version__ = "0.1.0"
