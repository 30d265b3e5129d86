"""What is sent back, as msgspec structs: encoding one chunk costs about a microsecond."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET as UNSET
from msgspec import Struct, UnsetType
from starlette.responses import Response


class Usage(Struct):
    """Token counts of a call; cached tokens are among the prompt tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class ToolFunction(Struct):
    """Name and arguments of a call; arguments are a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A tool call; `index` only in streams."""

    id: str
    function: ToolFunction
    type: str = "function"
    index: int | UnsetType = UNSET


class TopLogprob(Struct):
    """One likely token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """One token of a chat answer with the likely ones."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprob]


class TextLogprobs(Struct):
    """`logprobs` of a completion choice; the first token of an echoed prompt has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChatMessage(Struct):
    """The answer as a whole."""

    content: str | None
    role: str = "assistant"
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(Struct):
    """A piece of the answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One whole answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(Struct):
    """A completion, or a piece of one."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Document(Struct):
    """A response or a chunk of one.

    Attributes:
        cedar: how the prompt was read; see `service.reading_of`.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    cedar: dict[str, Any] | UnsetType = UNSET


def json_response(document: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(document), status, media_type="application/json")
