"""From a file to settings, or to one line that says what is wrong."""

import os
from pathlib import Path

import pytest

from headway.config import Settings, load_settings, parse_settings
from headway.errors import ConfigError


def problem_of(text: str) -> str:
    """The line that a file with this text gives."""
    with pytest.raises(ConfigError) as raised:
        parse_settings(text, source="fleet.toml")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_no_file_means_the_defaults_of_the_design() -> None:
    """Loopback, batch patience of 10 min, a lane of 5 % over 1 s, weights 1 and 2, 0.1 % misses."""
    settings = load_settings()
    assert settings.server.host == "127.0.0.1"
    assert settings.scheduler.batch.patience_s == 600
    assert settings.scheduler.starvation_share == 0.05
    assert settings.scheduler.starvation_window_s == 1
    assert (settings.scheduler.prompt_weight, settings.scheduler.output_weight) == (1, 2)
    assert settings.scheduler.target_miss_share == 0.001
    assert [tenant.name for tenant in settings.tenants] == ["default"]


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    """One key of one inner table, and a list of tenants in its own order."""
    file = tmp_path / "fleet.toml"
    file.write_text(
        "[scheduler.standard]\nslo_s = 5\n"
        '[[tenants]]\nname = "night"\nclasses = ["batch"]\n'
        '[[tenants]]\nname = "acme"\nweight = 3.0\n'
    )
    settings = load_settings(file)
    defaults = Settings()
    assert settings.scheduler.standard.slo_s == 5.0
    assert settings.scheduler.interactive == defaults.scheduler.interactive
    assert settings.server == defaults.server
    assert [(t.name, t.weight, t.classes) for t in settings.tenants] == [
        ("night", 1.0, ("batch",)),
        ("acme", 3.0, ("interactive", "standard", "batch")),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # Unknown keys name the nearest valid one.
        ("[server]\nprot = 1", "server.prot: unknown key; did you mean server.port?"),
        ("port = 1", "port: unknown key; did you mean server.port?"),
        ("[sever]", "sever: unknown key; did you mean server?"),
        (
            '[[tenants]]\nname = "a"\nwieght = 2.0',
            "tenants[0].wieght: unknown key; did you mean tenants[0].weight?",
        ),
        (
            "[zzz]",
            "zzz: unknown key; expected one of "
            "server, engine, scheduler, actions, telemetry, tenants",
        ),
        # Kind: nothing is converted.
        ('[server]\nport = "1"', 'server.port: got "1", expected a whole number from 0 to 65535'),
        ("[server]\nport = true", "server.port: got true, expected a whole number from 0 to 65535"),
        ("[server]\nport = 1.0", "server.port: got 1.0, expected a whole number from 0 to 65535"),
        ("[server]\nreflection = 1", "server.reflection: got 1, expected true or false"),
        ("[server]\nhost = 7", "server.host: got 7, expected a text, not empty"),
        ("server = 3", "server: got 3, expected a table"),
        ("tenants = 3", "tenants: got 3, expected an array of tables, at least 1"),
        ("tenants = [3]", "tenants[0]: got 3, expected a table"),
        # Range.
        (
            "[server]\nport = 70000",
            "server.port: got 70000, expected a whole number from 0 to 65535",
        ),
        (
            "[engine.simulated]\nt0_s = nan",
            "engine.simulated.t0_s: got nan, expected a finite number",
        ),
        (
            "[scheduler.batch]\npatience_s = inf",
            "scheduler.batch.patience_s: got inf, expected a finite number above 0",
        ),
        (
            "[scheduler]\nmax_step_s = 0.0",
            "scheduler.max_step_s: got 0.0, expected a number above 0",
        ),
        ('[engine]\nkind = "gpu"', 'engine.kind: got "gpu", expected one of "torch", "simulated"'),
        ('[engine]\ndevice = "gpu"', 'engine.device: got "gpu", expected a text such as "cpu" or'),
        ("tenants = []", "tenants: got [], expected an array of tables, at least 1"),
        (
            '[[tenants]]\nname = "a"\nclasses = ["bulk"]',
            'tenants[0].classes[0]: got "bulk", expected one of "interactive", "standard", "batch"',
        ),
        (
            "[[actions.embodiments]]\nname = 'a'\nvalues = ['x']\nlow = ['q']\nhigh = [1.0]",
            'actions.embodiments[0].low[0]: got "q", expected a number',
        ),
        # Required.
        ("[[tenants]]\nweight = 2.0", "tenants[0].name: missing; expected a text such as"),
        # What does not go together.
        (
            "[server]\nidle_timeout_s = 1.0",
            "server: idle_timeout_s (1.0) must be longer than heartbeat_interval_s (2.0)",
        ),
        (
            "[engine]\nkv_tokens = 8",
            "engine: kv_tokens (8) must hold at least one block of block_tokens (16)",
        ),
        (
            "[engine]\nrestart_backoff_s = 60.0",
            "engine: restart_backoff_max_s (30.0) must be at least restart_backoff_s (60.0)",
        ),
        (
            '[[tenants]]\nname = "a"\ntokens_per_s = 5.0',
            "tenants[0]: tokens_per_s needs burst_tokens of at least 1, or nothing ever passes",
        ),
        (
            '[[tenants]]\nname = "a"\n[[tenants]]\nname = "a"',
            "tenants must have different names; 'a' stands there twice",
        ),
        (
            "[[actions.embodiments]]\nname = 'a'\nvalues = ['x']\nlow = [1.0]\nhigh = [1.0]",
            "actions.embodiments[0]: low of x (1.0) must be less than its high (1.0)",
        ),
        (
            "[[actions.embodiments]]\nname = 'a'\nvalues = ['x']\nlow = []\nhigh = [1.0]",
            "actions.embodiments[0]: values, low and high must be of one length, got 1, 0 and 1",
        ),
        (
            "[[actions.embodiments]]\nname = 'a'\nvalues = ['x', 'x']\nlow = [0.0, 0.0]\n"
            "high = [1.0, 1.0]",
            "actions.embodiments[0]: values must all have different names",
        ),
    ],
)
def test_what_is_wrong_is_one_line(text: str, problem: str) -> None:
    """File, dotted key, what was there, what was expected."""
    assert problem_of(text).startswith(f"fleet.toml: {problem}")


