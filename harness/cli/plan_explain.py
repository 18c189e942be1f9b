"""``plan --explain``: which physics decided each number, in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calibration.kv_cache import Group
    from calibration.plan import Plan

_KINDS = {
    "full": "hold every token",
    "mla": "hold one latent a token, whole on every tensor-parallel rank",
    "sliding": "hold a window",
    "chunked": "hold the running chunk",
    "state": "hold a state of fixed size",
}


def paragraphs(plan: Plan) -> list[str]:
    """One paragraph for each thing that decided a number of this plan."""
    found = [_weights(plan)]
    if plan.memory.tightest.overhead is not None:
        found.append(_overhead(plan))
    found.append(_pool(plan))
    if plan.memory.pool is not None:
        found += [_groups(plan), _streams(plan), _preemption()]
    return [*found, _decode(plan), _prefill()]


def _weights(plan: Plan) -> str:
    d, stage = plan.deployment, plan.memory.tightest
    return (
        f"Weights. {d.architecture.params_total:,} parameters; {d.weights.name} covers the matrices of the layers, while "
        f"embedding, output head, routers and norms stay in {d.dtype}. Tensor parallelism slices the matrices over {d.tp} "
        f"GPU(s); norms and routers are copied, and so are key and value projections where there are fewer KV heads than "
        f"ranks. That is {stage.weights.total_bytes:,} bytes on one GPU."
    )


def _overhead(plan: Plan) -> str:
    d, overhead = plan.deployment, plan.memory.tightest.overhead
    assert overhead is not None
    return (
        f"Runtime and activation buffer. Before it sizes the pool, vLLM runs {d.max_num_batched_tokens:,} tokens through "
        f"the model and samples for {d.max_num_seqs:,} sequences. The sampler's sort over {d.architecture.vocab_size:,} "
        f"logits each takes {overhead.sampler_bytes:,} bytes, the widest layer {overhead.forward_bytes:,}; the larger "
        f"counts, and hidden states of {overhead.hidden_bytes:,} stay beside it. Lowering max_num_seqs gives memory back. "
        f"CUDA context and communication take {overhead.runtime_bytes:,}, graphs {overhead.cuda_graph_bytes:,}."
        + (
            ""
            if overhead.correction_bytes is None
            else f" The server takes {overhead.correction_bytes:+,} beside that."
        )
    )


def _pool(plan: Plan) -> str:
    memory = plan.memory
    if memory.pool is None:
        return f"KV pool. None: {memory.reason}."
    given = "The pool was given." if memory.pool_is_given else "What is left of the usable memory is the pool."
    return (
        f"KV pool. {given} It is cut into blocks of {memory.pool.block_size} tokens ({memory.pool.bytes_per_block:,} bytes "
        f"each); a request takes blocks as it grows and gives them back at its end. One block is never handed out. A token "
        f"costs {memory.kv_bytes_per_token:,} bytes over the whole model, {memory.kv_bytes_per_token_per_gpu:,} on one GPU."
    )


def _groups(plan: Plan) -> str:
    pool = plan.memory.pool
    assert pool is not None
    if len(pool.groups) == 1:
        return f"Layers. All {len(pool.groups[0].layers)} cached layers {_KINDS[pool.groups[0].cache.kind]}: one block table."
    listed = "; ".join(_group(group) for group in pool.groups)
    return (
        f"Layers. They keep unlike things and share one pool in {len(pool.groups)} groups: {listed}. A request draws blocks "
        f"for each group, so the {pool.size_tokens:,} tokens vLLM prints hold for requests of {pool.max_model_len:,} tokens "
        "and are not a number of slots."
    )


def _group(group: Group) -> str:
    window = f" of {group.cache.window:,} tokens" if group.cache.window is not None else ""
    return f"{len(group.layers)} layers {_KINDS[group.cache.kind]}{window}"


def _streams(plan: Plan) -> str:
    return (
        f"Streams. One of {plan.load.prompt_tokens:,} + {plan.load.output_tokens:,} tokens holds {plan.stream_blocks} blocks "
        f"at its end. If all reach their end at once, {plan.kv_full:.1f} fit; spread over their outputs they hold less on "
        f"average, and {plan.kv_staggered:.1f} fit."
    )


def _preemption() -> str:
    return (
        "When the pool is full. vLLM takes the blocks of the stream that started last, puts it back at the head of the queue "
        "and computes its prompt and its output so far again when there is room. Throughput levels off and waiting times grow."
    )


def _decode(plan: Plan) -> str:
    return (
        "Decoding. Each step reads all weights a token uses once, whatever the number of streams, and the whole KV cache of "
        f"each running stream; it computes little. So it is bound by memory bandwidth: {plan.deployment.architecture.params_active:,} "
        "parameters are read for a single stream, and more streams share that read until their caches weigh as much."
    )


def _prefill() -> str:
    return (
        "Prefill. A prompt's tokens go through the matrices together, so each weight read serves hundreds of tokens: bound by "
        "compute. It runs in the same steps as decoding, a budget of tokens at a time, and stretches them."
    )
