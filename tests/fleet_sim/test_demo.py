"""`headway demo` in real processes: it shows what it says, and leaves nothing behind."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import psutil
import pytest

DEMO = [sys.executable, "-m", "headway", "demo", "--engine", "simulated", "--robots", "2"]
_END_S = 60.0


@contextmanager
def demo(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A demo that runs, in a process group of its own; killed at the end."""
    with subprocess.Popen(
        [*DEMO, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "80"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(text: str, lines: IO[str] | None) -> None:
    """Reads up to the line with `text`; the end before it is a failure."""
    assert lines is not None
    assert any(text in line for line in iter(lines.readline, "")), f"ended without {text!r}"


def descendants(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Everything that it started, at least the server."""
    found = psutil.Process(process.pid).children(recursive=True)
    assert found, "no server was started"
    return found


def assert_gone(processes: list[psutil.Process]) -> None:
    """Each has ended, within a bounded time."""
    _, alive = psutil.wait_procs(processes, timeout=_END_S)
    left = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert left == []


def test_ends_with_a_summary_that_adds_up() -> None:
    """Everything that was asked is accounted for; plain lines; no process left."""
    with demo("--seconds", "4") as process:
        read_until("Every robot asks", process.stdout)
        started = descendants(process)
        output, errors = process.communicate(timeout=_END_S)
    assert (process.returncode, errors) == (0, "")
    assert_gone(started)
    assert "What happened" in output
    assert "What it means" in output
    assert "\x1b" not in output  # Not a terminal: no control sequences.
    assert max(map(len, output.splitlines())) <= 80
    asked = [int(n) for n in re.findall(r"asked (\d+) times for", output)]
    # "(n) answered in time", "(n) refused", "(n) came late", "(n) failed".
    ended = [
        int(n) for n in re.findall(r"^ +(\d+) (?:answered|refused|came late|failed)", output, re.M)
    ]
    assert len(asked) == 2  # Residents, and the visitors of the burst.
    assert sum(asked) == sum(ended)
    # Two robots, once a second, for four seconds; a question more each where the
    # last instant was still met.
    assert 8 <= asked[0] <= 10


def on_terminal(*arguments: str) -> str:
    """What the demo leaves on a terminal of 80 columns, without its control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    with subprocess.Popen([*DEMO, *arguments], stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        # A terminal that nobody writes to any more is an error, and no end.
        with contextlib.suppress(OSError):
            while more := os.read(ours, 65536):
                written += more
    os.close(ours)
    assert process.returncode == 0, written
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode()).replace("\r", "")


def test_what_the_server_counts_is_what_the_robots_asked() -> None:
    """Two tables of the same requests, and a word about those of the pilot."""
    screen = on_terminal("--seconds", "4")
    last = screen[screen.rindex("What the server did") : screen.index("What happened")]
    admitted, reasons = re.findall(r"^interactive +default +(\d+) +(.*?)   ", last, re.M)[-1]
    refused = sum(int(count) for count in re.findall(r"[A-Z_]+ (\d+)", reasons))
    rows = {
        name: [int(number) for number in numbers]
        for name, *numbers in re.findall(
            r"^(pilot|residents|visitors) +(\d+) +(\d+) +(\d+) +[\d-]+ +(\d+)", last, re.M
        )
    }
    assert rows["pilot"] == [14, 14, 0, 0]  # Asked, in time, refused, late: seven of each kind.
    assert "A pilot asked 14 times, alone" in screen
    asked = sum(row[0] for row in rows.values())
    late = sum(row[3] for row in rows.values())
    # What is late before it could be sent, on a machine that is busy, reaches no server.
    assert asked - late <= int(admitted) + refused <= asked


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to_group", [False, True])
def test_an_interrupt_leaves_no_process(end: signal.Signals, to_group: bool) -> None:
    """To the demo alone, as `kill` does it, and to its group, as a terminal does it."""
    with demo("--seconds", "600") as process:
        read_until("in time", process.stdout)
        started = descendants(process)
        if to_group:
            os.killpg(process.pid, end)
        else:
            process.send_signal(end)
        output, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 130
    assert errors == ""
    assert "nothing is left behind" in output.splitlines()[-1]
    assert_gone(started)


def test_an_interrupt_while_the_server_starts_leaves_no_process() -> None:
    """Before there is anything to see."""
    with demo() as process:
        read_until("Starting a server", process.stdout)
        started = descendants(process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=_END_S)
    assert process.returncode == 130
    assert_gone(started)


def test_a_server_that_does_not_start_is_one_line() -> None:
    """No such model: status 2, what was wrong, no process left."""
    with demo("--model", "/no/such/folder") as process:
        read_until("Starting a server", process.stdout)
        _, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert errors.startswith("headway: the server ended by itself (status 2)")
    assert "/no/such/folder" in errors


def test_a_server_that_dies_is_one_line() -> None:
    """Killed in the middle: the demo says so and ends."""
    with demo("--seconds", "600") as process:
        read_until("in time", process.stdout)
        started = descendants(process)
        psutil.Process(process.pid).children()[0].kill()
        _, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 2
    assert errors.startswith("headway: the server ended by itself (signal 9)")
    assert errors.count("\n") == 1
    assert_gone(started)


def test_a_demo_that_is_killed_takes_its_server_with_it() -> None:
    """SIGKILL leaves no time to tidy up; the server notices by itself."""
    with demo("--seconds", "600") as process:
        read_until("in time", process.stdout)
        started = descendants(process)
        process.kill()
        process.wait(_END_S)
        assert_gone(started)


@pytest.mark.parametrize(
    "arguments", [["--seconds", "0"], ["--seconds", "nan"], ["--robots", "0"], ["--robots", "x"]]
)
def test_wrong_arguments_are_one_line(arguments: list[str]) -> None:
    """Status 2, before a server is started."""
    done = subprocess.run(
        [*DEMO, *arguments], capture_output=True, text=True, timeout=_END_S, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("headway demo: Invalid value for")
    assert done.stderr.count("\n") == 1
