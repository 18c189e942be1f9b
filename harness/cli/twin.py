"""``vllm-harness twin``: serve the twin, with vLLM's flags by vLLM's names; its pool and step time by hand, or of a plan."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.errors import UsageError

if TYPE_CHECKING:
    from calibration.steptime import StepModel
    from calibration.twin.config import EngineConfig, Speculation
    from harness.twin_server import TwinConfig

#: what holds without --gpu: a pool of some 450,000 tokens, and the step of an 8B model on one large GPU
_FLAGS = {"max_model_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "block_size": 16}
_BLOCKS = 28_000
_STEP_MS = {"step_ms": 12.0, "per_sequence_ms": 0.05, "per_1k_kv_tokens_ms": 0.02, "per_1k_prefill_tokens_ms": 30.0}

_VLLM, _PLAN, _TIME, _SERVER = "vLLM's flags", "Of a plan", "Step time and lengths", "Server"


def command(
    model: Annotated[
        str,
        typer.Option("--model", help="Name of the model; with --gpu one of the catalog.", rich_help_panel=_VLLM),
    ] = "twin",
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="Name clients use.", rich_help_panel=_VLLM)
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Context (8192).", rich_help_panel=_VLLM)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="Running requests at most (256).", rich_help_panel=_VLLM)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option("--max-num-batched-tokens", help="Tokens of one step at most (8192).", rich_help_panel=_VLLM),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", help="Tokens of a block (16).", rich_help_panel=_VLLM)
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None,
        typer.Option(
            "--num-gpu-blocks-override",
            help="Blocks of the pool, the null block included (28000).",
            rich_help_panel=_VLLM,
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Find known prefixes (yes; of a plan or calibration as there).",
            rich_help_panel=_VLLM,
        ),
    ] = None,
    scheduling_policy: Annotated[
        str, typer.Option("--scheduling-policy", help="fcfs or priority.", rich_help_panel=_VLLM)
    ] = "fcfs",
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Schedule a step before the one running has ended (no; with --gpu as vLLM decides).",
            rich_help_panel=_VLLM,
        ),
    ] = None,
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
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="Pool, flags and step time as `plan` has them for it.", rich_help_panel=_PLAN),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tp", "--tensor-parallel-size", help="GPUs a replica is cut over.", rich_help_panel=_PLAN)
    ] = 1,
    weights: Annotated[str, typer.Option("--weights", help="Format of the weights.", rich_help_panel=_PLAN)] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv", "--kv-cache-dtype", help="Format of the cache.", rich_help_panel=_PLAN)
    ] = "auto",
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="The calibrated deployment; with --gpu, factors that correct the plan.",
            rich_help_panel=_PLAN,
        ),
    ] = None,
    transfer: Annotated[
        bool,
        typer.Option(
            "--transfer", help="Take the factors for another deployment on the same GPU.", rich_help_panel=_PLAN
        ),
    ] = False,
    step_ms: Annotated[float | None, typer.Option("--step-ms", help="Of any step (12).", rich_help_panel=_TIME)] = None,
    per_sequence_ms: Annotated[
        float | None,
        typer.Option("--per-sequence-ms", help="More, for each decoding sequence (0.05).", rich_help_panel=_TIME),
    ] = None,
    per_1k_kv_tokens_ms: Annotated[
        float | None,
        typer.Option("--per-1k-kv-tokens-ms", help="More, per 1000 resident KV tokens (0.02).", rich_help_panel=_TIME),
    ] = None,
    per_1k_prefill_tokens_ms: Annotated[
        float | None,
        typer.Option("--per-1k-prefill-tokens-ms", help="More, per 1000 prompt tokens (30).", rich_help_panel=_TIME),
    ] = None,
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
    from dataclasses import replace

    from harness.twin_server import TwinConfig

    steps = dict(zip(_STEP_MS, (step_ms, per_sequence_ms, per_1k_kv_tokens_ms, per_1k_prefill_tokens_ms), strict=True))
    flags = {
        **dict(zip(_FLAGS, (max_model_len, max_num_seqs, max_num_batched_tokens, block_size), strict=True)),
        "num_gpu_blocks_override": num_gpu_blocks_override,
    }
    replicas = data_parallel_size
    if gpu is None and calibration is not None:
        _refuse_step_times(steps)
        _refuse_changes(
            {**flags, "tp": tensor_parallel_size, "dp": data_parallel_size, "weights": weights, "kv": kv_cache_dtype}
        )
        engine, step_time, replicas, name = _of_calibration(calibration)
        model = name if model == "twin" else model
    elif gpu is None:
        _refuse_plan_options(tensor_parallel_size, weights, kv_cache_dtype, transfer)
        engine, step_time = _by_hand(flags, steps)
    else:
        _refuse_step_times(steps)
        options = {"tp": tensor_parallel_size, "dp": data_parallel_size, "weights": weights, "kv": kv_cache_dtype}
        engine, step_time = _of_plan(model, gpu, {**flags, **options}, calibration, transfer=transfer)
    engine = replace(
        engine,
        enable_prefix_caching=engine.enable_prefix_caching if enable_prefix_caching is None else enable_prefix_caching,
        scheduling_policy=scheduling_policy,  # type: ignore[arg-type]  # checked there
        async_scheduling=engine.async_scheduling if async_scheduling is None else async_scheduling,
        speculation=_speculation(speculative_acceptance),
    )
    config = TwinConfig(
        model=model,
        served_model_name=served_model_name,
        engine=engine,
        step_time=step_time,
        data_parallel_size=replicas,
        api_key=api_key,
        seed=seed,
        noise=noise,
        time_scale=time_scale,
        free_output_tokens=free_output_tokens,
    )
    _run(config, host, port)


def _refuse_plan_options(tp: int, weights: str, kv: str, transfer: bool) -> None:
    given = {"--tp": tp != 1, "--weights": weights != "auto", "--kv": kv != "auto", "--transfer": transfer}
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"{name} is given without --gpu", "name the GPU, and a --model of the catalog")


def _refuse_changes(flags: dict[str, Any]) -> None:
    """A calibration is of one deployment."""
    for name, value in flags.items():
        if value not in (None, 1, "auto"):
            raise UsageError(
                f"--{name.replace('_', '-')} with --calibration alone, which is of one deployment",
                "to carry its factors over to another, name its --model and --gpu and give --transfer",
            )


def _refuse_step_times(steps: dict[str, float | None]) -> None:
    for name, value in steps.items():
        if value is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} and --gpu are both given: expected one source of the step time",
                "leave --gpu away to set the step time by hand",
            )


def _by_hand(flags: dict[str, Any], steps: dict[str, float | None]) -> tuple[EngineConfig, StepModel]:
    from calibration.steptime import LinearStep
    from calibration.twin.config import EngineConfig

    values: dict[str, Any] = {
        name: flags[name] if flags[name] is not None else default for name, default in _FLAGS.items()
    }
    blocks = flags["num_gpu_blocks_override"]
    each, one, kv, prefill = (default if (ms := steps[name]) is None else ms for name, default in _STEP_MS.items())
    return (
        EngineConfig(num_gpu_blocks=_BLOCKS if blocks is None else blocks, **values),
        LinearStep(each / 1e3, one / 1e3, kv / 1e6, prefill / 1e6),
    )


def _of_plan(
    model: str, gpu: str, options: dict[str, Any], calibration: Path | None, *, transfer: bool
) -> tuple[EngineConfig, StepModel]:
    from calibration.catalog import find_gpu, find_model
    from calibration.deployment import resolve_deployment
    from calibration.twin.deploy import twin_of
    from harness.cli.calibrated import known_of

    if transfer and calibration is None:
        raise UsageError("--transfer is given without --calibration", "name the file whose factors are carried over")
    deployment = resolve_deployment(find_model(model), gpu=find_gpu(gpu), **options)
    known = None if calibration is None else known_of(calibration, deployment, transfer=transfer)
    return twin_of(deployment, None if known is None else known.factors)


def _of_calibration(path: Path) -> tuple[EngineConfig, StepModel, int, str]:
    """Engine, step time, replicas and name of the deployment that was calibrated."""
    from calibration.twin.deploy import twin_of
    from harness.cli.calibrated import known_of

    known = known_of(path, None, transfer=False)
    architecture = known.deployment.architecture
    name = known.calibration.deployment.served_model or architecture.catalog_name or architecture.name
    return (*twin_of(known.deployment, known.factors), known.deployment.dp, name)


def _speculation(acceptance: str | None) -> Speculation | None:
    from calibration.twin.config import Speculation

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
    """uvloop where it is installed: its reads and wakes cost half."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.run
    return uvloop.run
