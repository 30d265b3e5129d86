"""`LLM`: the offline API, in vLLM's shape. Joins the engine (token ids) with text.

Called by user programs, the CLI and benchmarks.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from cedar.cache.hashing import KEY_BYTES
from cedar.cache.store_files import check_usable
from cedar.config.engine_config import EngineConfig
from cedar.config.modes import IndexKeyRule
from cedar.engine.engine import Engine
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.output import Logprob, StepOutput
from cedar.engine.request import FinishReason
from cedar.engine.sampling_params import SamplingParams
from cedar.errors import RequestError, UsageError
from cedar.loading import load, prefix_root
from cedar.model_directory import end_token, find_tokenizer
from cedar.text.completion import CompletionText
from cedar.text.tokenizer import Tokenizer
from cedar.units import parse_bytes

Prompt = str | Sequence[int]

_PROMPTS = "pass text or a list of token ids"
_BAD_PARAMS = "sampling_params={!r}; pass a SamplingParams, or a list with one for each prompt"


@dataclass
class CompletionOutput:
    """One completion.

    Attributes:
        index: its number among the `n` of its prompt.
        text, token_ids: the end token is among the ids, not in the text.
        finish_reason: stop or length.   stop_reason: stop string or id that ended it.
        logprobs: per token, when asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[tuple[Logprob, ...]] | None = None


@dataclass
class RequestOutput:
    """All completions of one prompt; `prompt` is None when it was given as ids.

    `num_cached_tokens` of the prompt were taken from the prefix cache, in memory or on disk.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class TextDelta:
    """A piece of one completion while it is generated."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class _Open(NamedTuple):
    """A completion that runs: where its tokens, its text and its deltas go."""

    result: RequestOutput
    completion: CompletionOutput
    text: CompletionText | None
    deltas: deque[TextDelta]


