"""The command line: verbs, exit codes, JSON documents and messages."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from cedar.cli.main import main
from cedar.cli.options import read_text
from cedar.engine.sampling_params import SamplingParams
from cedar.engine.thread_host import ThreadHost
from cedar.errors import RequestError, UsageError
from cedar.llm import LLM, encode_prompt
from cedar.model_directory import find_tokenizer
from cedar.server.config import ServerConfig
from cedar.server.engine_wire import EngineSpec
from cedar.server.launch import build_service

VECTORS = Path(__file__).parent.parent / "vectors"


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def cedar(*arguments: str, stderr: io.StringIO | None = None) -> Done:
    """Run the command line in this process, as `cedar ARGUMENTS` would."""
    out, err, argv = io.StringIO(), stderr or io.StringIO(), sys.argv
    sys.argv = ["cedar", *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stop:
            main()
    finally:
        sys.argv = argv
    return Done(int(stop.value.code or 0), out.getvalue(), err.getvalue())


def test_help_lists_every_verb_and_never_imports_torch() -> None:
    code = "import sys, cedar.cli.main as m; m.cedar.main(['--help'], standalone_mode=False); " \
           "assert 'torch' not in sys.modules"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in ("generate", "inspect", "plan", "train", "cache"):
        assert verb in done.stdout


def test_inspect_prints_the_released_totals_without_torch() -> None:
    code = "import sys, cedar.cli.main as m; m.cedar.main(['inspect', 'preset:v4.1-flash', " \
           "'--json'], standalone_mode=False); assert 'torch' not in sys.modules"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["num_hidden_layers"] == 40
    assert record["num_encoder_layers"] == 20
    assert record["kv_bytes_per_token"] == 890
    assert record["window_bytes"] == 2_703_360
    assert record["parameters"]["backbone"] == 551_566_180_464
    assert record["parameters"]["engram"] == 196_613_849_600
    assert record["parameters"]["activated_prefill"] == 7_895_563_064
    assert record["parameters"]["activated_decode"] == 16_130_583_664
    assert record["layers"][24] | {"kv_input": "self"} == {
        "layer_id": 24, "side": "decoder", "role": "reindex", "compress_ratio": 1, "kv_owner": 20,
        "topk_owner": 24, "kv_input": "self", "candidate": "consumer", "kv_adapter": "none",
        "has_engram": False,
    }  # fmt: skip


def test_inspect_says_what_a_checkpoint_would_load() -> None:
    done = cedar("inspect", str(VECTORS / "m7-tiny-all"))
    assert done.returncode == 0, done.stderr
    assert "recognised, not run: 26 vision, 115 draft" in done.stdout


def test_generate_json_accounts_for_every_phase() -> None:
    done = cedar(
        "generate", "preset:tiny", "--prompt-ids", ",".join(["5"] * 20), "--max-tokens", "6",
        "--ignore-eos", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["prompt_tokens"] == 20
    assert record["completion_tokens"] == 6
    assert record["flow"] == "ced+csa2"
    assert record["decoder_prefill"] == "report"
    phases = record["phases"]
    assert (phases["encode"]["tokens"], phases["encode"]["layers"]) == (20, 4)
    assert (phases["project"]["tokens"], phases["project"]["layers"]) == (20, 1)
    assert (phases["replay"]["tokens"], phases["replay"]["layers"]) == (8, 4)
    assert (phases["decode"]["tokens"], phases["decode"]["layers"]) == (5, 8)
    # 25 tokens are stored: the last sampled one was never fed. Owners 1 and 3 keep a row per two.
    assert record["kv_bytes"] == (12 + 12 + 25) * 35
    assert record["window_bytes"] == 8 * 8 * 33
    assert "encode" in done.stderr
    assert "index_key_rule=corrected" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "", "--prompt", "hi"], 2, "model '' is not a name or a path"),
        (["inspect", ""], 2, "no model '': neither a path nor a name"),
        (["compare", "preset:tiny", "--input-tokens", "9", "--html", ""], 2, "Is a directory; give"),
        (["compare", "preset:tiny", "--input-tokens", "9", "--html", "/"], 2, "name of the file"),
        (["bench", "serving", "--model", "preset:tiny"], 2, "has no tokenizer, which a server needs"),
        (["bench", "scaling", "--contexts", "0,5"], 2, "--contexts '0,5' and --long 0 must be"),
        (["generate", "nano", "--prompt", "a\udcff"], 2, "half of a surrogate pair"),
        (["generate", "preset:tiny"], 2, "got 0 prompts; give exactly one of --prompt"),
        (["generate", "preset:tiny", "--prompt", "hi"], 2, "has no tokenizer"),
        (["generate", "preset:tiny", "--prompt-ids", "1,x"], 2, "must be integers separated"),
        (["generate", "preset:tiny", "--prompt-ids", "64"], 2, "token id 64 is not in the vocabulary"),
        (["generate", "preset:nope", "--prompt-ids", "1"], 2, "unknown preset 'nope'; allowed:"),
        (["generate", "/nowhere", "--prompt", "hi"], 4, "is not a directory"),
        (["generate", "preset:tiny", "--prompt-file", "/nowhere"], 2, "cannot read /nowhere"),
        (["generate", "preset:tiny", "--prompt-ids", "1", "--temperature", "-1"], 2,
         "temperature=-1.0; allowed are numbers"),
        (["generate", "preset:tiny", "--prompt-ids", "1", "--replay-windows", "0"], 2,
         "replay_windows=0 must be"),
        (["generate", str(VECTORS / "m7-tiny-all"), "--prompt", "hi", "--decoder-prefill", "report"],
         2, "is not possible for this model: layer 5 has an Engram"),
        (["inspect", "nope"], 2, "no model 'nope'"),
        (["frobnicate"], 2, "No such command"),
    ],
)  # fmt: skip
def test_mistakes_exit_with_their_code_and_one_sentence(
    arguments: list[str], code: int, message: str
) -> None:
    done = cedar(*arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_directory_without_a_tokenizer_takes_and_gives_token_ids() -> None:
    model = str(VECTORS / "m1-tiny-text-bf16")
    done = cedar("generate", model, "--prompt-ids", "1,2,3", "--max-tokens", "2", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split(",")) == 2
    assert "labels  all measured" in done.stderr
    refused = cedar("generate", model, "--prompt", "hi")
    assert refused.returncode == 2
    assert "text, 'hi', but this model has no tokenizer" in refused.stderr


def test_the_offline_api_runs_token_ids_without_a_tokenizer() -> None:
    llm = LLM(VECTORS / "m1-tiny-text-bf16", max_model_len=64)
    (result,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 2
    with pytest.raises(UsageError, match="no tokenizer"):
        llm.generate("hi")


def test_a_server_of_a_directory_without_a_tokenizer_offers_no_chat() -> None:
    service = build_service(
        EngineSpec(str(VECTORS / "m1-tiny-text-bf16"), {}),
        ServerConfig(served_model_names=("m1",)),
        start_host=lambda spec: ThreadHost(spec.build().engine),
    )
    assert service.tokenizer is None
    assert service.template is None
    assert "no tokenizer" in service.no_chat


def test_a_prompt_file_named_minus_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Gr\u00fcn".encode())))
    assert read_text(Path("-")) == "Gr\u00fcn"


def test_every_report_says_which_figures_are_measured_derived_or_quoted() -> None:
    assert "labels       all derived from the config" in cedar("inspect", "preset:tiny").stdout
    done = cedar("plan", "preset:article", "--machine", "none")
    assert "labels: all derived" in done.stdout


def test_output_that_the_encoding_cannot_carry_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "\u65e5"
    done = subprocess.run(
        [sys.executable, "-m", "cedar", "page", "--model", "preset:tiny", "--out", str(folder)],
        capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        r"cedar: error: output in latin-1 cannot carry '\u65e5'; set PYTHONIOENCODING=utf-8"
    )
    assert "Traceback" not in done.stderr


def test_generate_shows_a_terminal_how_much_of_a_long_prompt_is_read() -> None:
    long = ["generate", "preset:tiny", "--prompt-ids", ",".join(["5"] * 3000), "--max-tokens", "1"]
    shown = cedar(*long, stderr=Terminal()).stderr
    assert "\rread 2,048 of 3,000 prompt tokens\rread 3,000 of 3,000 prompt tokens\n" in shown
    assert "\r" not in cedar(*long).stderr
    short = ["generate", "preset:tiny", "--prompt-ids", "5,6", "--max-tokens", "1"]
    assert "\r" not in cedar(*short, stderr=Terminal()).stderr


def test_empty_text_is_the_begin_of_sequence_id_alone_and_generate_says_so() -> None:
    done = cedar("generate", "nano", "--prompt", "", "--max-tokens", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt_tokens"] == 1
    assert (
        "reading 1 prompt token, begin-of-sequence alone because the text is empty" in done.stderr
    )
    assert "empty" not in cedar("generate", "nano", "--prompt", "a", "--max-tokens", "1").stderr


def test_empty_text_without_a_begin_of_sequence_id_is_refused() -> None:
    tokenizer = find_tokenizer("nano")
    assert tokenizer is not None
    assert encode_prompt("", tokenizer) == [tokenizer.bos_id]
    tokenizer.bos_id = None
    with pytest.raises(RequestError, match=r"'' has no tokens, and .* no begin-of-sequence id"):
        encode_prompt("", tokenizer)


def test_generate_refuses_more_tokens_than_the_model_has_positions() -> None:
    done = cedar("generate", "preset:tiny", "--prompt-ids", "5,6,7", "--max-tokens", "1000000000")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == (
        "cedar: error: --max-tokens 1000000000 does not fit: prompt 3 + 1000000000 > the model's "
        "max_position_embeddings 4096; lower it to 4093"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [("inspect", "nano"), ("--help",), ("plan", "nano")])
def test_output_that_cannot_be_written_is_one_line_and_a_failure(
    arguments: tuple[str, ...],
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cedar", *arguments], stdout=full, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("cedar: error: ") and "No space left on device" in line
