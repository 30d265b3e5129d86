"""`POST /v1/chat/completions`: messages in, answer with reasoning and tool calls out.

Text goes stop strings -> reasoning -> tool calls, piece by piece, so that a stream and a whole
answer say the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cedar.engine.output import Logprob
from cedar.errors import RequestError
from cedar.server import responses as out
from cedar.server.completion import Completion, Piece
from cedar.server.protocol import ChatBody, read_body
from cedar.server.service import Call, Service
from cedar.server.sse import DONE, KEEP_ALIVE, EventStream, event, unless_disconnected
from cedar.server.token_text import FLOOR, TokenText
from cedar.text.chat_template import starts_in_reasoning
from cedar.text.deepseek_markers import DSML, THINK_CLOSE, THINK_OPEN
from cedar.text.reasoning import ReasoningSplitter
from cedar.text.segments import encode_segments
from cedar.text.tool_calls import ContentDelta, ToolCallParser


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await read_body(request, ChatBody)
    service.check_model(body.model)
    call, choices = _open(service, body)
    if body.stream:
        return EventStream(_stream(service, body, call, choices), call.close)
    try:
        return await unless_disconnected(request.receive, _whole(service, body, call, choices))
    finally:
        call.close()


@dataclass
class _Answer:
    """One choice: its raw completion and the readers of its text."""

    completion: Completion
    splitter: ReasoningSplitter | None
    parser: ToolCallParser | None
    num_calls: int = 0

    def take(self, piece: Piece) -> tuple[str, str, list[out.ToolCall]]:
        """Reasoning, content and calls that a piece completes."""
        reasoning, answer = "", piece.text
        if self.splitter is not None:
            reasoning, answer = self.splitter.push(answer)
            if piece.finish_reason is not None:
                last_reasoning, last_answer = self.splitter.finish()
                reasoning, answer = reasoning + last_reasoning, answer + last_answer
        if self.parser is None:
            return reasoning, answer, []
        events = self.parser.push(answer)
        if piece.finish_reason is not None:
            events += self.parser.finish()
        content = "".join(e.text for e in events if isinstance(e, ContentDelta))
        calls = [
            out.ToolCall(e.id, out.ToolFunction(e.name, e.arguments), index=e.index)
            for e in events
            if not isinstance(e, ContentDelta)
        ]
        self.num_calls += len(calls)
        return reasoning, content, calls

    def finish_reason(self, piece: Piece) -> str | None:
        """OpenAI's reason: a whole answer that calls tools ended for them."""
        is_call = piece.finish_reason == "stop" and self.num_calls and piece.stop_reason is None
        return "tool_calls" if is_call else piece.finish_reason


def _open(service: Service, body: ChatBody) -> tuple[Call, list[_Answer]]:
    """Render, check and queue a conversation."""
    template, tokenizer = service.template, service.tokenizer
    if template is None or tokenizer is None:
        raise RequestError(f"{service.no_chat}; use /v1/completions", param="messages")
    tools, parses_calls = _tools(body)
    settings = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        settings["reasoning_effort"] = body.reasoning_effort
    continues = bool(body.continue_final_message)
    segments = template.render(
        body.messages, tools=tools, chat_template_kwargs=settings or None,
        continue_final_message=continues,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
    )  # fmt: skip
    ids = encode_segments(segments, tokenizer)
    limit = (
        body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    )
    params = body.sampling(
        service.defaults, max_tokens=service.room(ids) if limit is None else limit,
        logprobs=_top_logprobs(body),
    )  # fmt: skip
    ends = [tokenizer.token_to_id(marker) for marker in template.end_markers]
    end_ids = [i for i in ends if i is not None and i != service.eos_token_id]
    call = service.open([ids], params, "chatcmpl", end_ids=end_ids, cache_salt=body.cache_salt)
    reasons, is_dsml = starts_in_reasoning(segments), template.writes_dsml
    shown = {tokenizer.token_to_id(text) for text in (THINK_OPEN, THINK_CLOSE, DSML)}
    silent = frozenset() if body.skip_special_tokens is False else tokenizer.control_ids - shown
    answers = []
    for index, request in enumerate(call.requests):
        text = service.new_text(params.stop, skip_special_tokens=False)
        completion = Completion(
            request, index, text, silent_ids=silent, stop_ids=params.stop_token_ids,
            metrics=service.metrics,
        )  # fmt: skip
        call.add(completion)
        has_thoughts = reasons or is_dsml or tokenizer.token_to_id(THINK_CLOSE) is not None
        splitter = ReasoningSplitter(reasons) if has_thoughts else None
        answers.append(
            _Answer(completion, splitter, ToolCallParser() if is_dsml and parses_calls else None)
        )
    return call, answers


