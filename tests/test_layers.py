"""The checks of `make check` find what they are there for.

Each runs as CI runs it, on a copy of the sources with one thing wrong.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PACKAGES = ("headway", "cloud", "edge", "fleet_sim")

# What may be imported by packages that decide and compute, and never wait,
# send, or look at a clock. Anything else needs a reason.
PURE_STANDARD_LIBRARY = frozenset(
    {
        "__future__",
        "abc",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "operator",
        "statistics",
        "struct",
        "types",
        "typing",
    }
)
CORE = ("headway.cost_model", "headway.clock", "headway.outcome")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources and their configuration, without caches."""
    ignore = shutil.ignore_patterns("__pycache__", ".cache")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def check(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a tool of this environment on the copy, not on the installed sources."""
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{BIN}{os.pathsep}/usr/bin{os.pathsep}/bin", "HOME": str(folder)},
    )


def test_the_layers_hold(copy: Path) -> None:
    """As `make layers` says."""
    ran = check(copy, BIN / "lint-imports", "--no-cache")
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("cloud/scheduler/types.py", "import grpc"),
        ("cloud/scheduler/types.py", "import asyncio"),
        ("cloud/scheduler/types.py", "import time"),
        ("cloud/scheduler/types.py", "import torch.nn"),
        ("cloud/scheduler/types.py", "def later():\n    import numpy"),
        ("cloud/scheduler/types.py", "import cloud.engine.api"),
        ("cloud/scheduler/types.py", "from headway.v1 import robot_pb2"),
        ("headway/cost_model/model.py", "import numpy"),
        ("headway/clock.py", "from headway import rpc"),
        ("headway/outcome.py", "import cloud.scheduler.types"),
        ("headway/outcome.py", "import edge"),
        ("edge/__init__.py", "import cloud"),
        ("cloud/engine/api.py", "import edge"),
        ("cloud/engine/api.py", "import fleet_sim"),
        ("edge/__init__.py", "import fleet_sim"),
    ],
)
def test_an_import_across_the_layers_fails_the_check(copy: Path, file: str, statement: str) -> None:
    """Also one that hides in a function."""
    with (copy / file).open("a") as source:
        source.write(f"\n{statement}\n")
    ran = check(copy, BIN / "lint-imports", "--no-cache")
    assert ran.returncode == 1, ran.stdout
    assert "BROKEN" in ran.stdout


def imports_of(source: str) -> Iterator[str]:
    """Absolute names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def strangers(source: str, siblings: tuple[str, ...], standard: frozenset[str]) -> list[str]:
    """What a module imports beside the pure standard library and its siblings."""
    return [
        name
        for name in imports_of(source)
        if name.partition(".")[0] not in standard
        and not any(name == sibling or name.startswith(f"{sibling}.") for sibling in siblings)
    ]


@pytest.mark.parametrize(
    ("path", "siblings", "also"),
    [
        ("headway/cost_model", CORE, set()),
        ("headway/outcome.py", CORE, set()),
        # The one place that reads the machine's clock.
        ("headway/clock.py", CORE, {"time"}),
        ("headway/errors.py", (), set()),
        ("cloud/scheduler", (*CORE, "cloud.scheduler"), set()),
    ],
)
def test_the_pure_parts_need_the_standard_library_alone(
    path: str, siblings: tuple[str, ...], also: set[str]
) -> None:
    """A list of what is allowed: a new library cannot slip past it, as past one of what is not."""
    place = ROOT / path
    modules = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    assert modules
    for module in modules:
        found = strangers(module.read_text(), siblings, PURE_STANDARD_LIBRARY | also)
        assert not found, f"{module.relative_to(ROOT)} imports {', '.join(found)}"


@pytest.mark.parametrize(
    "statement",
    ["import msgpack", "from os import path", "def f():\n    import random", "import headway.rpc"],
)
def test_a_stranger_is_found(statement: str) -> None:
    """The check above can fail."""
    source = (ROOT / "headway/cost_model/model.py").read_text() + f"\n{statement}\n"
    assert len(strangers(source, CORE, PURE_STANDARD_LIBRARY)) == 1


def test_a_public_function_without_a_type_fails_the_check(tmp_path: Path) -> None:
    """Strict mypy, with the project's own settings."""
    module = tmp_path / "headway" / "clock.py"
    module.parent.mkdir()
    (module.parent / "__init__.py").touch()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = (ROOT / "headway/clock.py").read_text()
    module.write_text(source)
    assert check(tmp_path, BIN / "mypy", "headway/clock.py").returncode == 0
    for typed, untyped in [
        ("def s_from_ns(span_ns: int) -> float:", "def s_from_ns(span_ns) -> float:"),
        ("def s_from_ns(span_ns: int) -> float:", "def s_from_ns(span_ns: int):"),
    ]:
        assert typed in source
        module.write_text(source.replace(typed, untyped))
        ran = check(tmp_path, BIN / "mypy", "headway/clock.py")
        assert ran.returncode == 1
        assert "[no-untyped-def]" in ran.stdout


@pytest.fixture
def contract(tmp_path: Path) -> Path:
    """The contract, its generated code, and the Makefile that keeps them together."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    for name in ("v1", "internal"):
        shutil.copytree(
            ROOT / "headway" / name,
            tmp_path / "headway" / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv").symlink_to(BIN.parent)
    return tmp_path


def make_contract(folder: Path) -> subprocess.CompletedProcess[str]:
    """`make contract`, with the environment as it is."""
    return check(folder, "make", "-o", ".venv/.installed", "contract")


def test_generated_code_is_what_the_contract_gives(contract: Path) -> None:
    """As `make contract` says, on an unchanged copy."""
    ran = make_contract(contract)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "stale"),
    [
        ("v1/robot.proto", "string task = 2;", "string task = 2;\n  bool x = 17;", "headway/v1"),
        (
            "internal/v1alpha/engine.proto",
            "string kind = 9;",
            "string sort = 9;",
            "headway/internal/v1alpha",
        ),
    ],
)
def test_a_contract_that_was_edited_and_not_generated_fails_the_check(
    contract: Path, file: str, old: str, new: str, stale: str
) -> None:
    """The line says which package is stale, and what to run."""
    path = contract / "proto" / "headway" / file
    # With the comment that the style rules ask for.
    new = re.sub(r"\n  (\S)", r"\n  // New.\n  \1", new)
    path.write_text(path.read_text().replace(old, new))
    ran = make_contract(contract)
    assert ran.returncode != 0
    assert f"{stale} is not what the .proto files give. Run: make generate" in ran.stderr


def test_generated_code_that_was_edited_by_hand_fails_the_check(contract: Path) -> None:
    """Nobody improves it in place."""
    with (contract / "headway/v1/robot_pb2.pyi").open("a") as generated:
        generated.write("# better\n")
    assert make_contract(contract).returncode != 0
