"""`POST /tokenize` and `/detokenize`, with vLLM's fields."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cedar.errors import RequestError
from cedar.server.protocol import DetokenizeBody, TokenizeBody, read_body
from cedar.server.responses import json_response
from cedar.server.service import Service
from cedar.text.segments import encode_segments


async def tokenize(request: Request) -> Response:
    """Ids of a text, or of a conversation as chat would send it."""
    service: Service = request.app.state.service
    body = await read_body(request, TokenizeBody)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give exactly one of prompt and messages", param="prompt")
    if body.prompt is not None:
        ids = await service.encode(body.prompt, body.add_special_tokens is not False)
    else:
        ids = _chat_ids(service, body)
    document: dict[str, Any] = {
        "count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": None,
    }  # fmt: skip
    if body.return_token_strs:
        document["token_strs"] = [service.token_text.name(token) for token in ids]
    return json_response(document)


async def detokenize(request: Request) -> Response:
    """Text of ids, control tokens included."""
    service: Service = request.app.state.service
    body = await read_body(request, DetokenizeBody)
    service.check_model(body.model)
    if service.tokenizer is None:
        raise RequestError("this model has no tokenizer", param="tokens")
    size = service.engine.info.limits.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise RequestError(
                f"token id {token} is not in the vocabulary; allowed 0..{size - 1}", param="tokens"
            )
    text = service.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


def _chat_ids(service: Service, body: TokenizeBody) -> list[int]:
    if service.template is None or service.tokenizer is None:
        raise RequestError(f"{service.no_chat}; pass prompt instead", param="messages")
    continues = bool(body.continue_final_message)
    segments = service.template.render(
        body.messages or [], tools=body.tools, chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=continues,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
    )  # fmt: skip
    return encode_segments(segments, service.tokenizer)
