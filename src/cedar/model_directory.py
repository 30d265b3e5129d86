"""The directory behind a MODEL argument, its tokenizer and its end token. No torch, no weights.

Called by `loading`, `LLM`, the CLI and the server, whose own process never loads the weights.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset_names
from cedar.errors import CheckpointError, UsageError
from cedar.text.tokenizer import TOKENIZER_FILE, Tokenizer

PRESET_PREFIX = "preset:"
#: Models that ship with the package, as directories under `assets`.
SHIPPED = ("nano",)

_MODELS = (
    f"pass a model directory in Hugging Face layout, {', '.join(SHIPPED)} (shipped with cedar) or "
    f"preset:NAME (random weights) with NAME one of {', '.join(preset_names())}"
)


def resolve_model(name: str | Path) -> Path:
    """The directory of a model: the one given, or that of a shipped model.

    Raises:
        UsageError: it is no path.   CheckpointError: it does not exist.
    """
    if not isinstance(name, (str, PathLike)) or not str(name):
        raise UsageError(f"model {name!r} is not a name or a path; {_MODELS}")
    directory = Path(name)
    if str(name) in SHIPPED and not directory.is_dir():
        directory = Path(__file__).parent / "assets" / str(name)
    if not directory.is_dir():
        raise CheckpointError(f"model {str(name)!r} is not a directory; {_MODELS}")
    return directory


def find_tokenizer(name: str | Path) -> Tokenizer | None:
    """The tokenizer of a model; None for a preset and for a directory that ships none.

    Raises:
        CheckpointError: the directory does not exist, or its tokenizer is damaged.
    """
    if str(name).startswith(PRESET_PREFIX):
        return None
    directory = resolve_model(name)
    if not (directory / TOKENIZER_FILE).is_file():
        return None
    return Tokenizer.from_directory(directory)


def end_token(tokenizer: Tokenizer | None, config: ModelConfig) -> int | None:
    """The id that ends a text: the tokenizer's, else the config's."""
    if tokenizer is not None and tokenizer.eos_id is not None:
        return tokenizer.eos_id
    return config.eos_token_id
