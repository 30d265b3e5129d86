"""Control tokens and tool-call tags of DeepSeek-V4.1, each spelled once.

Lives here: constants only.  Imported by the prompt writer (:mod:`cedar.text.deepseek_v41`,
:mod:`cedar.text.dsml`) and by the readers of the model's output (:mod:`cedar.text.reasoning`,
:mod:`cedar.text.tool_calls`).

Source: the release's ``tokenizer.json`` and ``encoding/encoding.py``.  The bars are U+FF5C and the
low lines U+2581.
"""

from __future__ import annotations

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"
TASK_MARKERS = (
    ("action", "<｜action｜>"),
    ("query", "<｜query｜>"),
    ("authority", "<｜authority｜>"),
    ("domain", "<｜domain｜>"),
    ("title", "<｜title｜>"),
    ("read_url", "<｜read_url｜>"),
)

# A vocabulary without these cannot hold this format.
REQUIRED_MARKERS = (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML)

# Every tag name begins with one space; the previous generation's tags had none.
CALLS_NAME = " calls"
INVOKE_NAME = " invoke"
PARAMETER_NAME = " parameter"
CALLS_OPEN = f"<{DSML}{CALLS_NAME}>"
CALLS_CLOSE = f"</{DSML}{CALLS_NAME}>"
INVOKE_CLOSE = f"</{DSML}{INVOKE_NAME}>"
PARAMETER_CLOSE = f"</{DSML}{PARAMETER_NAME}>"
