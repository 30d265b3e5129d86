"""Parts of a checkpoint that are recognised and checked but not run by this version."""

from __future__ import annotations

from typing import Final

NOT_LOADED: Final = ("vision", "draft")
