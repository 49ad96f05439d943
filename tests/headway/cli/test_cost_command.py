"""`headway cost fit`, as a person runs it."""

import json
from pathlib import Path

import pytest

from headway.cli.main import main


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main(["cost", "fit", *arguments])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Steps of 20 ms + 0.1 ms a prompt token + 0.2 ms a decode, among other events."""
    lines = [json.dumps({"event": "server_ready"})]
    for prefill in (0, 100, 400, 900):
        for decodes in (0, 1, 8, 30):
            elapsed_ns = 20_000_000 + 100_000 * prefill + 200_000 * decodes
            step = {"event": "step", "prefill_tokens": prefill, "decodes": decodes}
            lines.append(json.dumps({**step, "elapsed_ns": elapsed_ns}))
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(lines) + "\n\n")
    return path


def test_it_prints_the_coefficients_that_made_the_log(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In units that a person reads, with the errors beside them."""
    status, out, err = call(capsys, str(log))
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][-2:] == ["16", "steps"]
    assert ["t0,", "each", "step", "20", "ms"] in lines
    assert ["c_p,", "prompt", "token", "100", "µs"] in lines
    assert ["c_d,", "decoding", "request", "200", "µs"] in lines
    assert "(no step had any)" in next(line for line in out.splitlines() if "c_kv" in line)
    assert "MAPE" in out
    assert "margin" in out


def test_json_has_the_same_for_a_program(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nanoseconds and shares, unrounded."""
    _, out, _ = call(capsys, str(log), "--json")
    found = json.loads(out)
    assert found["t0_ns"] == pytest.approx(20e6)
    assert found["prefill_ns"] == pytest.approx(1e5)
    assert found["decode_ns"] == pytest.approx(2e5)
    assert found["unseen"] == ["pair_ns", "kv_ns"]
    assert found["mape"] < 1e-6
    assert found["margin"] == pytest.approx(1)
    assert found["num_train"] + found["num_held_out"] == 16


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ': has no steps; expected JSON lines with "elapsed_ns"'),
        ('{"event": "x"}\n', ': has no steps; expected JSON lines with "elapsed_ns"'),
        ("{}\nnonsense\n", ":2: not JSON: "),
        ("[1]\n", ":1: got [1], expected a JSON object"),
        ('{"elapsed_ns": 0}\n', ":1: elapsed_ns: got 0, expected a whole number above 0"),
        (
            '{"elapsed_ns": 1, "decodes": -1}\n',
            ":1: decodes: got -1, expected a whole number of at least 0",
        ),
        (
            '{"elapsed_ns": "1 ms"}\n',
            ':1: elapsed_ns: got "1 ms", expected a whole number of at least 0',
        ),
    ],
)
def test_a_log_that_is_wrong_is_one_line_and_status_2(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names file and line number."""
    path = tmp_path / "steps.jsonl"
    path.write_text(text)
    status, out, err = call(capsys, str(path))
    assert (status, out) == (2, "")
    assert err.startswith(f"headway: {path}{problem}")
    assert err.count("\n") == 1


def test_a_log_that_is_not_there_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the operating system puts it."""
    path = tmp_path / "none.jsonl"
    assert call(capsys, str(path)) == (
        2,
        "",
        f"headway: {path}: cannot be read: No such file or directory\n",
    )
