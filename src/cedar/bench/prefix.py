"""A prompt that was read once: cold prefill, resume from disk and hit in memory; and bytes on disk.

Called by `cedar bench prefix`. The three are timed turn by turn in one process, each from the arrival
of a request to its first token. The bytes are file sizes after a conversation that was really run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cedar.bench.measure import Ratio, check_rounds, ratio_of, timed
from cedar.bench.offline import random_prompt
from cedar.cache.store_files import directory_bytes, find_slab
from cedar.config.engine_config import EngineConfig
from cedar.config.flows import flow_config
from cedar.config.model_config import ModelConfig
from cedar.engine.engine import Engine
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.request import Request
from cedar.engine.sampling_params import SamplingParams
from cedar.kernels.operators import Operators
from cedar.loading import from_config

Progress = Callable[[str], None]

#: Hits in memory per turn; one takes too short a time.
_MEMORY_REPEATS = 3


@dataclass(frozen=True)
class PrefixTimes:
    """One prompt, read in three ways.

    Attributes:
        tokens: of the prompt.   cached_tokens, replayed_tokens: of a hit.
        read_bytes: payloads read from disk for one resume.
        disk, memory: a = resume, b = cold prefill; `speedup` is how many times faster the hit is.
    """

    tokens: int
    cached_tokens: int
    replayed_tokens: int
    read_bytes: int
    disk: Ratio
    memory: Ratio

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "tokens": self.tokens, "cached_tokens": self.cached_tokens,
            "replayed_tokens": self.replayed_tokens, "read_bytes": self.read_bytes,
            "cold_seconds": self.disk.b_seconds, "rounds": self.disk.rounds,
            "disk": _part(self.disk), "memory": _part(self.memory),
        }  # fmt: skip


@dataclass(frozen=True)
class ConversationBytes:
    """File sizes of the store after one conversation.

    Attributes:
        tokens: stored or not, all turns together.
        rows: shared rows only, as cedar stores by default.
        with_windows: shared rows, and windows at the end of every prompt and answer.
        baseline: the same model without sharing: rows of every layer, and windows.
    """

    turns: int
    tokens: int
    rows: int
    with_windows: int
    baseline: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "turns": self.turns, "tokens": self.tokens, "bytes": self.rows,
            "bytes_with_windows": self.with_windows, "bytes_baseline": self.baseline,
            "over_with_windows": self.rows / self.with_windows,
            "over_baseline": self.rows / self.baseline,
        }  # fmt: skip


def run_prefix(
    model: LoadedModel, directory: Path, *, tokens: int, rounds: int, progress: Progress
) -> PrefixTimes:
    """Time one prompt cold, from disk and from memory.

    Args:
        directory: of the store; new or empty, on the disk to measure.
        rounds: at least 5, after one discarded of each.
    """
    check_rounds(rounds)
    prompt = random_prompt(tokens, model.config.vocab_size)[0].tolist()
    engine = _engine(model, directory, tokens + 1, sequences=2, copies=rounds + 3)
    assert engine.tier is not None
    number = itertools.count(1)
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)

    def read(salt: bytes) -> Request:
        return _finish(engine, f"r{next(number)}", prompt, params, salt)

    def forget() -> None:
        engine.pool.forget_all()
        engine.windows.forget_all()

    def cold() -> float:
        seconds = timed(lambda: read(b"cold %d" % next(number)))
        _settle(engine)
        return seconds

    def from_disk() -> float:
        forget()
        _forget_pages(directory)
        return timed(lambda: read(b""))

    def from_memory() -> float:
        return timed(lambda: [read(b"") for _ in range(_MEMORY_REPEATS)]) / _MEMORY_REPEATS

    try:
        progress(f"cold prefill of {tokens:,} tokens, {rounds + 1} times")
        read(b"")
        _settle(engine)
        before = engine.tier.stats().read_bytes
        forget()
        resumed = read(b"")
        read_bytes = engine.tier.stats().read_bytes - before
        again = read(b"")
        _check(resumed, again)
        times: dict[str, list[float]] = {"cold": [], "disk": [], "memory": []}
        for turn in range(rounds):
            # The hit in memory follows the resume that brought its rows there; cold changes sides.
            if turn % 2 == 0:
                times["cold"].append(cold())
            times["disk"].append(from_disk())
            times["memory"].append(from_memory())
            if turn % 2:
                times["cold"].append(cold())
            progress(f"round {turn + 1} of {rounds}: " + ", ".join(
                f"{name} {taken[-1]:.3f} s" for name, taken in times.items()
            ))  # fmt: skip
    finally:
        engine.close()
    return PrefixTimes(
        tokens, resumed.cached_tokens, resumed.replayed_tokens, read_bytes,
        ratio_of(times["disk"], times["cold"]), ratio_of(times["memory"], times["cold"]),
    )  # fmt: skip


def conversation_bytes(
    config: ModelConfig, ops: Operators, directory: Path, *, turns: int, turn_tokens: int,
    answer_tokens: int, progress: Progress,
) -> ConversationBytes:  # fmt: skip
    """Run one conversation on the model and on the same model without sharing; measure the files.

    Every turn appends new tokens, as tool output does, and then an answer. The first store's model
    generates the answers. For the other two the same conversation is read again, each turn to the
    end of its prompt and then to the end of its answer: as many blocks and window states as if they
    had been generated, in a third of the time.

    Args:
        turn_tokens: new tokens and answer of a turn.   answer_tokens: those of the answer.
    """
    sizes: dict[str, int] = {}
    answers: list[list[int]] = []
    for name, flow, windows in (
        ("rows", "ced+csa2", False), ("with_windows", "ced+csa2", True), ("baseline", "none", True)
    ):  # fmt: skip
        progress(f"conversation of {turns} turns: {name}")
        model = from_config(flow_config(config, flow), ops=ops)  # type: ignore[arg-type]
        engine = _engine(
            model, directory / name, turns * turn_tokens, sequences=1, copies=2, windows=windows,
            boundaries=2 * turns,
        )  # fmt: skip
        try:
            for turn, said in enumerate(
                _converse(engine, turns, turn_tokens, answer_tokens, answers)
            ):
                answers[turn:] = [said]
                if turn % 5 == 4:
                    progress(f"turn {turn + 1} of {turns}")
            _check_kept(engine)
        finally:
            engine.close()
        sizes[name] = directory_bytes(directory / name)
    return ConversationBytes(turns, turns * turn_tokens, **sizes)


def _converse(
    engine: Engine, turns: int, turn_tokens: int, answer_tokens: int, answers: Sequence[list[int]]
) -> Iterator[list[int]]:
    """Run the turns and give the answer of each; the first ones may be known."""
    generate = SamplingParams(max_tokens=answer_tokens, temperature=0, ignore_eos=True)
    read = replace(generate, max_tokens=1)
    said: list[int] = []
    for turn in range(turns):
        new = random_prompt(turn_tokens - answer_tokens, engine.model.config.vocab_size, turn)
        said = [*said, *new[0].tolist()]
        if turn < len(answers):
            _finish(engine, f"prompt {turn}", said, read, b"")
            answer = answers[turn]
            _finish(engine, f"answer {turn}", [*said, *answer], read, b"")
        else:
            answer = _finish(engine, f"turn {turn}", said, generate, b"").output_ids
        said = [*said, *answer]
        _settle(engine)
        yield answer


def _check_kept(engine: Engine) -> None:
    """Bytes are those of a conversation only if the store took all of it."""
    assert engine.tier is not None
    stats = engine.tier.stats()
    lost = {reason: n for reason, n in stats.dropped.items() if reason != "stored_already"}
    if lost or stats.evicted:
        raise RuntimeError(f"the store dropped {lost} and evicted {stats.evicted} records")


def _engine(
    model: LoadedModel, directory: Path, length: int, *, sequences: int, copies: int,
    windows: bool = False, boundaries: int = 0,
) -> Engine:  # fmt: skip
    """An engine with a store that nothing is ever evicted from.

    Args:
        length: tokens of a sequence.   sequences: kept in memory.   copies: kept on disk.
        boundaries: window states kept on disk.
    """
    config = model.config
    block_size = 128 // config.plan.ratio_lcm * config.plan.ratio_lcm
    fields: dict[str, Any] = {
        "max_model_len": length, "max_num_seqs": 1, "block_size": block_size,
        "num_blocks": sequences * (length // block_size + 2),
    }  # fmt: skip
    probe = Engine(model, EngineConfig(**{**fields, "num_blocks": 1, "max_model_len": block_size}))
    state = probe.runner.state
    slot = state.pool.block_bytes + 8192
    # A state fills whole slots.
    state_bytes = state.rings.nbytes + slot if windows else 0
    room = copies * (length // block_size + 1) * slot + 2 * boundaries * state_bytes
    return Engine(
        model,
        EngineConfig(
            **fields, prefix_store_dir=str(directory), prefix_store_windows=windows,
            prefix_store_size=2 * room + (64 << 20),
        ),
    )  # fmt: skip


def _finish(
    engine: Engine, name: str, prompt: list[int], params: SamplingParams, salt: bytes
) -> Request:
    request = engine.add_request(name, prompt, params, cache_salt=salt)
    while engine.has_work:
        engine.step()
    return request


def _settle(engine: Engine) -> None:
    """Wait until the store has written everything, so that no later time contains it."""
    assert engine.tier is not None
    engine.tier.writer.flush()


def _forget_pages(directory: Path) -> None:
    """Ask the kernel to drop the slab from its page cache: the next read comes from the disk."""
    found = find_slab(directory)
    assert found is not None
    fd = os.open(found[0], os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _check(resumed: Request, again: Request) -> None:
    """What is timed must be what it is called, and both hits must say the same."""
    if resumed.cached_tokens != resumed.disk_tokens or not resumed.cached_tokens:
        raise RuntimeError("the prompt did not come back from disk; is it longer than the window?")
    if again.disk_tokens or again.cached_tokens != resumed.cached_tokens:
        raise RuntimeError("the prompt did not come back from memory")
    if again.output_ids != resumed.output_ids:
        raise RuntimeError(f"memory says {again.output_ids}, disk says {resumed.output_ids}")


def _part(ratio: Ratio) -> dict[str, Any]:
    return {
        "seconds": ratio.a_seconds, "over_cold": 1 / ratio.speedup,
        "over_cold_quartiles": [1 / ratio.high, 1 / ratio.low],
    }  # fmt: skip
