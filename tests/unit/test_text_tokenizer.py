"""Pins the tokenizer: lossless text, control tokens only from us, special ids from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.errors import CheckpointError, ConfigError, UsageError
from cedar.text.detokenizer import IncrementalDetokenizer
from cedar.text.tokenizer import Tokenizer
from cedar.training.tokenizer_training import CONTROL_TOKENS, train_tokenizer

VOCAB_SIZE = 350
WORDS = "the whale and the sea, the ship and its captain; whoever whispered whenever they sailed"
TEXTS = [f"{WORDS} {word}ing {word}ed <|user|>{word}<|end|>" for word in WORDS.split()] * 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, VOCAB_SIZE, path / "tokenizer.json")
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


def copy_with(directory: Path, target: Path, **files: object) -> Path:
    document = (directory / "tokenizer.json").read_text(encoding="utf-8")
    (target / "tokenizer.json").write_text(document, encoding="utf-8")
    for name, content in files.items():
        (target / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return target


def test_control_tokens_have_the_first_ids_in_their_published_order(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert [tokenizer.token_to_id(token) for token in CONTROL_TOKENS] == list(range(19))
    assert tokenizer.control_ids == frozenset(range(19))
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.token_to_id("no such entry") is None


def test_the_vocabulary_has_no_pieces_of_control_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_id("<|") is None
    assert tokenizer.token_to_id("|>") is None


def test_words_of_the_training_text_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" whale the")) == 2


@given(text=st.text())
def test_every_string_survives_encode_and_decode(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


control_lookalikes = st.lists(
    st.sampled_from([*CONTROL_TOKENS, "<", "|user|>", " a", "\n"]), max_size=6
)


@given(parts=control_lookalikes)
def test_ordinary_text_never_yields_a_control_id(tokenizer: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert tokenizer.control_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text


def test_text_around_a_lookalike_is_tokenized_as_without_any_control_tokens(
    tokenizer: Tokenizer,
) -> None:
    assert tokenizer.encode("the <|user|> whale")[-1:] == tokenizer.encode(" whale")


def test_markers_in_our_own_prompt_become_single_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_with_markers("<|user|>whale<|end|>", add_special_tokens=True)
    assert ids == [0, 4, *tokenizer.encode("whale"), 6]
    assert tokenizer.encode_batch_with_markers(["<|user|>whale<|end|>"]) == [ids[1:]]
    assert tokenizer.decode(ids) == "whale"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|><|user|>whale<|end|>"


def test_bos_is_added_only_when_asked(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("whale", add_special_tokens=True) == [0, *tokenizer.encode("whale")]


@given(text=st.text())
def test_streamed_text_equals_the_text(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(i) for i in tokenizer.encode(text)]
    assert "".join(pieces) + detokenizer.finish() == text


@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40), skip=st.booleans())
def test_streamed_text_equals_the_decode_of_any_ids(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_special_ids_come_from_config_json_where_no_token_is_named(
    directory: Path, tmp_path: Path
) -> None:
    config = {"bos_token_id": 7, "eos_token_id": [6, 1]}
    tokenizer = Tokenizer.from_directory(copy_with(directory, tmp_path, config=config))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (7, 6, None)


def test_named_special_tokens_win_over_ids(directory: Path, tmp_path: Path) -> None:
    names = {"eos_token": {"content": "<|end|>"}}
    path = copy_with(directory, tmp_path, tokenizer_config=names, config={"eos_token_id": 1})
    assert Tokenizer.from_directory(path).eos_id == 6


@pytest.mark.parametrize("number", [VOCAB_SIZE, -1, "1", True])
def test_a_special_id_outside_the_vocabulary_is_refused(
    directory: Path, tmp_path: Path, number: object
) -> None:
    with pytest.raises(ConfigError, match="pad_token_id"):
        Tokenizer.from_directory(copy_with(directory, tmp_path, config={"pad_token_id": number}))


def test_an_unknown_named_special_token_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bos_token '<nope>'"):
        Tokenizer.from_directory(
            copy_with(directory, tmp_path, tokenizer_config={"bos_token": "<nope>"})
        )


def test_a_config_that_is_no_object_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected an object"):
        Tokenizer.from_directory(copy_with(directory, tmp_path, config=[1]))


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 275"):
        train_tokenizer(TEXTS, 274, tmp_path / "tokenizer.json")


def test_texts_too_short_for_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only fill"):
        train_tokenizer(["aa"], VOCAB_SIZE, tmp_path / "tokenizer.json")
