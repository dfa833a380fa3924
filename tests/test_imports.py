"""Who may import whom, read off the source; what importing the package leaves alone."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "src" / "deepufm"

# Each part of the package, and the parts it may import; `_types` is free to all.
ALLOWED = {
    "_types": set(),
    "geometry": set(),
    "models": {"geometry"},
    "dynamics": {"geometry", "models"},
    "analysis": {"geometry", "models", "dynamics"},
    "ensemble": {"dynamics"},
    "limits": {"geometry", "models", "dynamics", "analysis", "ensemble"},
    "stability": {"geometry", "models", "dynamics", "analysis", "ensemble", "limits"},
    "sweep": {"models", "dynamics", "analysis", "ensemble", "limits"},
    "realnets": {"models", "analysis"},
    "figures": {
        "geometry", "models", "dynamics", "analysis", "ensemble", "limits",
        "stability", "sweep", "realnets",
    },
}  # fmt: skip
# The top level re-exports what computes; only the command line sees everything.
TOP_LEVEL = {
    "geometry", "models", "dynamics", "analysis", "ensemble", "limits", "stability",
    "sweep",
}  # fmt: skip
HEAVY = ("matplotlib", "xarray", "zarr", "tyro", "tqdm", "dask")

SOURCES = sorted(PACKAGE.rglob("*.py"))
names = pytest.mark.parametrize(
    "source", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE))
)


def imported_parts(source: pathlib.Path) -> set[str]:
    """The parts of the package that a file imports, relatively or by full name."""
    package = ("deepufm", *source.relative_to(PACKAGE).parts[:-1])
    modules = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            path = [*base, *(node.module.split(".") if node.module else ())]
            modules += [[*path, alias.name] for alias in node.names]
    inside = [module for module in modules if module[0] == "deepufm"]
    return {module[1] for module in inside if len(module) > 1}


def part_of(source: pathlib.Path) -> str:
    return source.relative_to(PACKAGE).parts[0].removesuffix(".py")


@names
def test_files_import_only_what_their_part_may(source):
    part, found = part_of(source), imported_parts(source)
    if part == "cli":
        return
    allowed = TOP_LEVEL if part == "__init__" else ALLOWED[part] | {part}
    extra = found - allowed - {"_types"}
    assert not extra, f"{part} must not import {extra}"


@names
def test_no_star_imports_and_no_postponed_annotations(source):
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.module != "__future__"
            assert all(alias.name != "*" for alias in node.names)


@pytest.mark.parametrize(
    "source",
    [path for path in SOURCES if path.name == "__init__.py"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_packages_only_re_export(source):
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.asname == alias.name for alias in node.names)
        else:
            assert isinstance(node, ast.Expr)  # the docstring


def test_the_parser_sees_every_form_of_import(tmp_path, monkeypatch):
    source = tmp_path / "dynamics" / "_file.py"
    source.parent.mkdir()
    source.write_text(
        "from .._types import State\nfrom ..analysis import metrics\n"
        "from .. import sweep\nimport deepufm.figures\nfrom deepufm import models\n"
        "from ._clock import LogTime\nimport numpy\n\n"
        "def later():\n    from ..ensemble._stream import ensemble\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert imported_parts(source) == {
        "_types", "analysis", "sweep", "figures", "models", "dynamics", "ensemble",
    }  # fmt: skip


def test_importing_changes_no_setting_and_pulls_in_nothing_heavy():
    script = (
        "import jax, sys\n"
        "before = dict(jax.config.values)\n"
        "import deepufm\n"
        "assert dict(jax.config.values) == before\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
