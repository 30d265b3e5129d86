"""`running`: `cedar serve` as a process of its own, on a free port. Used by the tests of this directory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 120


@contextmanager
def running(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its URL, which its one line of output gives."""
    command = [sys.executable, "-m", "cedar", "serve", str(model), "--port", "0", "--dtype",
               "float32", "--block-size", "8", "--max-num-seqs", "4", *options]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CEDAR_API_KEY": "sesame"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment)  # fmt: skip
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, process.stderr.read()
        yield process, line.split()[-1]
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()
