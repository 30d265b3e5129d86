"""Names of the modes a prompt can be read in; what they mean is in `engine/phases.py`. No torch."""

from __future__ import annotations

from typing import Literal

DecoderPrefill = Literal["full", "report", "cut", "exact"]
EncoderReplay = Literal["bounded", "exact"]
IndexKeyRule = Literal["corrected", "as_shipped"]
