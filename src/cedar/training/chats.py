"""Cleaning of chats for training: turns, spelling, and which chats are fit to learn from.

Lives here: pure functions from the messages of the chitchat data set to text with turn markers.
Does not live here: other texts (:mod:`cedar.training.corpus`) and prompts of the running system.
Called by ``tools/build_corpus.py``.  Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cedar.training.corpus import normalise

USER_MARKER = "<|user|>"
ASSISTANT_MARKER = "<|assistant|>"
END_MARKER = "<|end|>"

# Stems of rude and sexual words; a chat with one of them is dropped as a whole.
_RUDE = re.compile(
    r"\b(?:\w*fuc?k\w*|\w*shit\w*|bitch\w*|bastard\w*|ass|asses|asshole\w*|dumbass|crap\w*|damn\w*|"
    r"dick|dicks|cock|cocks|pussy|cunt\w*|whore\w*|slut\w*|fag\w*|nigg\w*|retard\w*|raped?|raping|"
    r"sex\w*|porn\w*|nude\w*|naked|boob\w*|penis|vagina|horny|orgasm\w*|masturbat\w*|gay|"
    r"lesbian\w*|suicid\w*|nazi\w*|hitler|wtf|stfu|hell|pee|poop\w*|fart|farts|farted|cocaine|heroin)\b",
    re.I,
)
# Talk about the collection itself (its score board and assistant), addresses and long numbers.
_OFF_TOPIC = re.compile(
    r"https?:|www\.|@\w|\d{6,}|leader ?board|top ten|top 10|eve project|project eve|this app\b|"
    r"chit ?chat|gift card|\braffle|\bchats?\b|\bpoints\b|challenge",
    re.I,
)


# A message that ends in one of these words, or at the length limit, goes on in the next message.
_OPEN_END = re.compile(
    r"\b(a|an|the|to|of|and|or|but|so|my|your|our|his|her|their|in|on|at|with|for|from|is|are|was|"
    r"that|because|if|when|like|than|as|by|about|very|really)$|^.{170,}$",
    re.I | re.S,
)


def chat_turns(messages: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Merges consecutive messages of one sender into turns; returns [] unless two people talk."""
    turns: list[str] = []
    senders: list[str] = []
    for message in (message for group in messages for message in group):
        text = normalise(str(message["text"])).replace("\n", " ")
        if not re.search(r"[A-Za-z0-9]", text):
            continue
        if not senders or senders[-1] != message["sender"]:
            turns.append(text)
            senders.append(str(message["sender"]))
        elif turns[-1][-1] in ".!?,-" or _OPEN_END.search(turns[-1]):
            turns[-1] = f"{turns[-1]} {text}"
        else:
            turns[-1] = f"{turns[-1]}{_stop_mark(turns[-1])} {text}"
    if len(set(senders)) != 2:
        return []
    return [tidy for turn in turns if (tidy := tidy_message(turn))]


def clean_stretches(turns: Sequence[str], minimum: int = 4) -> list[list[str]]:
    """Cuts a chat at turns about the collection itself; a chat with a rude word gives nothing.

    Returns:
        Stretches of at least ``minimum`` turns, each of an even number, so every turn has an
        answer.
    """
    if any(_RUDE.search(turn) for turn in turns):
        return []
    stretches: list[list[str]] = [[]]
    for turn in turns:
        if _OFF_TOPIC.search(turn):
            stretches.append([])
        else:
            stretches[-1].append(turn)
    even = [stretch[: len(stretch) // 2 * 2] for stretch in stretches]
    return [stretch for stretch in even if len(stretch) >= minimum]


_QUESTION = re.compile(
    r"(?:what|whats|what's|how|hows|how's|where|who|why|when|which|do you|did you|are you|were you|"
    r"have you|can you|will you|would you|is it|is there|don't you|does it|any)\b[^.!?]*$",
    re.I,
)


def _stop_mark(text: str) -> str:
    sentence = re.split(r"[.!?] ", text)[-1]
    return "?" if _QUESTION.match(sentence) else "."


_SPELLING = {
    "i": "I", "im": "I'm", "ive": "I've", "id": "I'd", "i'm": "I'm", "i've": "I've", "i'd": "I'd",
    "i'll": "I'll", "dont": "don't", "cant": "can't", "didnt": "didn't", "doesnt": "doesn't",
    "isnt": "isn't", "wasnt": "wasn't", "arent": "aren't", "wouldnt": "wouldn't",
    "couldnt": "couldn't", "shouldnt": "shouldn't", "havent": "haven't", "hasnt": "hasn't",
    "thats": "that's", "whats": "what's", "youre": "you're", "theyre": "they're", "hows": "how's",
    "theres": "there's", "u": "you", "ur": "your", "r": "are", "n": "and", "bc": "because",
    "cuz": "because", "idk": "I don't know", "thx": "thanks", "pls": "please", "alot": "a lot",
}  # fmt: skip


def tidy_message(text: str) -> str:
    """Repairs the commonest chat spellings, capitalises sentences and ends with a stop mark."""
    text = re.sub(r"[^\x20-\x7e]|[:;]-?[)(DPp]|<3|\bx[dD]\b", "", text)
    text = re.sub(r"([A-Za-z])\1{2,}", r"\1\1", text)
    text = re.sub(r"([!?])[!?]*", r"\1", re.sub(r"\.{2,}", "...", text))

    def respell(match: re.Match[str]) -> str:
        word = match.group(0)
        fixed = _SPELLING.get(word.lower(), word)
        return fixed[0].upper() + fixed[1:] if word[0].isupper() else fixed

    text = re.sub(r"(?<![\w'])[A-Za-z]+(?:'[a-z]+)?(?![\w'])", respell, text)
    text = re.sub(r" +([.,!?])", r"\1", re.sub(r" {2,}", " ", text)).strip(" ,-~")
    if not re.search(r"[A-Za-z0-9]", text):
        return ""
    text = re.sub(r"(^|[.!?] )([a-z])", lambda match: match.group(1) + match.group(2).upper(), text)
    return text if text[-1] in ".!?" else text + _stop_mark(text)


def render_chat(turns: Sequence[str]) -> str:
    """Writes alternating turns as ``<|user|>..<|end|><|assistant|>..<|end|>``, opener = user."""
    markers = (USER_MARKER, ASSISTANT_MARKER)
    return "".join(f"{markers[i % 2]}{turn}{END_MARKER}" for i, turn in enumerate(turns))
