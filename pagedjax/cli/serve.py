"""``pagedjax serve``: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.interrupts import EXIT_INTERRUPTED, leaving_on_interrupt
from pagedjax.cli.loading import load, resolve_model, working
from pagedjax.cli.options import shape_options

if TYPE_CHECKING:
    from pagedjax.engine_config import EngineConfig

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@click.command()
@click.argument("model", required=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0 is every one of this machine's.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 picks a free one.")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="PAGEDJAX_API_KEY",
    metavar="KEY",
    help="Ask clients for this key; may be given several times. [env: PAGEDJAX_API_KEY, which other users of the machine cannot see]",
)
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    metavar="NAME",
    help="What clients call the model; may be given several times. [default: MODEL as given]",
)
@shape_options
@click.option("--max-num-seqs", type=int, metavar="N", help="The most answers that run side by side. [default: 256]")
@click.option("--kv-cache-bytes", type=int, metavar="BYTES", help="Memory of the KV cache. [default: what is left on the device]")
@click.option("--gpu-memory-utilization", type=float, metavar="SHARE", help="Of weights, workspace and KV cache together. [default: 0.9]")
@click.option("--no-prefix-caching", is_flag=True, help="Compute equal prefixes anew for each request.")
@click.option("--seed", type=int, default=0, show_default=True, help="From which the seeds of requests that name none are drawn.")
@click.option(
    "--max-queue", type=int, metavar="N", help="The most answers that wait beside those that run; more get status 429. [default: 512]"
)
@click.option("--max-body-bytes", type=int, metavar="BYTES", help="The largest request; a larger one gets status 413. [default: 4194304]")
@click.option(
    "--drain-seconds", "drain_s", type=float, metavar="S", help="What running answers get when the server is stopped. [default: 60]"
)
@click.option("--stuck-seconds", "stuck_s", type=float, metavar="S", help="After which /health calls a step stuck. [default: 300]")
@click.option(
    "--warm-up/--no-warm-up",
    default=None,
    help="Compile every step before listening. [default: on a GPU; on a CPU, where there are many, each when it is first needed]",
)
@click.option("--access-log", is_flag=True, help="Write one line for each request.")
def serve(
    model: str | None,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    names: tuple[str, ...],
    dtype: str,
    max_model_len: int | None,
    max_num_seqs: int | None,
    kv_cache_bytes: int | None,
    gpu_memory_utilization: float | None,
    no_prefix_caching: bool,
    seed: int,
    warm_up: bool | None,
    access_log: bool,
    **limits: Any,
) -> None:
    """Serve MODEL over HTTP, as OpenAI's clients expect it.

    Ctrl-C or SIGTERM lets running answers finish; a second one does not.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(f"serving needs {', '.join(missing)}: pip install 'pagedjax[serve]'")
    from pagedjax.server.run import listen
    from pagedjax.server.settings import ServerConfig

    given = {name: value for name, value in limits.items() if value is not None}
    config = ServerConfig(model_names=names or (_name(model),), api_keys=api_keys, **given)
    engine_config = _engine_config(max_num_seqs, kv_cache_bytes, gpu_memory_utilization, not no_prefix_caching)
    bound = listen(host, port)
    path = resolve_model(model)
    with leaving_on_interrupt():
        llm = load(path, dtype=dtype, max_model_len=max_model_len, seed=seed, engine_config=engine_config)
        import jax

        if warm_up or (warm_up is None and jax.default_backend() == "gpu"):
            with working("compiling"):
                llm.engine.warmup(use_tqdm=False)
    at = bound.getsockname()
    address = f"http://{f'[{at[0]}]' if ':' in at[0] else at[0]}:{at[1]}"
    click.echo(f"{', '.join(config.model_names)}: chat at {address}/, OpenAI's interface at {address}/v1", err=True)
    click.echo(
        f"up to {llm.max_model_len} tokens a request, {llm.engine.num_kv_blocks} KV blocks of {llm.engine.engine_config.block_size}",
        err=True,
    )
    if not api_keys and not ipaddress.ip_address(at[0].split("%")[0]).is_loopback:
        click.echo("pagedjax: warning: no --api-key, and others than this machine may reach this address", err=True)
    from pagedjax.server.run import serve as run

    if run(llm, config, bound, access_log=access_log) == signal.SIGINT:
        raise click.exceptions.Exit(EXIT_INTERRUPTED)


def _name(model: str | None) -> str:
    if model is None:
        return "SmolLM2-135M-Instruct"
    # A hub id is a name already; of a folder or file the last part is.
    return Path(os.path.abspath(model)).name if os.path.exists(model) else model


def _engine_config(
    max_num_seqs: int | None, kv_cache_bytes: int | None, gpu_memory_utilization: float | None, prefix_caching: bool
) -> EngineConfig:
    from pagedjax.engine_config import EngineConfig

    given = dict(max_num_seqs=max_num_seqs, kv_cache_bytes=kv_cache_bytes, gpu_memory_utilization=gpu_memory_utilization)
    named = {name: value for name, value in given.items() if value is not None}
    return EngineConfig(**named, enable_prefix_caching=prefix_caching)  # type: ignore[arg-type]
