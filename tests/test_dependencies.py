"""Each dependency is documented, pinned for development, and used where it may be."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def _project() -> dict[str, Any]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    assert isinstance(project, dict)
    return project


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower()


def _direct() -> dict[str, set[str]]:
    """Package -> the extras that bring it; "" is the base install."""
    project = _project()
    found: dict[str, set[str]] = {}
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, requirements in groups.items():
        for requirement in requirements:
            if _name(requirement) != "headway":
                found.setdefault(_name(requirement), set()).add(extra)
    return found


def _documented() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    section = ""
    for line in (ROOT / "docs" / "dependencies.md").read_text().splitlines():
        if line.startswith("## "):
            section = line
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or cells[0] == "package":
            continue
        assert all(cells[2:]), f"{cells[0]} lacks a reason or licence"
        extras = {"dev"} if "develop" in section else set(cells[1].split(", "))
        found[cells[0]] = extras
    return found


def test_every_dependency_is_documented_with_the_extra_that_brings_it() -> None:
    """docs/dependencies.md and pyproject.toml name the same packages."""
    assert _documented() == _direct()


def test_every_dependency_has_an_exact_version_for_development() -> None:
    """All but TensorRT, which is not installed for development."""
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert set(_direct()) - pinned == {"tensorrt"}


def test_every_dependency_has_a_lower_bound() -> None:
    """Users get ranges: an open lower end would take a version that was never tried."""
    project = _project()
    for requirements in (project["dependencies"], *project["optional-dependencies"].values()):
        for requirement in requirements:
            assert ">=" in requirement or _name(requirement) == "headway", requirement
