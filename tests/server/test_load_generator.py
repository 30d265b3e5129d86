"""A load generator that others use runs against the server with `nano`: no request fails.

guidellm pulls some eighty packages, so it is no dependency: install it anywhere and put it on PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from test_serve_process import running

from cedar.model_directory import resolve_model

GUIDELLM = shutil.which("guidellm")


@pytest.mark.slow
@pytest.mark.skipif(GUIDELLM is None, reason="guidellm is not on PATH")
def test_guidellm_finishes_every_request_it_waits_for(tmp_path: Path) -> None:
    model, report = resolve_model("nano"), tmp_path / "report.json"
    with running(Path("nano"), "--max-num-seqs", "4") as (process, url):
        command = [
            str(GUIDELLM), "run", "--backend",
            f'{{"kind": "openai_http", "target": "{url}", "api_key": "sesame"}}', "--profile",
            "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=24", "--data",
            "kind=synthetic_text,prompt_tokens=64,output_tokens=16", "--tokenizer",
            f"kind=huggingface_auto,model={model}", "--output", f"kind=json,path={report}",
            "--disable-console-interactive",
        ]  # fmt: skip
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=200, env=environment, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        metrics = httpx.get(f"{url}/metrics").text
        assert process.poll() is None
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["errored"] == 0 and totals["successful"] >= 20
    assert "cedar:requests_refused_total{" not in metrics
