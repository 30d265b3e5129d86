"""Pins how chats become training text: turns, spelling, and what is left out."""

from __future__ import annotations

import pytest

from cedar.training import chats


def chat(*messages: tuple[str, str]) -> list[list[dict[str, str]]]:
    return [[{"sender": sender, "text": text}] for sender, text in messages]


def test_messages_of_one_sender_merge_into_one_turn() -> None:
    messages = chat(
        ("a", "hello"),
        ("a", "how are you"),
        ("b", "im good"),
        ("b", "i like the"),
        ("b", "sea"),
        ("a", ":)"),
    )
    assert chats.chat_turns(messages) == ["Hello. How are you?", "I'm good. I like the sea."]


def test_a_monologue_is_no_chat() -> None:
    assert chats.chat_turns(chat(("a", "hello"), ("a", "anyone?"))) == []


@pytest.mark.parametrize(
    ("raw", "tidy"),
    [
        ("whats up", "What's up?"),
        ("i dont know!!! its sooooo nice :)", "I don't know! Its soo nice."),
        ("IM here....ok", "I'm here...ok."),
        ("\U0001f600", ""),
    ],
)
def test_chat_spelling_is_tidied(raw: str, tidy: str) -> None:
    assert chats.tidy_message(raw) == tidy


def test_a_rude_chat_gives_nothing_and_talk_about_the_score_is_cut_out() -> None:
    clean = ["Hi.", "Hello!", "How are you?", "Fine.", "Good."]
    assert chats.clean_stretches(clean) == [clean[:4]]
    assert chats.clean_stretches([*clean, "What the hell."]) == []
    assert chats.clean_stretches([*clean, "How many points have you?", *clean[:3]]) == [clean[:4]]
    assert chats.clean_stretches(["Hi.", "Hello.", "The class is farther.", "Ok."]) != []


def test_turns_are_rendered_with_markers_and_the_opener_is_the_user() -> None:
    assert chats.render_chat(["Hi.", "Yes?"]) == "<|user|>Hi.<|end|><|assistant|>Yes?<|end|>"