class LLM:
    """A model ready to generate.

    Args:
        model: a directory, `nano`, `preset:NAME`, or a model already loaded.
        tokenizer: by default the model directory's; without one, prompts are token ids.
        kernels, dtype, index_key_rule, seed: as `cedar.load`.
        engine: fields of `EngineConfig` (max_model_len, decoder_prefill, ...); `max_model_len` is at
            most what the model has positions for, also by default; `prefix_store_size` may also be
            a text such as "8GiB", and a `~` in `prefix_store_dir` is the home directory.

    Raises:
        UsageError: an unknown engine field or an impossible combination.
        StoreError: the prefix store cannot be opened, or another process writes it.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        tokenizer: Tokenizer | None = None,
        kernels: str = "auto",
        dtype: str | None = None,
        index_key_rule: IndexKeyRule = "corrected",
        seed: int = 0,
        **engine: Any,
    ) -> None:
        if not isinstance(model, (str, PathLike, LoadedModel)):
            raise UsageError(
                f"model={model!r} is not a model; pass a directory, a name such as 'nano' or "
                f"'preset:tiny', or what cedar.load returned"
            )
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            raise UsageError(
                f"tokenizer={tokenizer!r} is not a Tokenizer; pass Tokenizer.from_directory(DIR) of "
                f"cedar.text.tokenizer, or leave it out to use the model directory's"
            )
        unknown = sorted(engine.keys() - EngineConfig.__dataclass_fields__.keys())
        if unknown:
            allowed = ", ".join(EngineConfig.__dataclass_fields__)
            raise UsageError(f"LLM got unknown option(s) {', '.join(unknown)}; allowed: {allowed}")
        if isinstance(size := engine.get("prefix_store_size"), str):
            engine["prefix_store_size"] = parse_bytes(size, "prefix_store_size")
        place = engine.get("prefix_store_dir")
        if isinstance(place, (str, PathLike)) and str(place):
            engine["prefix_store_dir"] = str(Path(place).expanduser())
        config = EngineConfig(**engine)
        if config.prefix_store_dir is not None:
            check_usable(Path(config.prefix_store_dir))
        if isinstance(model, LoadedModel):
            self.model = model
        else:
            self.model = load(
                model, kernels=kernels, dtype=dtype, index_key_rule=index_key_rule, seed=seed
            )
            if tokenizer is None:
                tokenizer = find_tokenizer(model)
        self.tokenizer = tokenizer
        if "max_model_len" not in engine:
            positions = self.model.config.max_position_embeddings
            config = replace(config, max_model_len=min(config.max_model_len, positions))
        root = bytes(KEY_BYTES)
        if config.prefix_store_dir is not None:
            if isinstance(model, LoadedModel):
                raise UsageError(
                    "prefix_store_dir needs the model by name: the store is bound to the weights on "
                    "disk; pass LLM a directory or a name instead of a loaded model"
                )
            root = prefix_root(model, self.model, config, seed)
        self._run(Engine(self.model, config, root))

    @classmethod
    def over(cls, engine: Engine, tokenizer: Tokenizer | None) -> LLM:
        """The offline API on an engine that is there already, such as a server's between two steps."""
        llm = cls.__new__(cls)
        llm.model, llm.tokenizer = engine.model, tokenizer
        llm._run(engine)
        return llm

    def _run(self, engine: Engine) -> None:
        self.engine = engine
        self._count = 0
        self._open: dict[str, _Open] = {}

    def close(self) -> None:
        """Finish writing to the prefix store, if there is one, and end; nothing runs from then on."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text."""
        return end_token(self.tokenizer, self.model.config)

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt; text gets the begin-of-sequence id in front, and empty text is that alone.

        Raises:
            UsageError, RequestError: as `encode_prompt`.
        """
        return encode_prompt(prompt, self.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt, batched; results in the order of the prompts.

        Args:
            prompts: one or several texts or token id lists.
            sampling_params: one for all prompts, or one per prompt.
        """
        batch = _as_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(batch)
        elif isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str):
            params = list(sampling_params)
        else:
            raise UsageError(_BAD_PARAMS.format(sampling_params))
        if len(params) != len(batch):
            raise UsageError(f"got {len(params)} sampling_params for {len(batch)} prompts")
        results: list[RequestOutput] = []
        names: set[str] = set()
        unread: deque[TextDelta] = deque(maxlen=0)
        try:
            for prompt, chosen in zip(batch, params, strict=True):
                results.append(self._add(prompt, chosen, unread, names))
            while not names.isdisjoint(self._open):
                self._step()
        finally:
            self._abort(names)
        for result in results:
            result.finished = True
        return results

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[TextDelta]:
        """Generate for one prompt, giving text as it becomes final.

        Several streams, and `generate`, may take turns on one thread: whichever is read moves all of
        them on. A stream that is closed or dropped before its end gives its blocks back.

        Args:
            progress: called after each step that reads the prompt, with its tokens read so far.
        """
        deltas: deque[TextDelta] = deque()
        names: set[str] = set()
        try:
            result = self._add(prompt, sampling_params, deltas, names)
            is_read = progress is None
            while deltas or not names.isdisjoint(self._open):
                if not deltas:
                    self._step()
                    if progress is not None and not is_read:
                        is_read = bool(result.outputs[0].token_ids)
                        progress(self._tokens_read(result))
                while deltas:
                    yield deltas.popleft()
        finally:
            self._abort(names)

    def _add(
        self, prompt: Prompt, params: SamplingParams, deltas: deque[TextDelta], names: set[str]
    ) -> RequestOutput:
        """Queue the completions of a prompt; their request ids are added to `names`."""
        if not isinstance(params, SamplingParams):
            raise UsageError(_BAD_PARAMS.format(params))
        ids = self.encode(prompt)
        request_id = f"req-{self._count}"
        self._count += 1
        shown = prompt if isinstance(prompt, str) else None
        result = RequestOutput(request_id, shown, ids, [])
        if params.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer; use stop_token_ids")
        for index in range(params.n):
            name = f"{request_id}-{index}"
            self.engine.add_request(name, ids, params, eos_token_id=self.eos_token_id, index=index)
            completion = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
            text = None if self.tokenizer is None else CompletionText(self.tokenizer, params.stop)
            self._open[name] = _Open(result, completion, text, deltas)
            names.add(name)
            result.outputs.append(completion)
        return result

    def _step(self) -> None:
        """Run one step; whatever it gave goes to whoever asked for it."""
        for output in self.engine.step():
            self._take(output)

    def _tokens_read(self, result: RequestOutput) -> int:
        """Prompt tokens that the first completion has read; all of them once it has drawn one."""
        request = self.engine.find(f"{result.request_id}-0")
        if request is None or result.outputs[0].token_ids:
            return len(result.prompt_token_ids)
        return request.read

    def _abort(self, names: set[str]) -> None:
        for name in names:
            self._open.pop(name, None)
            self.engine.abort(name)

    def _take(self, output: StepOutput) -> None:
        name = output.request.request_id
        opened = self._open[name]
        completion, text = opened.completion, opened.text
        if completion.index == 0 and not completion.token_ids:
            opened.result.num_cached_tokens = output.request.cached_tokens
        delta = ""
        ids: tuple[int, ...] = ()
        if output.token_id is not None:
            ids = (output.token_id,)
            completion.token_ids.append(output.token_id)
            if completion.logprobs is not None and output.logprobs is not None:
                completion.logprobs.append(output.logprobs)
            ended = output.finish_reason is FinishReason.STOP
            if text is not None and not ended:
                delta = text.push(output.token_id)
        reason = output.finish_reason
        if text is not None and text.stop_reason is not None:
            completion.stop_reason, reason = text.stop_reason, FinishReason.STOP
            self.engine.abort(name)
        elif reason is not None:
            delta += "" if text is None else text.finish()
            completion.stop_reason = output.request.stop_token
            if text is not None and text.stop_reason is not None:
                completion.stop_reason, reason = text.stop_reason, FinishReason.STOP
        completion.text += delta
        completion.finish_reason = None if reason is None else reason.value
        opened.deltas.append(TextDelta(completion.index, delta, ids, completion.finish_reason))
        if reason is not None:
            del self._open[name]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Ids of a prompt; text gets the begin-of-sequence id in front, and empty text is that alone.

    Raises:
        UsageError: text was given but there is no tokenizer.
        RequestError: it is neither text nor a list of token ids, is empty text with no such id, or
            holds half of a surrogate pair.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UsageError(
                f"the prompt is text, {prompt[:40]!r}, but this model has no tokenizer; pass token "
                "ids (--prompt-ids 1,2,3 on the command line)"
            )
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt has half of a surrogate pair, {prompt[error.start]!r}, at character "
                f"{error.start}, which no UTF-8 text has; pass valid Unicode",
                param="prompt",
            ) from None
        encoded = tokenizer.encode(prompt, add_special_tokens=True)
        if not encoded:
            raise RequestError(
                f"the prompt {prompt!r} has no tokens, and this model's tokenizer has no "
                f"begin-of-sequence id to start from; pass some text",
                param="prompt",
            )
        return encoded
    if not _is_many(prompt):
        raise RequestError(f"the prompt is {prompt!r}; {_PROMPTS}", param="prompt")
    ids = []
    for token in prompt:
        try:
            if isinstance(token, bool):
                raise TypeError
            ids.append(operator.index(token))
        except TypeError:
            message = f"the prompt has {token!r} among its ids; {_PROMPTS}"
            raise RequestError(message, param="prompt") from None
    return ids


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_many(prompts):
        raise RequestError(f"prompts={prompts!r}; {_PROMPTS}, or a list of them", param="prompt")
    items = list(prompts)
    if items and not any(isinstance(item, str) or _is_many(item) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _is_many(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray, Mapping))
