"""Who may import whom (DESIGN.md, section 3), what `import anyfp8` brings in, and what it offers."""

import ast
import fnmatch
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import anyfp8

PACKAGE = Path(anyfp8.__file__).parent

#: design level → rows of modules; a module may import modules of earlier rows only ("" is the package itself)
LEVELS = {
    0: ["folding", "errors"],
    1: ["vocabularies", "scheme"],
    2: ["numerics.codes", "numerics.tiles", "numerics.scales", "numerics", "header", "checkpoint"],
    3: [
        *("backends.device", "backends.base", "backends.emulated", "backends.native", "backends"),
        *("sources", "manifest", "claims"),
    ],
    4: [
        *("layers.readonly", "layers.storage layers.stacked", "layers.mixin layers.parametrized"),
        *("layers.conv layers.embedding layers.hf_conv1d layers.linear", "layers", "replace", "experts"),
        # what several dialects share, and the dialects that others build on; then any dialect
        *("dialects.config dialects.packed dialects.comfy_layers dialects.transformers_rules",),
        *("dialects.transformers_weights dialects.comfy", "dialects.*", "dialects"),
    ],
    5: ["selection buffers reads", "naming", "plan", "planner"],
    6: [
        *("report", "calibrate", "apply", "folder", "writers.base", "writers.*", "writers"),
        *("load loaded save quantize", "convert"),
    ],
    7: ["integrations", "integrations.*", "cli"],
    8: [""],
}
ROWS = [row.split() or [""] for rows in LEVELS.values() for row in rows]

#: modules of others that may be imported when the module itself is: everything else only inside functions
AT_IMPORT = {"torch", "safetensors"}
EXTRA = {"cli": {"click"}, "integrations.timm": {"timm"}, "layers.hf_conv1d": {"transformers"}}


def modules():
    """Dotted name without the package → file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def row_of(name):
    """The first row that lists the module by name, else the first with a pattern for it; the last if none has it."""
    exact = [i for i, row in enumerate(ROWS) if name in row]
    pattern = [i for i, row in enumerate(ROWS) if any(fnmatch.fnmatchcase(name, p) for p in row if p)]
    return (exact or pattern or [len(ROWS)])[0]


def imports(name):
    """(imported module, is it at the top level) of every import statement of a module."""
    tree = ast.parse(MODULES[name].read_text())
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    top = {id(node) for node in tree.body} | {
        id(n) for node in tree.body if isinstance(node, (ast.If, ast.Try)) for n in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ["anyfp8", *filter(None, package.split("."))]
                base = ".".join([*above[: len(above) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix("anyfp8.")
                if base.partition(".")[0] == "anyfp8" and inner in MODULES:
                    yield f"anyfp8.{inner}", id(node) in top
                elif base != "anyfp8" or alias.name != "__version__":  # the version is a constant of the package
                    yield base, id(node) in top


def own(imported):
    """The package's own module behind an import, or None."""
    if imported.partition(".")[0] != "anyfp8":
        return None
    return imported.removeprefix("anyfp8").removeprefix(".")


# --- levels ---
def test_every_module_has_a_level():
    unknown = [n for n in MODULES if not any(fnmatch.fnmatchcase(n, p) or n == p for row in ROWS for p in row)]
    assert unknown == [], "give it a row in LEVELS"
    listed = {p for row in ROWS for p in row if "*" not in p}
    assert listed - set(MODULES) == set(), "listed in LEVELS, but gone"


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downwards(name):
    mine = row_of(name)
    upwards = [other for imported, _ in imports(name) if (other := own(imported)) is not None and row_of(other) >= mine]
    if name == "dialects":  # it imports its own dialects by name, when a checkpoint is read
        upwards = [other for other in upwards if not other.startswith("dialects.")]
    assert upwards == []


def test_modules_named_in_strings_exist():
    from anyfp8 import dialects

    for name in dialects.names():
        assert callable(dialects.get(name).match)
        assert callable(dialects.get(name).read)


def test_the_finder_of_imports_finds_them(tmp_path, monkeypatch):
    """Every form of import statement, also inside functions and TYPE_CHECKING blocks."""
    file = tmp_path / "probe.py"
    file.write_text(
        "import anyfp8.load as x\nfrom anyfp8 import plan, __version__\nfrom . import save\n"
        "from .layers.conv import C\n"
        "if 1:\n    from anyfp8.report import r\ndef f():\n    import timm.models\n    from anyfp8 import quantize\n"
    )
    monkeypatch.setitem(MODULES, "probe", file)
    assert sorted(imports("probe")) == sorted(
        [
            ("anyfp8.load", True),
            ("anyfp8.plan", True),
            ("anyfp8.save", True),
            ("anyfp8.layers.conv", True),
            ("anyfp8.report", True),
            ("timm.models", False),
            ("anyfp8.quantize", False),
        ]
    )
    (tmp_path / "__init__.py").write_text("from ..layers import conv\nfrom .codes import x\nimport os.path\n")
    monkeypatch.setitem(MODULES, "sub", tmp_path / "__init__.py")
    assert list(imports("sub")) == [("anyfp8.layers.conv", True), ("anyfp8.sub.codes", True), ("os.path", True)]


