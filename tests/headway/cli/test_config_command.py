"""`headway config`, as a person runs it."""

import tomllib
from pathlib import Path

import pytest

from headway.cli.main import main


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main(["config", *arguments])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_the_example_that_it_prints_is_a_file_that_it_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`headway config --example > FILE; headway config --check FILE`."""
    status, example, err = call(capsys, "--example")
    assert (status, err) == (0, "")
    assert set(tomllib.loads(example)) == {
        "server",
        "engine",
        "scheduler",
        "actions",
        "telemetry",
    }
    file = tmp_path / "headway.toml"
    file.write_text(example)
    assert call(capsys, "--check", str(file)) == (0, f"{file}: good\n", "")


def test_a_wrong_file_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names file, key, and the nearest valid one."""
    file = tmp_path / "headway.toml"
    file.write_text("[server]\nprot = 1\n")
    assert call(capsys, "--check", str(file)) == (
        2,
        "",
        f"headway: {file}: server.prot: unknown key; did you mean server.port?\n",
    )


@pytest.mark.parametrize("arguments", [(), ("--example", "--markdown")])
def test_it_does_one_thing_at_a_time(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """None and two are both refused."""
    status, _, err = call(capsys, *arguments)
    assert status == 2
    assert err.startswith("headway config: give one of --example, --check FILE, --markdown")
