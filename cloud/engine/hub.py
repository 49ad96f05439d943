"""Model folders from the Hugging Face hub, through its own library."""

import errno
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from cloud.engine.fetch import FetchError
from cloud.engine.model_files import MODEL_FILES

__all__ = ["download_folder"]


def download_folder(repo_id: str, folder: Path, *, revision: str | None = None) -> str:
    """Downloads what a checkpoint folder needs, and nothing that is a program.

    Args:
        repo_id: "owner/name". A token for gated models is taken from where the
            hub's own tools keep it.
        folder: where to.
        revision: branch, tag or commit; None is the newest.

    Returns:
        The commit that was downloaded.

    Raises:
        FetchError: it could not be had.
        OSError: `folder` is on a full disk.
    """
    try:
        info = huggingface_hub.HfApi().model_info(repo_id, revision=revision, timeout=20)
        huggingface_hub.snapshot_download(
            repo_id, revision=info.sha, allow_patterns=list(MODEL_FILES), local_dir=folder
        )
    except GatedRepoError as error:
        raise FetchError(
            f"{repo_id}: its owner grants access on request; ask for it on the hub, "
            "then run: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise FetchError(
            f"{repo_id}: the hub has no such model, or not for you; check its name"
        ) from error
    except RevisionNotFoundError as error:
        raise FetchError(f"{repo_id}: the hub has no revision {revision!r} of it") from error
    except Exception as error:
        # Each version of the library has another transport with errors of its own.
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise FetchError(
            f"{repo_id}: the model hub could not be read ({line}). Check the network, or pull "
            "the model's folder from a disk: headway model pull PATH"
        ) from error
    return info.sha or "unknown"
