"""`cedar serve MODEL`: the OpenAI-compatible server. One line on stdout when it is ready."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import click

from cedar.cli.options import model_options
from cedar.errors import EngineDeadError, UsageError
from cedar.units import parse_bytes


@click.command()
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="0 takes a free port.")
@click.option("--served-model-name", multiple=True,
              help="Name in the API; repeatable, the first is shown. Default: MODEL as given.")  # fmt: skip
@click.option("--api-key", multiple=True,
              help="Key that clients must send; repeatable. Also CEDAR_API_KEY.")  # fmt: skip
@click.option("--max-model-len", type=int,
              help="Tokens of a request, prompt and output. Default: the model's, up to 8192.")  # fmt: skip
@click.option("--max-num-seqs", type=int, default=8, show_default=True, help="Requests in a batch.")
@click.option("--max-num-batched-tokens", type=int, default=2048, show_default=True,
              help="Prompt tokens read per step.")  # fmt: skip
@click.option("--block-size", type=int, default=128, show_default=True, help="Tokens per KV block.")
@click.option("--num-blocks", type=int, help="KV blocks; default: enough for every request.")
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True,
              show_default=True, help="Reuse the rows of equal prefixes.")  # fmt: skip
@click.option("--prefix-store-dir", type=click.Path(path_type=Path),
              help="Directory that keeps prefixes on disk, also after the server has ended.")  # fmt: skip
@click.option("--prefix-store-size",
              help="Most that all files in it may take together, such as 8GiB (the default).")  # fmt: skip
@click.option("--prefix-store-windows", is_flag=True,
              help="Also keep windows there: no replay after a hit, several times the bytes.")  # fmt: skip
@click.option("--encoder-replay", type=click.Choice(["bounded", "exact"]), default="bounded",
              show_default=True, help="How windows are rebuilt after a prefix hit.")  # fmt: skip
@click.option("--decoder-prefill", type=click.Choice(["report", "cut", "exact", "full"]),
              help="Decoder rows of a prompt; default report, or full where CED is impossible.")  # fmt: skip
@click.option("--replay-windows", type=int, default=1, show_default=True,
              help="Windows that report and cut run through the decoder.")  # fmt: skip
@click.option("--chat-template", type=click.Path(path_type=Path), help="Jinja template to use.")
@click.option("--max-waiting", type=int, default=256, show_default=True,
              help="Completions that may wait; more get 429.")  # fmt: skip
@click.option("--max-body-bytes", type=int, default=32 * 2**20, show_default=True,
              help="Largest request body.")  # fmt: skip
@click.option("--keep-alive-seconds", type=float, default=15.0, show_default=True,
              help="Silence on a stream after which a comment is sent.")  # fmt: skip
@click.option("--grace-seconds", type=float, default=30.0, show_default=True,
              help="Time for running requests after SIGTERM.")  # fmt: skip
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]),
              default="warning", show_default=True)  # fmt: skip
def serve(
    model: str, kernels: str, dtype: str, index_key_rule: str, seed: int, host: str, port: int,
    served_model_name: tuple[str, ...], api_key: tuple[str, ...], chat_template: Path | None,
    max_waiting: int, max_body_bytes: int, keep_alive_seconds: float, grace_seconds: float,
    log_level: str, prefix_store_dir: Path | None, prefix_store_size: str | None,
    prefix_store_windows: bool, **engine: Any,
) -> None:  # fmt: skip
    """Serve a model over HTTP, with OpenAI's API."""
    try:
        from cedar.server.launch import CedarServer, bind, build_service, url_of
    except ModuleNotFoundError as error:
        raise UsageError(
            f"serving needs the package {error.name!r}; pip install 'cedar-llm[serve]'"
        ) from None
    from cedar.server.config import LOG_FORMAT, ServerConfig
    from cedar.server.engine_wire import EngineSpec

    logging.basicConfig(level=log_level.upper(), format=LOG_FORMAT)
    engine |= _store_fields(
        prefix_store_dir, prefix_store_size, prefix_store_windows, engine["enable_prefix_caching"]
    )
    keys = api_key or tuple(filter(None, (os.environ.get("CEDAR_API_KEY"),)))
    config = ServerConfig(
        host=host, port=port, served_model_names=served_model_name or (model,), api_keys=keys,
        max_waiting=max_waiting, max_body_bytes=max_body_bytes,
        keep_alive_seconds=keep_alive_seconds, grace_seconds=grace_seconds,
    )  # fmt: skip
    bound = bind(config)
    spec = EngineSpec(model, engine, kernels, dtype, index_key_rule, seed)
    service = build_service(spec, config, chat_template=chat_template)
    url = url_of(bound)
    server = CedarServer(service, lambda: click.echo(f"cedar serves {service.name} at {url}"))
    server.run(sockets=[bound])
    if service.engine.failure is not None:
        raise EngineDeadError(
            f"the engine has died: {service.engine.failure}; its own messages are above, start the "
            "server again"
        )


def _store_fields(
    directory: Path | None, size: str | None, windows: bool, caching: bool
) -> dict[str, Any]:
    """Engine fields of the prefix store.

    Raises:
        UsageError: the size is no size, or an option has no effect without the other.
    """
    if directory is None:
        given = "--prefix-store-windows" if windows else f"--prefix-store-size {size}"
        if windows or size is not None:
            raise UsageError(
                f"{given} has no effect without a store; give --prefix-store-dir DIR as well, or "
                f"leave it out"
            )
        return {}
    if not caching:
        raise UsageError(
            f"--no-enable-prefix-caching and --prefix-store-dir {directory} contradict each other: a "
            f"store is a prefix cache on disk; leave one of them out"
        )
    fields: dict[str, Any] = {
        "prefix_store_dir": str(directory), "prefix_store_windows": windows,
    }  # fmt: skip
    if size is not None:
        fields["prefix_store_size"] = parse_bytes(size, "--prefix-store-size")
    return fields
