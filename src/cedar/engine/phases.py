"""Phase arithmetic: which rows run where in a prefill. Pure numbers, no tensors, no torch.

A decoder replay is a list of (write, query) row counts per decoder layer, counted from the end of
the prompt: `write` rows leave a window row behind, `query` rows produce an output for the next layer.

    full    every new row in every layer
    report  the last n rows in every layer, windows empty before them (n = replay_windows * window)
    cut     as report, but the first decoder layer also writes the window rows its queries see
    exact   the pyramid that makes every row the first decode step reads equal to `full`

The last layer's output is wanted for the final row only, in every mode. Source: specification 8.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from cedar.config.layer_plan import LayerPlan
from cedar.config.modes import DecoderPrefill as DecoderPrefill
from cedar.config.modes import EncoderReplay as EncoderReplay
from cedar.errors import UsageError


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one decoder layer, counted from the end of the prompt."""

    write: int
    query: int


def check_choice(name: str, value: str, allowed: object) -> None:
    """Raise a UsageError unless value is one of a Literal's values."""
    choices = get_args(allowed)
    if value not in choices:
        raise UsageError(f"{name}={value!r} is not a choice; allowed: {', '.join(choices)}")


def check_decoder_prefill(plan: LayerPlan, mode: str, replay_windows: int) -> None:
    """Refuse a mode that the plan cannot run.

    Raises:
        UsageError: unknown mode, a window count below 1 or without effect, or a plan without CED.
    """
    check_choice("decoder_prefill", mode, DecoderPrefill)
    if replay_windows < 1:
        raise UsageError(f"replay_windows={replay_windows} must be at least 1")
    if replay_windows != 1 and mode in ("full", "exact"):
        raise UsageError(
            f"replay_windows={replay_windows} has no effect with decoder_prefill={mode!r}; use it "
            f"with 'report' or 'cut'"
        )
    blocker = plan.ced_blocker
    if mode != "full" and blocker is not None:
        raise UsageError(
            f"decoder_prefill={mode!r} is not possible for this model: {blocker}; use "
            f"decoder_prefill='full'"
        )


def replay_rows(plan: LayerPlan, mode: DecoderPrefill, replay_windows: int) -> list[LayerRows]:
    """Rows per decoder layer of a bounded replay; callers clip them to the prompt's length.

    At the release: report 128 rows in 20 layers, exact 2,541 rows written in the first.
    """
    window, layers = plan.sliding_window, len(plan.decoder)
    tail = replay_windows * window
    if mode == "exact":
        steps = [
            LayerRows(
                window + (layers - 1 - j) * (window - 1), window + (layers - 2 - j) * (window - 1)
            )
            for j in range(layers)
        ]
    else:
        steps = [LayerRows(tail, tail)] * layers
        if mode == "cut":
            steps[0] = LayerRows(tail + window - 1, tail)
    steps[-1] = LayerRows(steps[-1].write, 1)
    return steps


def boundary_rows(
    plan: LayerPlan, mode: DecoderPrefill, replay_windows: int, *, suffix: int
) -> int:
    """Boundary rows, counted from the end of the prompt, that the decoder's results depend on.

    `full` promises every new token, so it looks one window further back per decoder layer, from the
    first of them; the other modes start from the first row they replay.

    Args:
        suffix: new tokens of the call.
    """
    if mode == "full":
        return len(plan.decoder) * (plan.sliding_window - 1) + max(1, suffix)
    return replay_rows(plan, mode, replay_windows)[0].write


def window_layers(plan: LayerPlan, mode: DecoderPrefill) -> int:
    """Leading layers whose windows a stored prefix needs in order to go on without a replay.

    Only `full` goes on in the decoder; the other modes start it anew from the prompt's last rows.
    """
    return len(plan) if mode == "full" else plan.num_encoder_layers


def last_resume(plan: LayerPlan, mode: DecoderPrefill, replay_windows: int, prompt: int) -> int:
    """Last position of a prompt from which stored windows alone let it go on as if never stopped.

    What follows it must include every row that the decoder replays, and at least one.

    Args:
        prompt: tokens.
    """
    tail = 1 if mode == "full" else replay_rows(plan, mode, replay_windows)[0].write
    return max(0, prompt - tail)


def kept_boundary_rows(plan: LayerPlan, mode: DecoderPrefill, replay_windows: int) -> int:
    """Boundary rows that windows in memory bring along, so that the decoder's replay may begin in them.

    `full` replays nothing. `exact` begins so far back (2,541 rows at the release) that its boundary rows
    would take 77 times the bytes of the windows; its windows lie before them instead.
    """
    if mode in ("full", "exact"):
        return 0
    return replay_rows(plan, mode, replay_windows)[0].write


def encoder_replay_rows(
    plan: LayerPlan, mode: EncoderReplay, *, windows: int, decoder_rows: int, suffix: int
) -> int:
    """Prefix tokens to run again through the encoder after a prefix hit; callers clip to the hit.

    bounded: `windows` windows. exact: every encoder window row that a suffix token sees and every
    boundary row that the decoder replay needs come out exact, layers * (window - 1) rows below them.

    Args:
        decoder_rows: boundary rows the decoder needs, see `boundary_rows`.   suffix: new tokens.
    """
    check_choice("encoder_replay", mode, EncoderReplay)
    if windows < 1:
        raise UsageError(f"encoder_replay_windows={windows} must be at least 1")
    if mode == "bounded":
        return windows * plan.sliding_window
    if windows != 1:
        raise UsageError(
            f"encoder_replay_windows={windows} has no effect with encoder_replay='exact'; use it "
            f"with 'bounded'"
        )
    reach = plan.num_encoder_layers * (plan.sliding_window - 1)
    return reach + max(1, decoder_rows - suffix)
