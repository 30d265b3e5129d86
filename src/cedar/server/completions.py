"""`POST /v1/completions`: texts or token ids in, their continuations out; with `echo` and prompt
log-probabilities, which evaluation harnesses score answers with.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cedar.engine.output import Logprob
from cedar.server import responses as out
from cedar.server.completion import Completion, Piece
from cedar.server.protocol import CompletionBody, prompts_of, read_body, refuse_best_of
from cedar.server.service import Call, Service
from cedar.server.sse import DONE, KEEP_ALIVE, EventStream, event, unless_disconnected
from cedar.server.token_text import FLOOR, TokenText

#: OpenAI's and vLLM's default.
DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> Response:
    """Continue prompts."""
    service: Service = request.app.state.service
    body = await read_body(request, CompletionBody)
    service.check_model(body.model)
    refuse_best_of(body)
    call, choices = await _open(service, body)
    if body.stream:
        return EventStream(_stream(service, body, call, choices), call.close)
    try:
        return await unless_disconnected(request.receive, _whole(service, body, call, choices))
    finally:
        call.close()


@dataclass
class _Choice:
    """One choice and what has been said of it."""

    completion: Completion
    echoed: str | None
    names: TokenText
    hidden_ids: Collection[int] = ()
    offset: int = 0
    has_begun: bool = False
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: out.TextLogprobs | None = None
    end: Piece = field(default_factory=lambda: Piece(""))

    def opening(self, body: CompletionBody) -> tuple[str, out.TextLogprobs | None]:
        """The echoed prompt with its log-probabilities, once, before the first token."""
        if self.has_begun:
            return "", None
        self.has_begun = True
        if self.echoed is None:
            return "", None
        request = self.completion.request
        if body.logprobs is None:
            self.offset += len(self.echoed)
            return self.echoed, None
        return self.echoed, self.describe(request.prompt_ids, request.prompt_logprobs)

    def describe(
        self, ids: Sequence[int], entries: Sequence[tuple[Logprob, ...] | None]
    ) -> out.TextLogprobs:
        """Log-probabilities of tokens; offsets go on from the tokens before."""
        described = out.TextLogprobs([], [], [], [])
        for token_id, entry in zip(ids, entries, strict=True):
            described.text_offset.append(self._place(token_id))
            described.tokens.append(self.names.name(token_id))
            described.token_logprobs.append(None if entry is None else _shown(entry[0]))
            described.top_logprobs.append(None if entry is None else _top(entry, self.names))
        return described

    def _place(self, token_id: int) -> int:
        """Where a token's text begins; `offset` moves behind it."""
        content = b"" if token_id in self.hidden_ids else self.names.content(token_id) or b""
        starts = [byte & 0xC0 != 0x80 for byte in content]  # bytes that begin a character
        place = self.offset - (0 if not starts or starts[0] else 1)
        self.offset += sum(starts)
        return place


