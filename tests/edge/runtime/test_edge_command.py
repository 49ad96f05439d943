"""`headway edge`: what a person sees. No times are asserted: any machine may run this."""

from pathlib import Path

import pytest

from edge.runtime import demo
from edge.runtime.shapes import SceneShape
from headway.cli.commands import run


@pytest.fixture(autouse=True)
def _small_and_patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A scene that a busy machine reads too, and a cache of the test's own."""
    small = SceneShape(
        vocabulary=64, width=32, layers=1, heads=2, kv_heads=1, hidden=48, max_tokens=256
    )
    monkeypatch.setattr(demo, "SCENE", small)
    monkeypatch.setattr(demo, "BUCKETS", (16, 64))
    monkeypatch.setattr(demo, "PERIOD_NS", 200_000_000)
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path))


def test_the_demo_compares_three_ways_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table a scene, a histogram, one sentence, and a picture."""
    picture = tmp_path / "timeline.png"
    assert run(["edge", "run", "--demo", "--scenes", "2", "--timeline", str(picture)]) == 0
    out = capsys.readouterr().out
    for words in ("in one go", "512 at a time", "bounded chunks", "Scene 2 of 2", "Reactions"):
        assert words in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_calibration_is_kept_and_used_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Measured once; the second time it is as kept, to the digit."""
    assert run(["edge", "calibrate"]) == 0
    first = capsys.readouterr().out
    assert run(["edge", "calibrate"]) == 0
    second = capsys.readouterr().out
    assert "as kept" in second
    assert first.split("chunks measured")[1] == second.split("chunks measured")[1]


def test_what_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is not there."""
    arguments = ["edge", "run", "--demo", "--scenes", "1", "--timeline", "/nowhere/t.png"]
    assert run(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_check_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Torch is installed for development."""
    assert run(["edge", "check"]) == 0
    assert "torch (CPU): " in capsys.readouterr().out
