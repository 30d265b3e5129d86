"""Training checkpoints: one file, written atomically, holding everything a run needs to go on.

Not the released format (see `export.py`): float32 masters, optimiser state, data position, random
state. Called by `trainer.py`.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from cedar.errors import CheckpointError

FILE_NAME = "training.pt"


def save_training_state(directory: Path, state: dict[str, Any]) -> Path:
    """Write `training.pt`; a crash at any moment leaves the old or the new file, never a part."""
    directory.mkdir(parents=True, exist_ok=True)
    target, temporary = directory / FILE_NAME, directory / f".{FILE_NAME}.tmp"
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)
    return target


def load_training_state(directory: Path) -> dict[str, Any]:
    """Read `training.pt`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        raise CheckpointError(f"no training checkpoint {path}; start without --resume")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).split(".")[0]
        raise CheckpointError(
            f"{path} cannot be read ({reason}); start without --resume"
        ) from error
    if not isinstance(state, dict) or "model" not in state:
        raise CheckpointError(f"{path} is not a training checkpoint; start without --resume")
    return state
