"""A process that fills a store until it is killed: `writing_process.py DIR SEED LIMIT STEP`.

STEP > 0 makes it kill itself at that system call, after half of a write has been done; 0 leaves that
to the parent. On stdout: "ready", then one line per put with the blocks that were acknowledged.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from store_cases import WatchedFiles, chain, open_store, window


class KilledFiles(WatchedFiles):
    """Files of a process that ends with SIGKILL at its `step`-th changing call."""

    def __init__(self, step: int) -> None:
        super().__init__(self._kill)
        self.step = step

    def _kill(self, name: str, number: int) -> None:
        if number == self.step and name != "write":
            os.kill(os.getpid(), signal.SIGKILL)

    def write_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        if len(self.calls) + 1 == self.step:
            os.pwritev(fd, [parts[0], parts[1][: len(parts[1]) // 2]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_at(fd, parts, offset)


def main(directory: Path, seed: int, limit: int, step: int) -> None:
    rng = random.Random(seed)
    with open_store(directory, limit=limit, files=KilledFiles(step)) as store:
        print("ready", flush=True)
        while True:
            number, length = rng.randrange(12), rng.randrange(1, 20)
            records = [*chain(number, length), window(number, length - 1)]
            store.put_many(records)
            there = store.contains_many([r.key for r in records[:-1]])
            print(number, sum(there), flush=True)
            if rng.random() < 0.2:
                store.delete([records[-1].key], kind=records[-1].kind)
            if rng.random() < 0.1:
                store.gc()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
