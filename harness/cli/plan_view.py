"""What ``plan`` shows: the JSON document of the contract, and the tables for people. Pure: values in, values out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calibration.limits import max_context
from harness.cli import plan_limits
from harness.cli.columns import columns

if TYPE_CHECKING:
    from calibration.limits import Sizing
    from calibration.plan import Plan

GIB = 1 << 30


def document(plan: Plan, sizing: Sizing | None = None) -> dict[str, Any]:
    """The document of ``plan --json`` (DESIGN section 7). Bytes are whole numbers; what is not known is null.

    ``memory.per_gpu`` is one GPU of the stage with the least room; its ``kv_bytes_per_token`` are the bytes one token
    takes on it. ``memory.cluster`` is all GPUs of all replicas; its ``kv_bytes_per_token`` counts each token once,
    whatever the ranks copy, and its ``kv_pool_tokens`` is what vLLM prints, summed over replicas.
    """
    return {
        "deployment": _deployment(plan),
        "memory": {"per_gpu": _per_gpu(plan), "cluster": _cluster(plan)},
        "fits": plan.memory.fits,
        "users": _users(plan) if sizing is None else plan_limits.users_json(sizing.limits),
        "throughput_tokens_per_s": None,
        "tpot_ms": None,
        "ttft_ms": None,
        **({} if sizing is None else plan_limits.sizing_json(sizing)),
        "max_context_tokens": max_context(plan),
        "warnings": list(plan.warnings),
    }


def _deployment(plan: Plan) -> dict[str, Any]:
    d = plan.deployment
    architecture = d.architecture
    return {
        "model": architecture.catalog_name or architecture.source,
        "architecture": architecture.name,
        "gpu": None if d.gpu is None else d.gpu.name,
        "gpus": d.gpus,
        "device": d.device,
        "vllm_version": d.vllm_version,
        "tp": d.tp,
        "pp": d.pp,
        "dp": d.dp,
        "expert_parallel": d.expert_parallel,
        "dtype": d.dtype,
        "weights": d.weights.name,
        "kv": d.kv.name,
        "max_model_len": d.max_model_len,
        "max_num_seqs": d.max_num_seqs,
        "max_num_batched_tokens": d.max_num_batched_tokens,
        "gpu_memory_utilization": None if d.gpu is None else d.gpu_memory_utilization,
        "num_gpu_blocks_override": d.num_gpu_blocks_override,
        "kv_cache_memory_bytes": d.kv_cache_memory_bytes,
        "enable_prefix_caching": d.enable_prefix_caching,
        "prompt_tokens": plan.load.prompt_tokens,
        "output_tokens": plan.load.output_tokens,
        "given": sorted(d.given),
        "params_total": architecture.params_total,
        "params_active": architecture.params_active,
    }


def _per_gpu(plan: Plan) -> dict[str, Any]:
    memory, pool = plan.memory, plan.memory.pool
    stage = memory.tightest
    return {
        "total_bytes": None if plan.deployment.gpu is None else plan.deployment.gpu.usable_bytes,
        "weights_bytes": stage.weights.total_bytes,
        "overhead_bytes": None if stage.overhead is None else stage.overhead.total_bytes,
        "kv_pool_bytes": plan.memory.pool_bytes,
        "kv_bytes_per_token": memory.kv_bytes_per_token_per_gpu,
        "kv_pool_tokens": 0 if pool is None else pool.size_tokens,
        "num_blocks": 0 if pool is None else pool.num_blocks,
        "block_size": None if pool is None else pool.block_size,
    }


def _cluster(plan: Plan) -> dict[str, Any]:
    d, pool = plan.deployment, plan.memory.pool
    copies = d.tp * d.dp
    overheads = [stage.overhead.total_bytes for stage in plan.memory.stages if stage.overhead is not None]
    return {
        "total_bytes": None if d.gpu is None else d.gpu.usable_bytes * d.gpus,
        "weights_bytes": sum(stage.weights.total_bytes for stage in plan.memory.stages) * copies,
        "overhead_bytes": sum(overheads) * copies if overheads else None,
        "kv_pool_bytes": plan.memory.pool_bytes * d.gpus,
        "kv_bytes_per_token": plan.memory.kv_bytes_per_token,
        "kv_pool_tokens": 0 if pool is None else pool.size_tokens * d.dp,
        "num_blocks": 0 if pool is None else pool.num_blocks * d.dp,
        "block_size": None if pool is None else pool.block_size,
    }


def _users(plan: Plan) -> dict[str, Any]:
    """Limits where nothing can be timed."""
    ranked = limits(plan)
    return {
        "kv_full": plan.kv_full,
        "kv_staggered": plan.kv_staggered,
        "max_num_seqs": plan.max_num_seqs,
        "tpot": None,
        "ttft": None,
        "knee": None,
        "binding": ranked[0][0],
        "next": ranked[1][0] if len(ranked) > 1 else None,
    }


def limits(plan: Plan) -> list[tuple[str, float]]:
    """The limits on users that are known, the smallest first. The pool counts once, as what it holds on average."""
    found = [("kv_staggered", plan.kv_staggered), ("max_num_seqs", float(plan.max_num_seqs))]
    return sorted(found, key=lambda item: item[1])


def headline(plan: Plan) -> str:
    """One line: what is planned."""
    d = plan.deployment
    name = d.architecture.catalog_name or d.architecture.source
    where = f"{d.gpus} x {d.gpu.title}" if d.gpu is not None else f"a given pool ({d.device})"
    ways = [f"{key} {value}" for key, value in (("TP", d.tp), ("PP", d.pp), ("DP", d.dp)) if value > 1]
    ways += ["EP"] if d.expert_parallel else []
    split = f" ({', '.join(ways)})" if ways else ""
    return f"{name} on {where}{split}: {d.weights.name} weights, {d.kv.name} KV, vLLM {d.vllm_version}"


def sentence(plan: Plan, sizing: Sizing | None = None) -> str:
    """What binds and why, in one sentence."""
    d, pool = plan.deployment, plan.memory.pool
    if not plan.memory.fits:
        return f"It does not fit: {plan.memory.reason}. --fit finds the fewest GPUs that do."
    if pool is None:
        return "There is no pool."
    if sizing is not None:
        return sizing.why
    length = f"{plan.load.prompt_tokens:,} + {plan.load.output_tokens:,} tokens"
    holds = f"the pool holds {plan.kv_full:.1f} streams of {length} at their end, {plan.kv_staggered:.1f} on average"
    if limits(plan)[0][0] == "max_num_seqs":
        return f"max_num_seqs ({plan.max_num_seqs}) binds: {holds}, more than vLLM runs at once."
    engines = f" on {d.dp} engines" if d.dp > 1 else ""
    return f"The KV pool binds: {pool.size_tokens * d.dp:,} tokens{engines}; {holds}."


def bar(plan: Plan, width: int = 60) -> str:
    """The memory of one GPU as a bar, and what its letters mean; empty where no GPU is planned."""
    parts, gpu = plan.memory.parts, plan.deployment.gpu
    if parts is None or gpu is None:
        return ""
    total = max(gpu.usable_bytes, parts.weights)
    letters = zip("Wok-.", parts, strict=True)
    cells = "".join(letter * round(width * size / total) for letter, size in letters)
    unused = "- unused, " if parts.unused else ""
    return f"[{cells[:width].ljust(width, ' ')}]  W weights, o overhead, k KV pool, {unused}. left to others"


def memory_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """(what, bytes, share of the GPU, meaning) of one GPU."""
    d, stage = plan.deployment, plan.memory.tightest
    total = None if d.gpu is None else d.gpu.usable_bytes
    rows: list[tuple[str, int | None, str]] = []
    if total is not None and d.gpu is not None and stage.budget_bytes is not None:
        rows.append(("total", total, f"what CUDA reports on one {d.gpu.title}"))
        rows.append(("usable", stage.budget_bytes, f"gpu_memory_utilization {d.gpu_memory_utilization:g} of it"))
    rows.append(("weights", stage.weights.total_bytes, _weights_meaning(plan)))
    if stage.overhead is not None:
        rows.append(("runtime and activation buffer", stage.overhead.total_bytes, _overhead_meaning(plan)))
    rows.append(("KV pool", plan.memory.pool_bytes, _pool_meaning(plan)))
    meaning = f"{plan.load.prompt_tokens:,} + {plan.load.output_tokens:,} tokens, {plan.stream_blocks} blocks"
    rows.append(("KV per stream", plan.stream_bytes, meaning if plan.stream_blocks else "no pool, no stream"))
    longest = max_context(plan)
    return [
        *((name, _gib(size), _share(size, total), text) for name, size, text in rows),
        ("longest request", f"{longest:,}", "", f"tokens; {_longest_meaning(plan, longest)}"),
    ]


def _longest_meaning(plan: Plan, longest: int) -> str:
    if not longest:
        return "not even one token fits"
    if longest >= max(plan.deployment.architecture.context, plan.deployment.max_model_len):
        return "the model's own limit: the pool holds at least one of these"
    return "more the pool does not hold, even for one stream alone"


def _weights_meaning(plan: Plan) -> str:
    d, stage = plan.deployment, plan.memory.tightest
    parts = [f"{d.architecture.params_total / 1e9:.2f} B parameters in {d.weights.name}"]
    if stage.weights.replicated_bytes and d.tp > 1:
        parts.append(f"{_gib(stage.weights.replicated_bytes)} of it on every rank")
    return ", ".join(parts)


def _overhead_meaning(plan: Plan) -> str:
    overhead = plan.memory.tightest.overhead
    if overhead is None:
        return ""
    if overhead.correction_bytes is not None:
        return f"what the server leaves beside weights and pool; the prior, {overhead.correction_bytes / GIB:+.2f} GiB"
    low, high = _gib(overhead.low_bytes), _gib(overhead.high_bytes)
    return f"activations {_gib(overhead.activation_bytes)}, runtime {_gib(overhead.runtime_bytes)}; {low} to {high}"


def _pool_meaning(plan: Plan) -> str:
    pool = plan.memory.pool
    if pool is None:
        return plan.memory.reason or "none"
    text = f"{pool.size_tokens:,} tokens, {pool.num_blocks:,} blocks of {pool.block_size}"
    if plan.memory.blocks_range is not None:
        low, high = (blocks / pool.num_blocks * pool.size_tokens for blocks in plan.memory.blocks_range)
        text += f" ({low:,.0f} to {high:,.0f} tokens)"
    return text


def _gib(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.2f} MiB"


def _share(size: int | None, total: int | None) -> str:
    return "" if size is None or total is None else f"{size / total:.1%}"


def limit_rows(plan: Plan, sizing: Sizing | None = None) -> list[tuple[str, str, str]]:
    """(limit, users, meaning)."""
    if sizing is not None:
        return plan_limits.limit_rows(sizing.limits, _seqs_meaning(plan))
    binding = limits(plan)[0][0]
    rows = [
        ("pool full", plan.kv_full, "all streams at their end at once: no preemption below it"),
        ("pool, staggered", plan.kv_staggered, "streams spread over their outputs: preemptions from about here"),
        ("max_num_seqs", float(plan.max_num_seqs), _seqs_meaning(plan)),
    ]
    names = {"kv_staggered": "pool, staggered", "max_num_seqs": "max_num_seqs"}
    marked = names[binding]
    return [(f"{name} <-" if name == marked else name, f"{value:,.1f}", text) for name, value, text in rows]


def _seqs_meaning(plan: Plan) -> str:
    how = "asked for" if "max_num_seqs" in plan.deployment.given else "vLLM's default here"
    return f"sequences vLLM runs at once; {how}"


def tables(plan: Plan, sizing: Sizing | None, width: int) -> tuple[str, str]:
    """The VRAM table and the limits table."""
    vram = columns([("", "bytes", "share", "meaning"), *memory_rows(plan)], width, right=(1, 2))
    users = columns([("", "users", "meaning"), *limit_rows(plan, sizing)], width, right=(1,))
    return f"Memory of one GPU\n{vram}", f"Limits on users\n{users}"
