"""The contract in proto/: every field documented, old clients kept."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUF = Path(sys.executable).with_name("buf")


def _git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A repository whose contract was released as v1.0.0."""
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "release")
    _git(tmp_path, "tag", "v1.0.0")
    return tmp_path


def _buf(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BUF, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
    )


@pytest.mark.parametrize(
    ("file", "old", "new", "breaks"),
    [
        ("v1/robot.proto", "string task = 2;", "string task = 12;", True),
        ("v1/robot.proto", "rpc NextAction(", "rpc Act(", True),
        ("v1/operations.proto", "uint32 queued = 3;", "uint64 queued = 3;", True),
        (
            "v1/robot.proto",
            "string model = 6;\n}",
            "string model = 6;\n  string note = 17;\n}",
            False,
        ),
        ("internal/v1alpha/engine.proto", "string kind = 9;", "string sort = 90;", False),
    ],
)
def test_only_changes_that_break_clients_are_refused(
    released: Path, file: str, old: str, new: str, breaks: bool
) -> None:
    """Renumbering, renaming and retyping break; adding does not; internal is exempt."""
    path = released / "proto" / "headway" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert _buf(released, "build", "proto").stderr == ""
    verdict = _buf(released, "breaking", "proto", "--against", ".git#tag=v1.0.0,subdir=proto")
    assert (verdict.returncode != 0) is breaks, verdict.stdout


def test_every_field_method_and_value_has_a_comment() -> None:
    """A line that declares something stands under a comment line."""
    declares = re.compile(
        r"^\s*(rpc |(repeated |optional )?[\w.]+ \w+ = \d+;|[A-Z_]+ = \d+;"
        r"|message |enum |service |oneof )"
    )
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "proto").rglob("*.proto"))
        for number, (above, line) in enumerate(
            zip(path.read_text().splitlines(), path.read_text().splitlines()[1:], strict=False),
            start=2,
        )
        if declares.match(line) and not above.strip().startswith("//")
    ]
    assert bare == []
