"""The command's entry: quick, helpful, and never a traceback for a person."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

import headway
from headway.cli.commands import COMMANDS, Subcommand
from headway.cli.main import main
from headway.errors import ConfigError, HeadwayError

HEADWAY = Path(sys.executable).with_name("headway")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed command, as a person runs it."""
    return subprocess.run([HEADWAY, *arguments], capture_output=True, text=True, check=False)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a call in this process."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_help_names_every_command_and_imports_none_of_them() -> None:
    """Neither the commands nor any library but click: that is what makes it instant."""
    script = (
        "import sys\n"
        "from headway.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as ended:\n"
        "    print(ended.code, *sorted(sys.modules), sep='\\n', file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    status, *modules = ran.stderr.splitlines()
    assert status == "0"
    for name, command in COMMANDS.items():
        assert f"  {name}" in ran.stdout
        assert command.help in ran.stdout
        assert command.target.partition(":")[0] not in modules
    packages = {module.partition(".")[0] for module in modules}
    third_party = {"torch", "grpc", "google", "numpy", "pydantic", "structlog", "rich"}
    assert not packages & third_party
    assert not packages & {"cloud", "edge", "fleet_sim"}


def test_version_is_the_packages() -> None:
    """One version, that of the package."""
    assert run("--version").stdout == f"headway, version {headway.__version__}\n"


def test_without_a_command_it_shows_its_help_and_fails() -> None:
    """As click does: nothing was asked for, so nothing was done."""
    ran = run()
    assert ran.returncode == 2
    assert "Commands:" in ran.stderr


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("serv", "did you mean 'serve'?"), ("confg", "did you mean 'config'?"), ("x", "there are ")],
)
def test_an_unknown_command_names_the_nearest_in_one_line(typed: str, hint: str) -> None:
    """Where nothing is near, it lists what there is."""
    ran = run(typed)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert f"no command '{typed}'; {hint}" in ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--bogus",), ("config", "--bogus"), ("config",), ("config", "--check"), ("cost", "fit")],
)
def test_a_wrong_call_is_one_line_with_where_to_look(arguments: tuple[str, ...]) -> None:
    """The line names the command whose help to read."""
    ran = run(*arguments)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "--help'." in ran.stderr


def _register(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str, extra: str = "") -> None:
    """A subcommand `probe` whose module has this source."""
    (folder / "probe_command.py").write_text("import click\n" + source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "probe_command", raising=False)
    monkeypatch.setitem(COMMANDS, "probe", Subcommand("probe_command:probe", "Probe.", extra))


@pytest.mark.parametrize("where", ["when the module is imported", "when the command runs"])
def test_a_missing_extra_says_what_to_install(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the command's module needs the package or only its body does."""
    imports = "import no_such_library.part"
    at_import, in_body = (imports, "pass") if "module" in where else ("", imports)
    _register(
        monkeypatch,
        tmp_path,
        f"{at_import}\n@click.command()\ndef probe():\n    {in_body}\n",
        extra="cloud",
    )
    status, _, err = call(capsys, "probe")
    assert status == 2
    assert err == (
        "headway: the package 'no_such_library' is not installed. "
        "Run: pip install 'headway[cloud]'\n"
    )


def test_a_part_of_headway_that_is_missing_is_no_matter_of_extras(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wheel without one of its own modules is broken, and no extra would help."""
    monkeypatch.setitem(COMMANDS, "probe", Subcommand("cloud.not_there:probe", "Probe.", "cloud"))
    status, _, err = call(capsys, "probe")
    assert status == 2
    assert err == (
        "headway: this installation is incomplete: it has no cloud.not_there. "
        "Install headway anew\n"
    )


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        ("HeadwayError('the port is taken')", "headway: the port is taken\n"),
        (
            "ConfigError('unknown key', source='a.toml', key='server.prot')",
            "headway: a.toml: server.prot: unknown key\n",
        ),
        ("click.ClickException('no such thing')", "headway: no such thing\n"),
    ],
)
def test_an_error_for_a_person_is_one_line_and_status_2(
    raised: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Expected errors never show a traceback."""
    _register(
        monkeypatch,
        tmp_path,
        "from headway.errors import ConfigError, HeadwayError\n"
        f"@click.command()\ndef probe():\n    raise {raised}\n",
    )
    assert call(capsys, "probe") == (2, "", line)


def test_a_bug_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody expected keeps its traceback: it is for a developer."""
    _register(monkeypatch, tmp_path, "@click.command()\ndef probe():\n    raise KeyError('bug')\n")
    with pytest.raises(KeyError, match="bug"):
        main(["probe"])


def test_a_command_chooses_its_status_with_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ctx.exit(3)` is status 3."""
    source = "@click.command()\n@click.pass_context\ndef probe(ctx):\n    ctx.exit(3)\n"
    _register(monkeypatch, tmp_path, source)
    assert call(capsys, "probe") == (3, "", "")


def test_an_interrupt_ends_it_with_130_and_no_traceback(tmp_path: Path) -> None:
    """A real SIGINT to a real process that waits."""
    (tmp_path / "probe_command.py").write_text(
        "import click, signal\n"
        "@click.command()\n"
        "def probe():\n"
        "    print('ready', flush=True)\n"
        "    signal.pause()\n"
    )
    script = (
        "from headway.cli.commands import COMMANDS, Subcommand\n"
        "from headway.cli.main import main\n"
        "COMMANDS['probe'] = Subcommand('probe_command:probe', 'Probe.')\n"
        "main(['probe'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("slow_module", ["click", "structlog"])
def test_an_interrupt_while_it_loads_ends_it_without_a_word(
    tmp_path: Path, slow_module: str
) -> None:
    """Whichever import it falls into: of the command line, or of a command."""
    (tmp_path / f"{slow_module}.py").write_text(
        "import signal\n"
        "print('loading', flush=True)\n"
        "try:\n"
        "    signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    raise TypeError('as a library does that was interrupted') from None\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "headway", "serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (-signal.SIGINT, "")


def test_every_command_of_the_table_is_a_click_command() -> None:
    """The table has no misspelt module, attribute or name."""
    for name, subcommand in COMMANDS.items():
        module, _, attribute = subcommand.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        assert command.name == name


def test_errors_carry_their_parts() -> None:
    """Nobody has to parse the text."""
    error = ConfigError("unknown key", source="a.toml", key="server.prot")
    assert isinstance(error, HeadwayError)
    assert (error.source, error.key) == ("a.toml", "server.prot")
    assert error.message == str(error) == "a.toml: server.prot: unknown key"
