"""Request bodies: the fields served, their types, and the step to `SamplingParams`.

Ranges are checked by `SamplingParams` and the engine. Unknown fields are ignored and logged; fields
that clients rely on and that are not served are refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from cedar.engine.sampling_params import SamplingParams
from cedar.errors import RequestError

logger = logging.getLogger(__name__)

#: Fields of other servers whose silent absence would change an answer.
UNSUPPORTED = (
    "suffix", "functions", "function_call", "audio", "prediction", "web_search_options",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
    "use_beam_search", "include_stop_str_in_output", "truncate_prompt_tokens", "prompt_embeds",
    "chat_template", "documents", "bad_words", "allowed_token_ids", "logits_processors",
)  # fmt: skip
MAX_STOPS, MAX_STOP_LENGTH, MAX_BIASES = 64, 4096, 4096
#: Fields that go to `SamplingParams` under their own name when they are given.
_DIRECT = (
    "n", "temperature", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip

Stop = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
B = TypeVar("B", bound="Body")


class Body(BaseModel):
    """Base of all bodies: exact types, nothing is coerced."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None


class StreamOptions(BaseModel):
    """`stream_options` of OpenAI and vLLM."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Body):
    """What chat and plain completions have in common."""

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    user: str | None = None

    def sampling(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """The engine's parameters.

        Args:
            defaults: of the model, for fields that are not given.
            more: what the endpoint decides (max_tokens, logprobs, ...).
        """
        given = {name: getattr(self, name) for name in _DIRECT}
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k  # -1 is vLLM's "off"
        if self.logit_bias:
            given["logit_bias"] = _biases(self.logit_bias)
        if self.min_tokens is not None:
            given["min_tokens"] = self.min_tokens
        fields = {**defaults, **{name: v for name, v in given.items() if v is not None}, **more}
        return SamplingParams(**fields)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of totals."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries usage."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(SamplingBody):
    """`POST /v1/completions`; `prompt` is a text, ids, or a list of either."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: list[int]


async def read_body(request: Request, kind: type[B]) -> B:
    """The body of a request, checked.

    Raises:
        RequestError: it is no JSON object of that kind, or asks for what is not served.
    """
    raw = await request.body()
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _refusal(error) from None
    extra = body.model_extra or {}
    for name in UNSUPPORTED:
        if extra.get(name) not in (None, False, "", [], {}):
            raise RequestError(f"{name} is not supported by this server; leave it out", param=name)
    if extra:
        logger.debug("ignored unknown fields: %s", ", ".join(sorted(extra))[:500])
    if isinstance(body, SamplingBody) and body.stream_options is not None and not body.stream:
        raise RequestError(
            "stream_options is only allowed with stream=true", param="stream_options"
        )
    return body


def prompts_of(value: Any) -> list[str | list[int]]:
    """The prompts of a completion request.

    Raises:
        RequestError: `value` is no text, list of ids, or list of either.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_ids(value):
            return [value]
        if all(isinstance(item, str) or (isinstance(item, list) and _are_ids(item))
               for item in value):  # fmt: skip
            return value
    raise RequestError(
        "prompt must be a text, a list of token ids, or a non-empty list of either", param="prompt"
    )


def refuse_best_of(body: CompletionBody) -> None:
    """`best_of` is served only where it changes nothing."""
    if body.best_of not in (None, 1, body.n):
        raise RequestError(
            f"best_of={body.best_of} is not supported; use n and choose yourself", param="best_of"
        )


def schema_of(kind: type[Body]) -> dict[str, Any]:
    """JSON schema of a body with nothing referred to, for the OpenAPI document."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return resolve(definitions[node["$ref"].rsplit("/", 1)[1]])
            return {name: resolve(value) for name, value in node.items()}
        return [resolve(item) for item in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = resolve(schema)
    return resolved


def _are_ids(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(name): value for name, value in biases.items()}
    except ValueError:
        raise RequestError(
            "logit_bias must map token ids, written as strings, to numbers", param="logit_bias"
        ) from None


def _refusal(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"][:500]
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {message}")
    where = f"{place}: " if place else "the body: "
    return RequestError(f"{where}{message}", param=str(first["loc"][0]) if first["loc"] else None)
