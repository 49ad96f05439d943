"""The store holds complete models and nothing else."""

import errno
from pathlib import Path

import filelock
import pytest

from cloud.engine.errors import CheckpointError
from cloud.engine.manifest import Manifest, PromptTest, StoredFile, sha256_of
from cloud.engine.store import (
    ModelStore,
    StoreError,
    is_model_name,
    resolve_model,
)
from headway.cache import default_cache_dir

# FIPS 180-2, appendix B.1.
SHA256_OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def _manifest() -> Manifest:
    files = {"config.json": StoredFile(3, SHA256_OF_ABC)}
    return Manifest("folder:/somewhere", 7, "bfloat16", files, PromptTest())


def _add(store: ModelStore, name: str) -> None:
    with store.adding(name) as staging:
        (staging.folder / "config.json").write_bytes(b"abc")
        staging.keep(_manifest())


def _leftovers(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir() if path.name != ".lock"]


def test_a_model_that_was_kept_is_found_by_its_name(tmp_path: Path) -> None:
    """With all that was noted of it."""
    store = ModelStore(tmp_path)
    _add(store, "owner/Small-1.5")
    assert store.names() == ["owner/Small-1.5"]
    assert store.manifest("owner/Small-1.5") == _manifest()
    folder = resolve_model("owner/Small-1.5", tmp_path)
    assert (folder / "config.json").read_bytes() == b"abc"
    assert _leftovers(tmp_path) == [folder.name]


def test_looking_into_a_store_creates_nothing(tmp_path: Path) -> None:
    """A server that only asks leaves no trace."""
    cache = tmp_path / "cache"
    assert ModelStore(cache).names() == []
    assert ModelStore(cache).manifest("small") is None
    assert not cache.exists()


@pytest.mark.parametrize("failure", [ValueError("bug"), KeyboardInterrupt()])
def test_a_pull_that_fails_leaves_nothing(tmp_path: Path, failure: BaseException) -> None:
    """However it fails."""

    def fail_half_way() -> None:
        with ModelStore(tmp_path).adding("small") as staging:
            (staging.folder / "model.safetensors").write_bytes(b"half")
            (staging.scratch / "download").write_bytes(b"half")
            raise failure

    with pytest.raises(type(failure)):
        fail_half_way()
    assert _leftovers(tmp_path) == []


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    """With the place, and what is left there."""
    store = ModelStore(tmp_path)
    no_space = OSError(errno.ENOSPC, "No space left on device")
    line = "No space left on device; nothing was kept"
    with pytest.raises(StoreError, match=line), store.adding("small"):
        raise no_space
    line = "1,000,000,000,000 MB are needed; make room"
    with pytest.raises(StoreError, match=line), store.adding("small") as staging:
        staging.require_space(10**18)
    assert _leftovers(tmp_path) == []


def test_what_a_killed_pull_left_goes_with_the_next_one(tmp_path: Path) -> None:
    """A kill cannot clean up after itself."""
    store = ModelStore(tmp_path)
    left = tmp_path / "models" / ".staging-abc" / "model"
    left.mkdir(parents=True)
    (left / "headway.json").write_text("{}")
    assert store.names() == []
    _add(store, "small")
    assert _leftovers(tmp_path) == ["small"]


def test_pulls_into_one_cache_take_turns(tmp_path: Path) -> None:
    """While one is under way nobody else gets in, also from another process."""
    store = ModelStore(tmp_path)
    lock = filelock.FileLock(tmp_path / "models" / ".lock")
    with store.adding("small"), pytest.raises(filelock.Timeout):
        lock.acquire(timeout=0)
    with lock.acquire(timeout=0):
        assert _leftovers(tmp_path) == []