# --- what others it needs ---
@pytest.mark.parametrize("name", MODULES)
def test_the_core_imports_torch_and_safetensors(name):
    others = {imported.partition(".")[0] for imported, top in imports(name) if top and own(imported) is None}
    others -= set(sys.stdlib_module_names) | {"__future__"}
    assert others <= AT_IMPORT | EXTRA.get(name, set())


def fresh(code):
    """Run code in a fresh interpreter; what it prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_brings_in_no_integration_and_does_no_work():
    code = """
import json, sys, threading, os, torch
before, environment = set(sys.modules), dict(os.environ)
files = lambda: len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
opened = files()
import anyfp8
print(json.dumps({
    "new": sorted({n.partition(".")[0] for n in set(sys.modules) - before}),
    "all": sorted({n.partition(".")[0] for n in sys.modules}),
    "dialects": sorted(n for n in sys.modules if n.startswith("anyfp8.dialects.")),
    "threads": threading.active_count(), "environment": environment == dict(os.environ), "files": files() - opened,
    "dynamo": "torch._dynamo" in sys.modules, "cuda": torch.cuda.is_initialized(),
    "dtype": str(torch.get_default_dtype()),
}))
"""
    got = fresh(code)
    assert {"transformers", "diffusers", "timm", "matplotlib", "huggingface_hub", "click"} & set(got["all"]) == set()
    assert set(got["new"]) - set(sys.stdlib_module_names) <= {"anyfp8", "safetensors"}
    assert (got["threads"], got["environment"], got["files"]) == (1, True, 0)
    assert (got["dynamo"], got["cuda"], got["dtype"]) == (False, False, "torch.float32")
    assert set(got["dialects"]) <= {"anyfp8.dialects.anyfp8_json", "anyfp8.dialects.config"}


def test_loading_brings_in_no_integration_either(tmp_path):
    code = f"""
import json, sys, torch, anyfp8
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
anyfp8.quantize(model, "FP8_DYNAMIC")
anyfp8.save(model, {str(tmp_path / "out")!r})
anyfp8.load(torch.nn.Sequential(torch.nn.Linear(4, 4)), {str(tmp_path / "out")!r})(torch.ones(1, 4))
print(json.dumps(sorted({{n.partition(".")[0] for n in sys.modules}})))
"""
    assert {"transformers", "diffusers", "timm", "matplotlib", "accelerate", "click"} & set(fresh(code)) == set()


# --- the public surface ---
PUBLIC = {
    *("load", "plan", "inspect", "report", "quantize", "save", "dequantize", "set_backend"),
    *("register_dialect", "register_backend", "register_layer"),
    *("QuantizationScheme", "Manifest", "Plan", "LoadReport"),
    *("FP8Linear", "FP8Conv1d", "FP8Conv2d", "FP8Conv3d", "FP8Embedding"),
    *("AnyFP8Error", "SchemeError", "CheckpointError", "DialectError", "LoadError", "BackendError"),
    *("CalibrationError", "ReadOnlyWeightError"),
}
PLANNED = {"convert", "compare", "ErrorReport"}


def test_the_public_names():
    assert set(anyfp8.__all__) >= PUBLIC
    assert set(anyfp8.__all__) <= PUBLIC | PLANNED
    assert sorted(set(anyfp8.__all__)) == sorted(anyfp8.__all__)
    assert all(callable(getattr(anyfp8, name)) for name in anyfp8.__all__)
    public = {name for name, value in vars(anyfp8).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(anyfp8.__all__)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_have_docstrings(name):
    assert len(inspect.getdoc(getattr(anyfp8, name)) or "") > 30


def test_signatures():
    """As DESIGN.md, section 2, has them."""
    more = [
        "dialect",
        "backend",
        "dtype",
        "device",
        "include",
        "exclude",
        "rename",
        "strict",
        "progress",
        "revision",
        "subfolder",
        "token",
    ]
    want = {
        "load": (["model", "source"], more),
        "plan": (["model", "source"], more),
        "inspect": (["source"], ["dialect"]),
        "report": (["model"], []),
        "quantize": (["model", "scheme"], ["calibration", "include", "exclude", "progress"]),
        "save": (["model", "path"], ["format", "max_shard_size"]),
        "dequantize": (["model", "dtype"], []),
        "set_backend": (["model", "name"], []),
    }
    for name, (positional, keywords) in want.items():
        parameters = inspect.signature(getattr(anyfp8, name)).parameters
        given = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert given == positional, name
        assert set(keywords) <= {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY}, name
    defaults = {n: p.default for n, p in inspect.signature(anyfp8.load).parameters.items() if n in more}
    nothing = dict.fromkeys(more)
    assert defaults == nothing | {"backend": "auto", "strict": True, "subfolder": ""}


def test_errors_are_one_family():
    for name in PUBLIC:
        if name.endswith("Error"):
            assert issubclass(getattr(anyfp8, name), anyfp8.AnyFP8Error)
    assert issubclass(anyfp8.AnyFP8Error, RuntimeError)
    assert issubclass(anyfp8.SchemeError, ValueError)
