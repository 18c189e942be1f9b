"""``plan --base-url``: a running server's own numbers in place of the prior, and the difference as a correction factor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from calibration.errors import InputError
from harness.errors import UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from calibration.deployment import Deployment
    from calibration.memory_correction import MemoryCorrection
    from harness.observe.probe import ProbeResult

GIB = 1 << 30


class Server(NamedTuple):
    """A probed server: what was taken from it, by the option's name."""

    probed: ProbeResult
    taken: dict[str, Any]


class Corrected(NamedTuple):
    """A server, and its pool beside the predicted one."""

    server: Server
    correction: MemoryCorrection


def add_options(parser: ArgumentParser) -> None:
    """The options of ``plan`` that ask a server."""
    add = parser.add_argument_group("a running server").add_argument
    add("--base-url", metavar="URL", help="take flags and pool from this server; the difference to the prior is shown")
    add("--served-model", metavar="NAME", help="which of its models; needed only where the server has several")
    add("--api-key", metavar="KEY", help="better given by OPENAI_API_KEY, where no process list shows it")
    add("--metrics-url", metavar="URL", help="where /metrics is, if not below --base-url")
    add("--insecure", action="store_true", help="do not verify the server's TLS certificate")


def ask(asked: Namespace) -> Server | None:
    """Probe the server of ``--base-url`` and fill the options that were not given with what it shows; None where none is
    asked for.

    Raises:
        UsageError: together with ``--fit`` or ``--preset``, or no URL.
        Unreachable, Refused, NotVllm: the server cannot be used.
        InputError: it shows no KV pool.
    """
    if asked.base_url is None:
        return None
    if asked.fit or asked.preset is not None:
        raise UsageError("--base-url with --fit or --preset, expected the deployment that the server runs")
    probed = _probe(asked)
    if probed.pool is None or probed.pool.num_blocks is None:
        raise InputError(
            f"{probed.base_url} does not show its KV pool: {_why_missing(probed)}",
            "plan without --base-url uses the prior",
        )
    return Server(probed, _fill(asked, probed))


def _probe(asked: Namespace) -> ProbeResult:
    import asyncio
    import os

    from harness.http_get import Getter
    from harness.observe.probe import probe

    key = asked.api_key or os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY")

    async def found() -> ProbeResult:
        async with Getter(api_key=key, key_url=asked.base_url, verify_tls=not asked.insecure) as getter:
            return await probe(getter, asked.base_url, model=asked.served_model, metrics_url=asked.metrics_url)

    return asyncio.run(found())


def _why_missing(probed: ProbeResult) -> str:
    return next((item.what for item in probed.missing if "metrics" in item.what or "pool" in item.what), "no /metrics")


def _fill(asked: Namespace, probed: ProbeResult) -> dict[str, Any]:
    """Set what was not asked for, as the server shows it. A pool whose size was given to the server is given here too."""
    pool = probed.pool
    assert pool is not None
    shown: dict[str, Any] = {
        "vllm_version": probed.vllm_version,
        "dp": probed.engines,
        "max_model_len": probed.max_model_len,
        "max_num_seqs": probed.max_num_seqs,
        "max_num_batched_tokens": probed.max_num_batched_tokens,
        "gpu_memory_utilization": pool.gpu_memory_utilization,
        "kv": pool.kv_cache_dtype,
        "enable_prefix_caching": pool.prefix_caching,
        "kv_cache_memory_bytes": None if asked.kv_cache_memory is not None else _text(pool.kv_cache_memory_bytes),
        "num_gpu_blocks_override": pool.num_gpu_blocks_override,
    }
    taken = {key: value for key, value in shown.items() if value is not None and getattr(asked, key) is None}
    for key, value in taken.items():
        setattr(asked, key, value)
    if asked.gpu is None and asked.kv_cache_memory is None and asked.kv_cache_memory_bytes is None:
        # without a GPU there is nothing to predict a pool from: the server's stands alone
        asked.num_gpu_blocks_override = pool.num_blocks
    return taken


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


def model_of(server: Server) -> str:
    """The catalog name, or the folder or Hugging Face id the server loaded, under which its architecture is found.

    Raises:
        InputError: none is known under that name.
    """
    from calibration.catalog import find_model

    names = [name for name in (server.probed.model_root, server.probed.model) if name]
    for name in names:
        try:
            find_model(name)
        except InputError:
            continue
        return name
    raise InputError(
        f"model {names[0]!r} of {server.probed.base_url} is not in the catalog, expected --model NAME or CONFIG.json",
        "`vllm-harness models` lists the catalog; the config.json of the server's model is read the same way",
    )


def correct(server: Server, deployment: Deployment) -> Corrected:
    """The deployment with the server's pool, beside the one predicted.

    Raises:
        InputError: the server's pool is not one of this deployment.
    """
    from dataclasses import replace

    from calibration.kv_cache import cache_groups
    from calibration.memory_correction import ShownPool, correct_memory

    pool = server.probed.pool
    assert pool is not None
    assert pool.num_blocks is not None
    given = pool.num_gpu_blocks_override is not None or pool.kv_cache_memory_bytes is not None
    default = min(group.cache.block_size for group in cache_groups(deployment))
    if deployment.block_size is None and pool.block_size not in (None, default):
        deployment = replace(deployment, block_size=pool.block_size)
    shown = ShownPool(num_blocks=pool.num_blocks, block_size=pool.block_size, size_tokens=pool.tokens, is_given=given)
    return Corrected(server, correct_memory(deployment, shown))


def refuse_several(asked: Namespace) -> None:
    """A server runs one deployment.

    Raises:
        UsageError: ``--base-url`` beside lists of GPUs, splits or formats.
    """
    if asked.base_url is not None:
        raise UsageError("--base-url with several deployments, expected the one that the server runs")


def document(corrected: Corrected | None) -> dict[str, Any]:
    """What ``plan --json`` adds: the server, what was taken from it, and the first correction factor."""
    if corrected is None:
        return {}
    server, correction = corrected
    taken = {key: int(value) if key == "kv_cache_memory_bytes" else value for key, value in server.taken.items()}
    return {
        "server": {"base_url": server.probed.base_url, "model": server.probed.model, "taken": taken},
        "corrections": {"memory_overhead": correction.to_json()},
    }


def sentence(correction: MemoryCorrection) -> str:
    """The server's pool, the predicted one, and what the difference means."""
    shown, predicted = correction.shown, correction.predicted
    own = f"The server's own pool: {shown.size_tokens:,} tokens ({shown.num_blocks:,} blocks)"
    if correction.deployment.gpu is None and correction.deployment.kv_cache_memory_bytes is None:
        return f"{own}. Name its --gpu to see beside it what the model predicts."
    if predicted is None:
        return f"{own}; predicted was none. {_factor(correction)}"
    error = correction.pool_error
    if not error:
        return f"{own}, exactly as predicted. {_factor(correction)}"
    theirs = f"{predicted.size_tokens:,} ({predicted.num_blocks:,} blocks, {error:+.1%})"
    return f"{own}; predicted {theirs}. {_factor(correction)}"


def _factor(correction: MemoryCorrection) -> str:
    ratio, difference, measured = correction.ratio, correction.difference_bytes, correction.measured_bytes
    if ratio is None or difference is None or measured is None:
        return "Its size was given, so it says nothing of the memory beside it: no correction."
    return (
        f"Correction factor memory_overhead {ratio:.3f}: beside weights and pool the runtime takes {measured / GIB:.2f} GiB "
        f"of each GPU, {difference / GIB:+.2f} GiB against the prior. This plan uses the server's."
    )