async def _open(service: Service, body: CompletionBody) -> tuple[Call, list[_Choice]]:
    """Encode, check and queue every prompt."""
    prompts = prompts_of(body.prompt)
    special = body.add_special_tokens is not False
    ids = [
        await service.encode(prompt, special) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = body.sampling(
        service.defaults, max_tokens=1 if _echo_only(body) else asked, logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )  # fmt: skip
    call = service.open(ids, params, "cmpl", cache_salt=body.cache_salt)
    skips = body.skip_special_tokens is not False
    hidden = service.tokenizer.control_ids if skips and service.tokenizer is not None else ()
    choices = []
    for index, request in enumerate(call.requests):
        text = service.new_text(params.stop, skip_special_tokens=skips)
        completion = Completion(
            request, index, text, silent_ids=(), stop_ids=params.stop_token_ids,
            metrics=service.metrics,
        )  # fmt: skip
        call.add(completion)
        prompt, echoed = prompts[index // call.n], None
        if body.echo:
            echoed = prompt if isinstance(prompt, str) else _decoded(service, prompt)
        choices.append(_Choice(completion, echoed, service.token_text, hidden))
    return call, choices


def _echo_only(body: CompletionBody) -> bool:
    """Whether only the prompt is wanted: one token is drawn and not shown."""
    return bool(body.echo) and body.max_tokens == 0


def _decoded(service: Service, ids: Sequence[int]) -> str:
    return "" if service.tokenizer is None else service.tokenizer.decode(ids)


def _take(
    choice: _Choice, body: CompletionBody, piece: Piece
) -> tuple[str, out.TextLogprobs | None, tuple[int, ...]]:
    """Text, log-probabilities and ids that a piece adds to a choice, the echo included."""
    text, logprobs = choice.opening(body)
    if _echo_only(body):
        choice.completion.num_tokens = 0
        return text, logprobs, ()
    if piece.logprobs is not None:
        own = choice.describe(piece.token_ids, [piece.logprobs])
        logprobs = own if logprobs is None else _joined(logprobs, own)
    elif body.logprobs is None:
        choice.offset += len(piece.text)
    return text + piece.text, logprobs, piece.token_ids


async def _whole(
    service: Service, body: CompletionBody, call: Call, choices: list[_Choice]
) -> Response:
    while call.stream.open_ids:
        for index, piece in await call.next():
            choice = choices[index]
            text, logprobs, ids = _take(choice, body, piece)
            choice.text += text
            choice.ids += ids
            if logprobs is not None:
                before = choice.logprobs
                choice.logprobs = logprobs if before is None else _joined(before, logprobs)
            if piece.finish_reason is not None:
                choice.end = piece
    shown = [
        _choice(body, choice, choice.text, choice.logprobs, choice.ids, choice.end)
        for choice in choices
    ]
    document = _document(service, call, shown)
    document.usage, document.cedar = call.usage(), call.reading()
    return out.json_response(document)


async def _stream(
    service: Service, body: CompletionBody, call: Call, choices: list[_Choice]
) -> AsyncGenerator[bytes, None]:
    document = _document(service, call, [])
    while call.stream.open_ids:
        pieces = await call.next(service.config.keep_alive_seconds)
        if not pieces:
            yield KEEP_ALIVE
        events = b""
        for index, piece in pieces:
            choice = choices[index]
            is_first = not choice.has_begun
            text, logprobs, ids = _take(choice, body, piece)
            if not (piece.finish_reason or text or logprobs or body.return_token_ids):
                continue
            document.choices = [_choice(body, choice, text, logprobs, ids, piece, is_first)]
            if body.include_usage:
                document.usage = call.usage() if body.continuous_usage else None
            tells = piece.finish_reason is not None or (is_first and body.echo)
            document.cedar = call.reading() if tells else out.UNSET
            events += event(document)
        if events:
            yield events
    if body.include_usage:
        document.choices, document.usage, document.cedar = [], call.usage(), call.reading()
        yield event(document)
    yield DONE


def _choice(
    body: CompletionBody, choice: _Choice, text: str, logprobs: out.TextLogprobs | None,
    ids: Sequence[int], piece: Piece, is_first: bool = True,
) -> out.TextChoice:  # fmt: skip
    request, wants_ids = choice.completion.request, bool(body.return_token_ids)
    return out.TextChoice(
        choice.completion.index, text, logprobs, piece.finish_reason,
        piece.stop_reason if piece.finish_reason is not None else out.UNSET,
        list(ids) if wants_ids else out.UNSET,
        list(request.prompt_ids) if wants_ids and is_first else out.UNSET,
    )  # fmt: skip


def _document(service: Service, call: Call, choices: list[Any]) -> out.Document:
    return out.Document(
        call.id, "text_completion", call.created, service.name, service.fingerprint, choices
    )


def _shown(entry: Logprob) -> float:
    return max(entry.logprob, FLOOR)


def _top(entries: tuple[Logprob, ...], names: TokenText) -> dict[str, float]:
    """The likely tokens and the token itself, as OpenAI and vLLM list them."""
    top = {names.name(entry.token_id): _shown(entry) for entry in entries[1:]}
    top.setdefault(names.name(entries[0].token_id), _shown(entries[0]))
    return top


def _joined(first: out.TextLogprobs, second: out.TextLogprobs) -> out.TextLogprobs:
    return out.TextLogprobs(
        first.text_offset + second.text_offset, first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens, first.top_logprobs + second.top_logprobs,
    )  # fmt: skip