def test_a_misspelt_key_comes_before_what_it_caused() -> None:
    """The name is missing because it is misspelt: say that, and that there is more."""
    assert problem_of('[[tenants]]\nnaem = "a"') == (
        "fleet.toml: tenants[0].naem: unknown key; did you mean tenants[0].name? (and 1 more)"
    )


def test_a_long_value_is_cut() -> None:
    """A pasted file in a value does not flood the screen."""
    assert len(problem_of(f'[engine]\nkind = "{"x" * 5000}"')) < 200


@pytest.mark.parametrize(
    ("text", "line"), [("[server]\nport = \n", 2), ("\n\n[server\n", 3), ("a = 1\nb = [1,", 2)]
)
def test_bad_toml_names_the_line(text: str, line: int) -> None:
    """Also where the file ends too early."""
    problem = problem_of(text)
    assert problem.startswith("fleet.toml: not valid TOML: ")
    assert f"line {line}," in problem


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """As the operating system puts it."""
    file = tmp_path / "none.toml"
    with pytest.raises(ConfigError) as raised:
        load_settings(file)
    assert str(raised.value) == (
        f"{file}: cannot be read: No such file or directory; expected a TOML file"
    )


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    """A checkpoint given by mistake."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x00\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_settings(file)


def test_overrides_win_over_the_file_and_none_leaves_it(tmp_path: Path) -> None:
    """Flags of a command: given ones count, the others are None."""
    file = tmp_path / "fleet.toml"
    file.write_text("[server]\nport = 1\ngrace_s = 2\n")
    settings = load_settings(
        file, {"server.port": 7, "server.grace_s": None, "engine.kind": "simulated"}
    )
    assert (settings.server.port, settings.server.grace_s) == (7, 2)
    assert settings.engine.kind == "simulated"


def test_overrides_are_checked_like_the_file() -> None:
    """The same line, with no file to name."""
    with pytest.raises(ConfigError) as raised:
        load_settings(None, {"server.port": 70000})
    assert str(raised.value) == (
        "settings: server.port: got 70000, expected a whole number from 0 to 65535"
    )


def test_an_override_inside_what_is_no_table_is_one_line() -> None:
    """The file is at fault, not the flag."""
    with pytest.raises(ConfigError) as raised:
        parse_settings("engine = 3", source="fleet.toml", overrides={"engine.simulated.t0_s": 1.0})
    assert str(raised.value) == "fleet.toml: engine: got 3, expected a table"


def test_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is what the file and the flags say."""
    defaults = load_settings()
    for name in ("HEADWAY_SERVER__PORT", "SERVER__PORT", "SERVER_PORT", "PORT"):
        monkeypatch.setenv(name, "7")
    assert load_settings() == defaults


def test_settings_do_not_change() -> None:
    """Frozen: what was validated is what runs."""
    settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.server.port = 7  # type: ignore[misc]


def test_an_engine_leaves_one_core_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores less one, at least 1; a number in the file is taken as it is."""
    for cores, threads in ((16, 15), (2, 1), (1, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert load_settings().engine.num_threads == threads
    assert parse_settings("[engine]\nthreads = 5", source="x").engine.num_threads == 5


def test_kv_is_whole_blocks() -> None:
    """1,000 tokens are 62 blocks of 16 and a rest that no block has."""
    assert parse_settings("[engine]\nkv_tokens = 1000", source="x").engine.num_blocks == 62
    assert parse_settings("[engine]\nswap_tokens = 100", source="x").engine.num_swap_blocks == 6


def test_simulated_costs_become_a_cost_model() -> None:
    """Seconds in the file, nanoseconds inside."""
    text = (
        "[engine.simulated]\nt0_s = 0.02\nprefill_token_s = 0.0001\n"
        "decode_s = 0.0002\npair_s = 0.0\nkv_token_s = 0.000002\n"
    )
    model = parse_settings(text, source="x").engine.simulated.cost_model()
    assert model.t0_ns == pytest.approx(20_000_000)
    assert model.prefill_ns == pytest.approx(100_000)
    assert model.decode_ns == pytest.approx(200_000)
    assert model.pair_ns == 0
    assert model.kv_ns == pytest.approx(2000)
    assert model.margin == 1
