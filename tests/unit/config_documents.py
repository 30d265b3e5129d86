"""Config documents for tests of reading and rules. No tests here."""

from __future__ import annotations

from typing import Any

from cedar.config import fields as layout
from cedar.config.model_config import ModelConfig

Document = dict[str, Any]


def flat_of(config: ModelConfig) -> Document:
    """The flat layout of a config, written from the table of names."""
    document: Document = {"dtype": config.dense_dtype, "expert_dtype": config.expert_dtype}
    for spec in layout.TEXT_FIELDS + layout.ROOT_FIELDS:
        value = getattr(config, spec.name)
        if spec.flat is not None and value is not None:
            document[spec.flat] = list(value) if isinstance(value, tuple) else value
    for spec in layout.VISION_FIELDS if config.vision else ():
        assert spec.flat is not None
        document[spec.flat] = getattr(config.vision, spec.name)
    return document
