"""Which files of a model folder are the model."""

import shutil
from pathlib import Path

from cloud.engine.errors import CheckpointError

__all__ = ["MODEL_FILES", "add_files"]

# Data alone: weights as safetensors, settings as JSON, the template, the licence.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "LICENSE*",
)


def add_files(source: Path, folder: Path, *, by_link: bool = False) -> None:
    """Copies the model's files from `source` to `folder`, and nothing else.

    Args:
        source: a Hugging Face folder; links in it are followed.
        folder: exists already.
        by_link: make symbolic links instead of copies. The model then lasts only
            as long as its source.

    Raises:
        CheckpointError: there is no such folder.
        OSError: a file cannot be read or written.
    """
    if not source.is_dir():
        raise CheckpointError(source, "no such folder; expected a Hugging Face checkpoint")
    for pattern in MODEL_FILES:
        for path in source.glob(pattern):
            if by_link:
                (folder / path.name).symlink_to(path.resolve())
            else:
                shutil.copyfile(path, folder / path.name)