def test_a_model_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    """All of it: no file of the older one stays."""
    store = ModelStore(tmp_path)
    _add(store, "small")
    (store.folder("small") / "older.json").write_text("")
    _add(store, "small")
    assert sorted(p.name for p in store.folder("small").iterdir()) == [
        "config.json",
        "headway.json",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "..",
        ".",
        "",
        "a/../b",
        "/etc",
        "a/b/c",
        "a\\b",
        "a\0b",
        ".hidden",
        "a--b",
        "~",
        "a b",
    ],
)
def test_no_name_leads_out_of_the_store(tmp_path: Path, name: str) -> None:
    """A name is letters, digits, dots, underscores, hyphens, one slash."""
    assert not is_model_name(name)
    with pytest.raises(StoreError, match="cannot be the name"):
        ModelStore(tmp_path / "cache").manifest(name)
    adding = ModelStore(tmp_path / "cache").adding(name)
    with pytest.raises(StoreError, match="cannot be the name"), adding:
        pytest.fail("it was let in")
    assert not (tmp_path / "cache").exists()


def test_the_built_in_models_name_is_taken(tmp_path: Path) -> None:
    """`--model tiny` means another thing."""
    adding = ModelStore(tmp_path).adding("tiny")
    with pytest.raises(StoreError, match="choose another name"), adding:
        pytest.fail("it was let in")


def test_a_name_goes_before_a_folder_and_a_path_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`small` is the pulled one, `./small` the folder here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    assert resolve_model("small", tmp_path / "cache") == Path("small")
    store = ModelStore(tmp_path / "cache")
    _add(store, "small")
    assert resolve_model("small", tmp_path / "cache") == store.folder("small")
    assert resolve_model("./small", tmp_path / "cache") == Path("./small")


def test_an_unknown_model_names_the_nearest(tmp_path: Path) -> None:
    """Or what there is."""
    with pytest.raises(StoreError, match="pulled are: none yet"):
        resolve_model("smol", tmp_path)
    _add(ModelStore(tmp_path), "small")
    with pytest.raises(StoreError, match="did you mean 'small'"):
        resolve_model("smal", tmp_path)


def test_a_file_that_changed_is_named(tmp_path: Path) -> None:
    """One flipped bit; then no file at all."""
    store = ModelStore(tmp_path)
    _add(store, "small")
    folder = store.folder("small")
    _manifest().verify(folder)
    (folder / "config.json").write_bytes(b"abb")
    with pytest.raises(
        CheckpointError, match=r"config\.json: has changed .* expected ba7816bf8f01"
    ):
        _manifest().verify(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        _manifest().verify(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"source": 1}'])
def test_a_damaged_manifest_is_one_clear_line(tmp_path: Path, text: str) -> None:
    """And says how to repair it."""
    store = ModelStore(tmp_path)
    _add(store, "small")
    (store.folder("small") / "headway.json").write_text(text)
    with pytest.raises(CheckpointError, match="pull the model again") as caught:
        store.manifest("small")
    assert "\n" not in caught.value.message


def test_a_manifest_names_files_of_its_own_folder_alone(tmp_path: Path) -> None:
    """A check must not read, and so reveal, what lies elsewhere."""
    store = ModelStore(tmp_path)
    _add(store, "small")
    path = store.folder("small") / "headway.json"
    path.write_text(path.read_text().replace("config.json", "../../secret"))
    with pytest.raises(CheckpointError, match="damaged"):
        store.manifest("small")


def test_sha256_is_that_of_the_standard(tmp_path: Path) -> None:
    """FIPS 180-2, appendix B.1."""
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_of(tmp_path / "abc") == SHA256_OF_ABC


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """HEADWAY_CACHE_DIR, then XDG_CACHE_HOME, then ~/.cache (XDG base directories)."""
    monkeypatch.setenv("HOME", "/home/robot")
    monkeypatch.delenv("HEADWAY_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path("/home/robot/.cache/headway")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/headway")
    monkeypatch.setenv("HEADWAY_CACHE_DIR", "/own")
    assert default_cache_dir() == Path("/own")
