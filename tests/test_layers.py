"""Imports run one way, and the package shows what it promises."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import conduit

ROOT = Path(conduit.__file__).parent
# From the bottom up: a module imports only from its own layer and from those before it.
LAYERS = [
    {"errors", "rows", "fields", "blocks", "schema", "windows", "metrics", "tracing"},
    {"collectives", "tiers"}, {"edp"}, {"sched"},
    {"calls", "configuration", "creation", "plane"}, {"__init__", "tools"}, {"__main__"},
]


def layer_of(module: str) -> int:
    name = module.split(".")[1] if "." in module else "__init__"
    found = [i for i, layer in enumerate(LAYERS) if name in layer]
    assert found, f"{module} is in no layer"
    return found[0]


def modules() -> list[str]:
    return sorted(
        ".".join(["conduit", *path.relative_to(ROOT).with_suffix("").parts])
        for path in ROOT.rglob("*.py")
    )


@pytest.mark.parametrize("module", modules())
def test_no_module_imports_from_above(module: str) -> None:
    path = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module or ""]
        for name in names:
            if name == "conduit" or name.startswith("conduit."):
                assert layer_of(name) <= layer_of(module), f"{module} imports {name}"


def test_everything_promised_is_there() -> None:
    for name in conduit.__all__:
        assert getattr(conduit, name) is not None
    assert sorted(conduit.__all__) == conduit.__all__
    for info in pkgutil.walk_packages([str(ROOT)], "conduit."):
        if not info.name.startswith(("conduit.tools", "conduit.__main__")):
            module = importlib.import_module(info.name)
            assert module.__doc__, f"{info.name} says what it is"
            for name in getattr(module, "__all__", []):
                assert hasattr(module, name), f"{info.name} has no {name}"
