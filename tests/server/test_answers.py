"""What is streamed, what is answered at once and what the offline API says are the same."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from server_api import ENGINE, MODEL_LEN, Api

from cedar import LLM, SamplingParams
from cedar.loading import load
from cedar.text.tokenizer import Tokenizer

PROMPT = "the cat sat on the mat"


@pytest.fixture(scope="module")
def offline(tiny_directory: Path) -> LLM:
    model = load(tiny_directory, kernels="auto", dtype="float32")
    tokenizer = Tokenizer.from_directory(tiny_directory)
    return LLM(model, tokenizer=tokenizer, **{**ENGINE, "enable_prefix_caching": False})


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "seed": 7, "top_p": 0.9, "n": 3},
        {"temperature": 1.0, "seed": 3, "top_k": 20, "min_p": 0.01, "frequency_penalty": 0.5,
         "presence_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"200": 4.0}},
        {"temperature": 0.0, "ignore_eos": True, "min_tokens": 9, "stop_token_ids": [70]},
    ],
    ids=["greedy", "seeded", "penalised", "ignore-eos"],
)  # fmt: skip
def test_streamed_whole_and_offline_text_are_equal(
    api: Api, offline: LLM, fields: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, **fields}
    events = api.stream("/v1/completions", body)
    whole = api.post("/v1/completions", {**body, "return_token_ids": True}).json()
    chosen = {**fields, "logit_bias": {int(k): v for k, v in fields.get("logit_bias", {}).items()}}
    expected = offline.generate(PROMPT, SamplingParams(max_tokens=20, **chosen))[0].outputs
    assert len(whole["choices"]) == len(expected)
    for choice, wanted in zip(whole["choices"], expected, strict=True):
        assert choice["token_ids"] == wanted.token_ids
        assert choice["text"] == wanted.text == joined(events, wanted.index)
        assert choice["finish_reason"] == wanted.finish_reason


def test_a_hit_in_the_prefix_cache_is_reported_and_changes_no_exact_answer(
    serve: Callable[..., Api], tiny_directory: Path
) -> None:
    api = serve(tiny_directory, {"encoder_replay": "exact"})
    body = {"prompt": list(range(20, 80)), "max_tokens": 8, "temperature": 0.0}
    first, second = (api.post("/v1/completions", body).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["cedar"]["prefix_cache"]["miss_reason"] == "no block of this prompt is cached"
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0 and cached % 8 == 0
    assert second["cedar"]["prefix_cache"]["cached_tokens"] == cached
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = api.stream("/v1/completions", {**body, **options})
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    salted = api.post("/v1/completions", {**body, "cache_salt": "other tenant"}).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_streamed_text_is_the_decode_of_all_ids_though_characters_span_tokens(
    api: Api, scripted: Callable[[list[int]], None]
) -> None:
    tokenizer = api.service.tokenizer
    assert tokenizer is not None
    text = "a \U0001f600 中 é \U0001f469\u200d\U0001f52c z"
    ids = [tokenizer.token_to_id(c) for c in _spelled(text)]
    scripted(ids)
    body = {"prompt": "x", "max_tokens": len(ids), "ignore_eos": True}
    events = api.stream("/v1/completions", body)
    assert joined(events) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in e["choices"][0]["text"] for e in events)


def _spelled(text: str) -> str:
    """Bytes of a text as a byte-level vocabulary spells them, one entry each."""
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


@pytest.mark.parametrize(
    ("written", "shown", "reason"),
    [
        ("abEND more", "ab", "END"),
        ("xEND", "x", "END"),
        ("aENXb", "aENXb", None),
        ("abEN", "abEN", None),
    ],
)
def test_stop_strings_over_several_tokens_are_cut_exactly_and_near_misses_are_released(
    api: Api, scripted: Callable[[list[int]], None], written: str, shown: str, reason: str | None
) -> None:
    assert api.service.tokenizer is not None
    ids = [api.service.tokenizer.token_to_id(c) for c in _spelled(written)]
    scripted([*ids, *ids])
    body = {"prompt": "x", "max_tokens": len(ids), "stop": ["END", "never"], "ignore_eos": True}
    whole = api.post("/v1/completions", body).json()["choices"][0]
    events = api.stream("/v1/completions", body)
    assert whole["text"] == joined(events) == shown
    assert whole["stop_reason"] == events[-1]["choices"][0]["stop_reason"] == reason
    assert whole["finish_reason"] == ("stop" if reason else "length")
    api.settle()
    assert api.used_blocks == 0


def test_usage_comes_once_at_the_end_only_when_asked_for(api: Api) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
    plain = api.stream("/v1/completions", body)
    assert all("usage" not in event for event in plain)
    asked = api.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    *chunks, last = asked
    assert all(event["usage"] is None and event["choices"] for event in chunks)
    assert last["choices"] == []
    total = last["usage"]
    assert total["completion_tokens"] == 5
    assert total["total_tokens"] == total["prompt_tokens"] + 5
    assert "cached_tokens" in total["prompt_tokens_details"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = api.stream("/v1/completions", {**body, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in chunks]
    assert counts == sorted(counts) and counts[-1] == 5 == last["usage"]["completion_tokens"]
    refused = api.post("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream_options"


def test_echoed_prompt_logprobs_are_the_models_and_the_answer_says_that_the_decoder_ran_in_full(
    api: Api, offline: LLM
) -> None:
    ids = offline.encode(PROMPT)
    body = {"prompt": [ids, ids[:5]], "max_tokens": 1, "temperature": 0.0, "echo": True,
            "logprobs": 1}  # fmt: skip
    answer = api.post("/v1/completions", body).json()
    assert answer["cedar"]["decoder_prefill"] == "full"
    assert "decoder_prefill_reason" in answer["cedar"]
    for choice, prompt in zip(answer["choices"], (ids, ids[:5]), strict=True):
        scores = torch.log_softmax(offline.model.score(torch.tensor([prompt]))[0], -1)
        values = choice["logprobs"]["token_logprobs"]
        assert values[0] is None and len(values) == len(prompt) + 1
        for position in range(1, len(prompt)):
            expected = float(scores[position - 1, prompt[position]])
            assert values[position] == pytest.approx(expected, abs=1e-3)
            top = choice["logprobs"]["top_logprobs"][position]
            assert choice["logprobs"]["tokens"][position] in top
            assert max(top.values()) == pytest.approx(float(scores[position - 1].max()), abs=1e-3)
    assert answer["choices"][0]["text"].startswith(PROMPT)
    assert answer["choices"][0]["logprobs"]["text_offset"][-1] == len(PROMPT)
    events = api.stream("/v1/completions", body)
    assert events[0]["cedar"]["decoder_prefill"] == "full"
    assert joined(events) == answer["choices"][0]["text"]


def test_echo_alone_gives_the_prompt_and_no_new_token(api: Api) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = api.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == PROMPT
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == answer["usage"]["prompt_tokens"]


def test_logprobs_are_valid_json_with_the_drawn_token_first_and_no_infinity(api: Api) -> None:
    def strict(constant: str) -> float:
        raise AssertionError(constant)

    bias = {str(token): -100.0 for token in range(2, 320)}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "min_tokens": 2,
            "logit_bias": bias, "logprobs": True, "top_logprobs": 20}  # fmt: skip
    answer = json.loads(api.post("/v1/chat/completions", body).text, parse_constant=strict)
    content = answer["choices"][0]["logprobs"]["content"]
    assert 1 <= len(content) <= 4
    for entry in content:
        assert 1 <= len(entry["top_logprobs"]) <= 20
        assert bytes(entry["bytes"]).decode("utf-8", "replace")
    text = {"prompt": "x", "max_tokens": 3, "logprobs": 20, "logit_bias": bias}
    json.loads(api.post("/v1/completions", text).text, parse_constant=strict)


def test_likely_tokens_are_fewer_than_asked_for_where_fewer_can_be_drawn(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cedar.engine import runner, sampler

    def two_possible(logits: torch.Tensor, *arguments: Any, **more: Any) -> sampler.Sampled:
        masked = torch.full_like(logits, float("-inf"))
        masked[[40, 41]] = logits[[40, 41]]
        return sampler.sample(masked, *arguments, **more)

    monkeypatch.setattr(runner, "sample", two_possible)
    body = {"max_tokens": 3, "ignore_eos": True}
    chat = {**body, "messages": [{"role": "user", "content": "hi"}], "logprobs": True,
            "top_logprobs": 5}  # fmt: skip
    content = api.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    plain = api.post("/v1/completions", {**body, "prompt": "x", "logprobs": 5}).json()
    logprobs = plain["choices"][0]["logprobs"]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    for values in logprobs["top_logprobs"]:
        assert sum(math.exp(value) for value in values.values()) == pytest.approx(1, abs=1e-4)


def test_tokens_go_there_and_back(api: Api) -> None:
    text = "the cat <|user|> \U0001f600"
    tokens = api.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == MODEL_LEN
    assert api.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = api.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    usage = api.post("/v1/chat/completions", body).json()["usage"]
    assert usage["prompt_tokens"] == chat["count"]
