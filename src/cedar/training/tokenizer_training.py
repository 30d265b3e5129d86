"""Trains the small model's vocabulary: a byte-level BPE with fixed control tokens.

Lives here: the control tokens with their ids, the split rule and the training call.  Does not live
here: using a vocabulary (:mod:`cedar.text.tokenizer`).  Called by the corpus tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from cedar.errors import UsageError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
MARKERS = (
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<think>",
    "</think>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|tool_result|>",
    "<|/tool_result|>",
    "<|image|>",
    "<|noise|>",
    "<|reserved_0|>",
    "<|reserved_1|>",
    "<|reserved_2|>",
    "<|reserved_3|>",
)
CONTROL_TOKENS = (BOS, EOS, PAD, *MARKERS)  # a token's id is its place here

# The split rule of GPT-4's cl100k_base vocabulary, as published in openai/tiktoken.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, out_path: str | Path) -> None:
    """Trains a byte-level BPE; writes ``tokenizer.json``, ``tokenizer_config.json`` beside it.

    No normaliser and no prefix blank, and all 256 bytes are in the vocabulary, so every string
    survives encode and decode unchanged.  Control tokens in ``texts`` are left out of the training.

    Args:
        texts: the training documents.
        vocab_size: number of ids, control tokens and the 256 bytes included.
        out_path: the file to write.

    Raises:
        UsageError: ``vocab_size`` has no room for the control tokens and the bytes, or the texts
            are too short to fill it.
    """
    smallest = len(CONTROL_TOKENS) + 256
    if vocab_size < smallest:
        raise UsageError(f"vocab_size {vocab_size} is too small: it must be at least {smallest}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_control_tokens(texts), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UsageError(
            f"the texts only fill {tokenizer.get_vocab_size()} of {vocab_size} vocabulary entries; "
            "give more text or a smaller vocab_size"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    path = Path(out_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=2) + "\n"
    path.with_name("tokenizer_config.json").write_text(text, encoding="utf-8")


def _without_control_tokens(texts: Iterable[str]) -> Iterator[str]:
    pattern = re.compile("|".join(re.escape(token) for token in CONTROL_TOKENS))
    for text in texts:
        yield from (piece for piece in pattern.split(text) if piece)
