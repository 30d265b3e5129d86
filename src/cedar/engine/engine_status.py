"""What an engine tells about itself, as plain data that crosses processes. No torch.

`Engine` fills it; the server's admission, metrics and live view read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cedar.cache.block_pool import PoolStats
from cedar.config.engine_config import EngineConfig
from cedar.engine.limits import RequestLimits


@dataclass(frozen=True)
class EngineInfo:
    """What never changes while an engine lives.

    Attributes:
        limits: what it can run.   block_bytes: of one KV block.
        decoder_prefill: the mode that runs.   has_store: whether prefixes are kept on disk.
    """

    limits: RequestLimits
    block_bytes: int
    decoder_prefill: str
    has_store: bool

    @property
    def config(self) -> EngineConfig:
        """Sizes and modes."""
        return self.limits.config


class EngineCounts(NamedTuple):
    """Counts at one moment; cheap enough to be taken after every step.

    `submitted` is the number of requests that have ever reached the engine.
    """

    running: int
    waiting: int
    total_blocks: int
    free_blocks: int
    preemptions: int
    submitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """The prefix store now, and what happened since it was opened.

    Attributes:
        limit_bytes, bytes_on_disk: the most all its files may take, and what they take.
        records, records_set_aside: good ones, and bad ones that wait for their space to be needed.
        lookups: requests whose prompt went on beyond memory.   hits: those that got a block.
        read_bytes, written_bytes: payloads, without headers.
        written, evicted: records.
        dropped, misses, damaged, errors: records that were not written, reads that gave nothing,
            records set aside, failed calls; each by reason, as in docs/prefix-cache.md.
    """

    limit_bytes: int
    bytes_on_disk: int
    records: int
    records_set_aside: int
    lookups: int
    hits: int
    read_bytes: int
    written_bytes: int
    written: int
    evicted: int
    dropped: Mapping[str, int]
    misses: Mapping[str, int]
    damaged: Mapping[str, int]
    errors: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request that runs or waits: counts only, never a prompt or an answer.

    Attributes:
        status: of `RequestStatus`.   read_tokens: prompt tokens read in this run.
        arrival: monotonic seconds.
    """

    request_id: str
    status: str
    prompt_tokens: int
    read_tokens: int
    cached_tokens: int
    disk_tokens: int
    completion_tokens: int
    max_tokens: int
    preemptions: int
    arrival: float


@dataclass(frozen=True)
class EngineDetails:
    """What metrics and the live view show beyond the counts.

    Attributes:
        encode_tokens, replay_tokens, decode_tokens: rows through each phase so far.
        pool: blocks by state.   window_bytes: windows kept beside them.
        disk: the prefix store, None without one.
        requests: running ones first.
    """

    encode_tokens: int
    replay_tokens: int
    decode_tokens: int
    pool: PoolStats
    window_bytes: int
    disk: DiskStats | None
    requests: tuple[RequestRow, ...]