def _tools(body: ChatBody) -> tuple[list[dict[str, Any]] | None, bool]:
    """Tools to show to the model, and whether its calls are parsed."""
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise RequestError(
            f"response_format.type={kind!r} is not supported; only 'text' is",
            param="response_format",
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise RequestError(
            f"tool_choice={str(body.tool_choice)[:200]!r} is not supported: this version cannot force "
            "a call; use 'auto' (the model decides) or 'none'",
            param="tool_choice",
        )
    if body.tool_choice == "none":
        return None, False
    return body.tools or None, True


def _top_logprobs(body: ChatBody) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        return None
    return body.top_logprobs or 0


async def _whole(service: Service, body: ChatBody, call: Call, answers: list[_Answer]) -> Response:
    content, reasoning = [""] * len(answers), [""] * len(answers)
    calls: list[list[out.ToolCall]] = [[] for _ in answers]
    ids: list[list[int]] = [[] for _ in answers]
    entries: list[list[out.TokenLogprob]] = [[] for _ in answers]
    ends: list[tuple[str | None, str | int | None]] = [(None, None)] * len(answers)
    while call.stream.open_ids:
        for index, piece in await call.next():
            answer = answers[index]
            thought, text, new_calls = answer.take(piece)
            reasoning[index] += thought
            content[index] += text
            calls[index] += [out.ToolCall(c.id, c.function) for c in new_calls]
            ids[index] += piece.token_ids
            if piece.logprobs is not None:
                entries[index].append(_entry(service.token_text, piece.logprobs))
            if piece.finish_reason is not None:
                ends[index] = (answer.finish_reason(piece), piece.stop_reason)
    choices = [
        out.ChatChoice(
            index,
            out.ChatMessage(
                content[index] if content[index] or not calls[index] else None,
                reasoning_content=reasoning[index] or out.UNSET,
                tool_calls=calls[index] or out.UNSET,
            ),
            out.ChatLogprobs(entries[index]) if body.logprobs else None,
            *ends[index],
            token_ids=ids[index] if body.return_token_ids else out.UNSET,
        )
        for index in range(len(answers))
    ]
    document = _document(service, call, "chat.completion", choices)
    document.usage, document.cedar = call.usage(), call.reading()
    return out.json_response(document)


async def _stream(
    service: Service, body: ChatBody, call: Call, answers: list[_Answer]
) -> AsyncGenerator[bytes, None]:
    document = _document(service, call, "chat.completion.chunk", [])
    begun = [False] * len(answers)
    while call.stream.open_ids:
        pieces = await call.next(service.config.keep_alive_seconds)
        if not pieces:
            yield KEEP_ALIVE
        events = b""
        for index, piece in pieces:
            chunk = _chunk(service, body, answers[index], piece, begun)
            if chunk is None:
                continue
            document.choices = [chunk]
            if body.include_usage:
                document.usage = call.usage() if body.continuous_usage else None
            document.cedar = out.UNSET if piece.finish_reason is None else call.reading()
            events += event(document)
        if events:
            yield events
    if body.include_usage:
        document.choices, document.usage, document.cedar = [], call.usage(), call.reading()
        yield event(document)
    yield DONE


def _chunk(
    service: Service, body: ChatBody, answer: _Answer, piece: Piece, begun: list[bool]
) -> out.ChatChunkChoice | None:
    """The chunk of a piece; None when there is nothing to say yet."""
    index = answer.completion.index
    thought, text, calls = answer.take(piece)
    delta = out.ChatDelta(
        content=text or out.UNSET, reasoning_content=thought or out.UNSET,
        tool_calls=calls or out.UNSET,
    )  # fmt: skip
    logprobs = None
    if piece.logprobs is not None:
        logprobs = out.ChatLogprobs([_entry(service.token_text, piece.logprobs)])
    is_empty = not (text or thought or calls or piece.finish_reason or logprobs)
    if is_empty and not body.return_token_ids:
        return None
    if not begun[index]:
        begun[index] = True
        delta.role = "assistant"
        if not (text or thought or calls):
            delta.content = ""
    return out.ChatChunkChoice(
        index, delta, logprobs, answer.finish_reason(piece),
        piece.stop_reason if piece.finish_reason is not None else out.UNSET,
        list(piece.token_ids) if body.return_token_ids else out.UNSET,
    )  # fmt: skip


def _document(service: Service, call: Call, kind: str, choices: list[Any]) -> out.Document:
    return out.Document(call.id, kind, call.created, service.name, service.fingerprint, choices)


def _entry(names: TokenText, logprobs: tuple[Logprob, ...]) -> out.TokenLogprob:
    """A token with its likely ones; the list is shorter where fewer tokens are possible."""
    shown = [
        out.TopLogprob(names.name(e.token_id), max(e.logprob, FLOOR), names.byte_list(e.token_id))
        for e in logprobs
    ]
    return out.TokenLogprob(shown[0].token, shown[0].logprob, shown[0].bytes, shown[1:])
