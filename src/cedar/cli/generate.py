"""`cedar generate MODEL`: text to stdout, progress and the account of the run to stderr."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cedar.cli.options import model_options, read_text
from cedar.errors import DoesNotFitError, UsageError
from cedar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from cedar.llm import LLM


@click.command()
@model_options
@click.option("--prompt", help="Prompt text.")
@click.option(
    "--prompt-file", type=click.Path(path_type=Path),
    help="File with the prompt text; - reads stdin.",
)  # fmt: skip
@click.option(
    "--prompt-ids", help="Prompt as token ids, comma separated (models without tokenizer)."
)
@click.option("--max-tokens", type=int, default=128, show_default=True, help="New tokens at most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 = greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True,
              help="Draw from the most likely tokens of this total probability.")  # fmt: skip
@click.option("--top-k", type=int, default=0, show_default=True,
              help="Draw from this many of the most likely tokens; 0 = off.")  # fmt: skip
@click.option("--min-p", type=float, default=0.0, show_default=True,
              help="Leave out tokens below this share of the likeliest one's probability.")  # fmt: skip
@click.option("--stop", multiple=True, help="String that ends the text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")
@click.option(
    "--decoder-prefill", type=click.Choice(["report", "cut", "exact", "full"]),
    help="Decoder rows of the prompt; default report, or full where the model cannot skip.",
)  # fmt: skip
@click.option("--replay-windows", type=int, default=1, show_default=True,
              help="Windows that report and cut run through the decoder.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def generate(
    model: str, kernels: str, dtype: str, index_key_rule: str, seed: int, prompt: str | None,
    prompt_file: Path | None, prompt_ids: str | None, max_tokens: int, temperature: float,
    top_p: float, top_k: int, min_p: float, stop: tuple[str, ...], ignore_eos: bool,
    decoder_prefill: str | None, replay_windows: int, as_json: bool,
) -> None:  # fmt: skip
    """Generate text from a prompt; says on stderr what was run and stored."""
    given = _prompt(prompt, prompt_file, prompt_ids)
    from cedar.engine.sampling_params import SamplingParams
    from cedar.llm import LLM, encode_prompt
    from cedar.loading import load
    from cedar.model_directory import find_tokenizer

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        seed=seed, stop=stop, ignore_eos=ignore_eos,
    )  # fmt: skip
    begin = time.perf_counter()
    loaded = load(model, kernels=kernels, dtype=dtype, index_key_rule=index_key_rule, seed=seed)  # type: ignore[arg-type]
    tokenizer = find_tokenizer(model)
    _say(
        f"loaded {model} in {format_seconds(time.perf_counter() - begin)}, kernels={loaded.ops.name}"
        f", index_key_rule={index_key_rule}"
    )
    ids = encode_prompt(given, tokenizer)
    _check_length(len(ids), max_tokens, loaded.config.max_position_embeddings)
    llm = LLM(
        loaded, tokenizer=tokenizer, max_num_seqs=1, max_model_len=len(ids) + max_tokens,
        decoder_prefill=decoder_prefill, replay_windows=replay_windows,
        block_size=loaded.plan.ratio_lcm * -(-128 // loaded.plan.ratio_lcm),
    )  # fmt: skip
    only_bos = ", begin-of-sequence alone because the text is empty" if given == "" else ""
    _say(
        f"reading {len(ids)} prompt token{'s' if len(ids) > 1 else ''}{only_bos}, "
        f"decoder_prefill={llm.engine.runner.decoder_prefill}"
    )
    text, reason = "", None
    out_ids: list[int] = []
    is_slow = len(ids) > llm.engine.config.max_num_batched_tokens
    progress = partial(_show_read, len(ids)) if is_slow and sys.stderr.isatty() else None
    for delta in llm.stream(ids, params, progress):
        if not as_json:
            click.echo(delta.text, nl=False)
        text += delta.text
        out_ids += delta.token_ids
        reason = delta.finish_reason
    record = _record(model, llm, ids, text, out_ids, reason)
    if as_json:
        click.echo(json.dumps(record, ensure_ascii=False))
    else:
        click.echo(",".join(map(str, out_ids)) if tokenizer is None else "")
    _say(_account_text(record))


def _prompt(prompt: str | None, file: Path | None, ids: str | None) -> str | list[int]:
    given = [value for value in (prompt, file, ids) if value is not None]
    if len(given) != 1:
        raise UsageError(
            f"got {len(given)} prompts; give exactly one of --prompt, --prompt-file, --prompt-ids"
        )
    if ids is not None:
        try:
            return [int(part) for part in ids.split(",")]
        except ValueError:
            raise UsageError(f"--prompt-ids {ids!r} must be integers separated by commas") from None
    return prompt if prompt is not None else read_text(file)  # type: ignore[arg-type]


def _check_length(prompt: int, max_tokens: int, positions: int) -> None:
    if prompt + max_tokens > positions:
        room = positions - prompt
        advice = f"lower it to {room}" if room > 0 else "shorten the prompt"
        raise DoesNotFitError(
            f"--max-tokens {max_tokens} does not fit: prompt {prompt} + {max_tokens} > the model's "
            f"max_position_embeddings {positions}; {advice}"
        )


def _record(
    model: str, llm: LLM, ids: list[int], text: str, out_ids: list[int], reason: str | None
) -> dict[str, Any]:
    """Everything measured about the run, as the JSON document."""
    from cedar.config.flows import flow_name

    state, account = llm.engine.runner.state, llm.engine.account
    slot = state.slots[0]
    return {
        "model": model,
        "text": text,
        "token_ids": out_ids,
        "finish_reason": reason,
        "prompt_tokens": len(ids),
        "completion_tokens": len(out_ids),
        "flow": flow_name(llm.model.config),
        "decoder_prefill": llm.engine.runner.decoder_prefill,
        "index_key_rule": llm.model.index_key_rule,
        "kernels": llm.model.ops.name,
        "phases": account.to_dict(),
        "kv_tokens": slot.length,
        "kv_bytes": state.kv_bytes(),
        "window_bytes": state.window_bytes(),
    }


def _account_text(record: dict[str, Any]) -> str:
    lines = [f"flow {record['flow']}, decoder_prefill={record['decoder_prefill']}"]
    for name in ("encode", "project", "replay", "decode"):
        phase = record["phases"][name]
        what = "projections" if name == "project" else "layers"
        lines.append(
            f"  {name:<8}{phase['tokens']:>8} tokens x {phase['layers']:>2} {what:<12}"
            f"{phase['token_layers']:>10} token-layers  {format_seconds(phase['seconds']):>9}"
        )
    lines.append(
        f"  stored  KV {format_bytes(record['kv_bytes'])} for {record['kv_tokens']} tokens, "
        f"windows {format_bytes(record['window_bytes'])}"
    )
    lines.append("  labels  all measured in this run")
    return "\n".join(lines)


def _show_read(total: int, read: int) -> None:
    """One line of a terminal that is written over until the prompt has been read."""
    click.echo(f"\rread {read:,} of {total:,} prompt tokens", nl=read == total, err=True)


def _say(line: str) -> None:
    click.echo(line, err=True)
