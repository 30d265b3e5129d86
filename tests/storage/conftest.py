"""Fixtures of the storage tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: for thousands of stores whose disk is simulated."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="cedar-test-", dir=memory))
    yield directory
    shutil.rmtree(directory)
