"""`vllm-harness twin`: serve the twin, with vLLM's flags by vLLM's names and a step time of the user's."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from calibration.twin.config import Speculation
    from harness.twin_server import TwinConfig

_VLLM, _TIME, _SERVER = "vLLM's flags", "Step time and lengths", "Server"


def command(
    model: Annotated[str, typer.Option("--model", help="Name of the model.", rich_help_panel=_VLLM)] = "twin",
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="Name clients use.", rich_help_panel=_VLLM)
    ] = None,
    max_model_len: Annotated[int, typer.Option("--max-model-len", help="Context.", rich_help_panel=_VLLM)] = 8192,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", help="Running requests at most.", rich_help_panel=_VLLM)
    ] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", help="Tokens of one step at most.", rich_help_panel=_VLLM)
    ] = 8192,
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens of a block.", rich_help_panel=_VLLM)] = 16,
    num_gpu_blocks: Annotated[
        int,
        typer.Option(
            "--num-gpu-blocks-override", help="Blocks of the pool, the null block included.", rich_help_panel=_VLLM
        ),
    ] = 28_000,
    enable_prefix_caching: Annotated[
        bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", rich_help_panel=_VLLM)
    ] = True,
    scheduling_policy: Annotated[
        str, typer.Option("--scheduling-policy", help="fcfs or priority.", rich_help_panel=_VLLM)
    ] = "fcfs",
    async_scheduling: Annotated[
        bool,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Schedule a step before the one running has ended.",
            rich_help_panel=_VLLM,
        ),
    ] = False,
    data_parallel_size: Annotated[
        int, typer.Option("--data-parallel-size", help="Engines behind one front end.", rich_help_panel=_VLLM)
    ] = 1,
    speculative_acceptance: Annotated[
        str | None,
        typer.Option(
            "--speculative-acceptance",
            help="Speculative decoding: chance of acceptance by draft position, such as 0.8,0.6,0.4.",
            rich_help_panel=_VLLM,
        ),
    ] = None,
    step_ms: Annotated[float, typer.Option("--step-ms", help="Of any step.", rich_help_panel=_TIME)] = 12.0,
    per_sequence_ms: Annotated[
        float, typer.Option("--per-sequence-ms", help="More, for each decoding sequence.", rich_help_panel=_TIME)
    ] = 0.05,
    per_1k_kv_tokens_ms: Annotated[
        float,
        typer.Option("--per-1k-kv-tokens-ms", help="More, per 1000 resident KV tokens.", rich_help_panel=_TIME),
    ] = 0.02,
    per_1k_prefill_tokens_ms: Annotated[
        float, typer.Option("--per-1k-prefill-tokens-ms", help="More, per 1000 prompt tokens.", rich_help_panel=_TIME)
    ] = 30.0,
    noise: Annotated[
        float, typer.Option("--noise", help="Relative standard deviation of a step's time.", rich_help_panel=_TIME)
    ] = 0.0,
    time_scale: Annotated[
        float, typer.Option("--time-scale", help="Engine seconds in a real second.", rich_help_panel=_TIME)
    ] = 1.0,
    free_output_tokens: Annotated[
        float,
        typer.Option(
            "--free-output-tokens",
            help="Mean length of answers without ignore_eos (log-normal, drawn with the seed).",
            rich_help_panel=_TIME,
        ),
    ] = 200.0,
    seed: Annotated[int, typer.Option("--seed", help="Of everything drawn.", rich_help_panel=_TIME)] = 0,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0 takes a free one.", rich_help_panel=_SERVER)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", envvar="VLLM_API_KEY", help="Key clients must send for /v1.", rich_help_panel=_SERVER
        ),
    ] = None,
) -> None:
    """Serve the twin: a stand-in vLLM that keeps its scheduler's rules and a step time of yours."""
    from calibration.steptime import LinearStep
    from calibration.twin.config import EngineConfig
    from harness.twin_server import TwinConfig

    engine = EngineConfig(
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        scheduling_policy=scheduling_policy,  # type: ignore[arg-type]  # checked there
        async_scheduling=async_scheduling,
        speculation=_speculation(speculative_acceptance),
    )
    step_time = LinearStep(
        step_ms / 1e3, per_sequence_ms / 1e3, per_1k_kv_tokens_ms / 1e6, per_1k_prefill_tokens_ms / 1e6
    )
    config = TwinConfig(
        model=model,
        served_model_name=served_model_name,
        engine=engine,
        step_time=step_time,
        data_parallel_size=data_parallel_size,
        api_key=api_key,
        seed=seed,
        noise=noise,
        time_scale=time_scale,
        free_output_tokens=free_output_tokens,
    )
    _run(config, host, port)


def _speculation(acceptance: str | None) -> Speculation | None:
    from calibration.twin.config import Speculation
    from harness.errors import UsageError

    if acceptance is None:
        return None
    try:
        return Speculation(acceptance=tuple(float(chance) for chance in acceptance.split(",")))
    except ValueError:
        raise UsageError(
            f"--speculative-acceptance is {acceptance!r}: expected numbers in [0, 1] separated by commas"
        ) from None


def _run(config: TwinConfig, host: str, port: int) -> None:
    import sys

    from harness.errors import LocalFault
    from harness.twin_server import serve

    def ready(port: int) -> None:
        sys.stdout.write(f"twin: serving {config.name} at http://{host}:{port}\n")
        sys.stdout.flush()

    try:
        _event_loop_runner()(serve(config, host, port, ready))
    except OSError as error:
        raise LocalFault(f"cannot listen on {host}:{port}: {error.strerror}", "choose another --port, or 0") from None


def _event_loop_runner() -> Callable[[Coroutine[Any, Any, None]], None]:
    """uvloop where it is installed: its writes cost half."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.run
    return uvloop.run
