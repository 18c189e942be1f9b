"""What the scheduler of vLLM 0.32.0 itself decides, step by step, on random workloads: the oracle of the twin's.

    python tests/vllm/scheduler_oracle.py OUT.json [SEED [COUNT]]      (in the vLLM environment; no model, no server)

It builds vLLM's own Scheduler over a KV cache of a few blocks, feeds it requests at given steps and invented outputs,
and writes per step what was scheduled and what the gauges would show. tests/twin/test_twin_scheduler_oracle.py runs
the same workloads through the twin.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

EOS = 2
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100_000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def workload(rng: random.Random) -> dict[str, Any]:
    """One random workload: flags, and requests by the step before which they arrive."""
    block = rng.choice([4, 8, 16])
    max_len = rng.choice([128, 256])
    seqs = rng.choice([4, 8, 16])
    config = {
        "block_size": block,
        "max_model_len": max_len,
        "num_gpu_blocks": max_len // block + 1 + rng.randrange(0, 3 * max_len // block),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": rng.choice([seqs * 4, 64, 128, 512]),
        "enable_prefix_caching": rng.random() < 0.7,
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "scheduler_reserve_full_isl": rng.random() < 0.8,
        "watermark": rng.choice([0.0, 0.0, 0.1]),
        "async_scheduling": rng.random() < 0.3,
    }
    drafts = rng.choice([0, 0, 1, 3]) if not config["async_scheduling"] else 0
    config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], seqs * (1 + drafts))
    if drafts:
        config["drafts"], config["accepted"] = drafts, rng.randrange(drafts + 1)
    requests = []
    for number in range(rng.randrange(6, 22)):
        kind = rng.random()
        parent = rng.randrange(number) if number and kind < 0.25 else None
        prefix = rng.randrange(3) if parent is None and kind < 0.6 else None
        prompt = rng.randrange(1, max_len // 2)
        output = rng.randrange(1, max_len // 3)
        requests.append(
            {
                "step": rng.randrange(0, 60) if rng.random() < 0.5 else 0,
                "parent": parent,
                "prefix": prefix,
                "prefix_tokens": rng.randrange(1, max_len // 4) if prefix is not None else 0,
                "prompt": prompt,
                "output": output,
                "stop": rng.random() < 0.3,
                "priority": rng.randrange(3),
                "abort": rng.randrange(2, 80) if rng.random() < 0.1 else None,
            }
        )
    requests.sort(key=lambda r: r["step"])
    fit(requests, max_len)
    return {"config": config, "requests": requests}


def fit(requests: list[dict[str, Any]], max_len: int) -> None:
    """Give every request its length, cut to what the model can hold; a child continues its parent's talk."""
    for number, request in enumerate(requests):
        parent = request["parent"]
        if parent is not None and parent >= number:
            request["parent"] = parent = None
        before = 0 if parent is None else requests[parent]["total"]
        length = before + request["prefix_tokens"] + request["prompt"]
        if length + request["output"] > max_len:
            request["parent"], request["prefix"], request["prefix_tokens"] = None, None, 0
            length = request["prompt"]
        request["length"] = length
        request["total"] = length + request["output"]


def tokens_of(requests: list[dict[str, Any]], number: int) -> list[int]:
    """Prompt and output tokens of a request: equal where the text is."""
    request = requests[number]
    if request["parent"] is not None:
        head = tokens_of(requests, request["parent"])
    else:
        head = [10_000 + 1_000 * (request["prefix"] or 0) + i for i in range(request["prefix_tokens"])]
    own = request["total"] - len(head)
    return head + [20_000 + 500 * number + i for i in range(own)]


class Driver:
    """vLLM's scheduler, and outputs as a model would give them."""

    def __init__(self, case: dict[str, Any], model: Path) -> None:
        self.case = case
        self.config = case["config"]
        self.requests = case["requests"]
        self.tokens = [tokens_of(self.requests, n) for n in range(len(self.requests))]
        self.scheduler = self._scheduler(model)
        self.preemptions = 0
        self.hits = 0
        self.queries = 0
        self._hash = get_request_block_hasher(self.config["block_size"], sha256)
        self.live: dict[str, Request] = {}

    def _scheduler(self, model: Path) -> Scheduler:
        config = self.config
        model_config = ModelConfig(
            model=str(model), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=config["max_model_len"]
        )
        scheduler_config = SchedulerConfig(
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            max_model_len=config["max_model_len"],
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=config["scheduling_policy"],
            scheduler_reserve_full_isl=config["scheduler_reserve_full_isl"],
            watermark=config["watermark"],
            async_scheduling=config["async_scheduling"],
        )
        cache_config = CacheConfig(
            block_size=config["block_size"], enable_prefix_caching=config["enable_prefix_caching"]
        )
        speculative_config = None
        if "drafts" in config:
            speculative_config = SpeculativeConfig(
                method="ngram", num_speculative_tokens=config["drafts"], prompt_lookup_max=2
            )
        vllm_config = VllmConfig(
            model_config=model_config,
            scheduler_config=scheduler_config,
            cache_config=cache_config,
            speculative_config=speculative_config,
        )
        cache_config.num_gpu_blocks = config["num_gpu_blocks"]
        spec = FullAttentionSpec(block_size=config["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv_config = KVCacheConfig(
            num_blocks=config["num_gpu_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        kind = AsyncScheduler if config["async_scheduling"] else Scheduler
        return kind(
            vllm_config=vllm_config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=config["block_size"],
            log_stats=True,
        )

    def add(self, number: int) -> None:
        request = self.requests[number]
        params = SamplingParams(
            max_tokens=self.config["max_model_len"] - request["length"] if request["stop"] else request["output"],
            temperature=0.0,
        )
        params.update_from_generation_config({}, eos_token_id=EOS)
        live = Request(
            request_id=str(number),
            prompt_token_ids=self.tokens[number][: request["length"]],
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(number),
            priority=request["priority"],
            block_hasher=self._hash if self.config["enable_prefix_caching"] else None,
        )
        self.live[str(number)] = live
        self.scheduler.add_request(live)

    def arrives(self, number: int, step: int) -> bool:
        """At its step, but not before the talk it continues has ended."""
        parent = self.requests[number]["parent"]
        ended = parent is None or (str(parent) in self.live and self.live[str(parent)].is_finished())
        return ended and bool(self.requests[number]["step"] <= step)

    def sample(self, output: Any) -> ModelRunnerOutput:
        """The next token of each request whose prompt is through in this step."""
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request, known = self.requests[int(request_id)], self._known[request_id]
            if self._computed(output, request_id) + output.num_scheduled_tokens[request_id] < known:
                sampled.append([])
                continue
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            # -1 is a draft that only fills the batch
            accepted = 0 if -1 in drafts else min(len(drafts), self.config.get("accepted", 0))
            # under asynchronous scheduling a step may run beyond the end: its token is never looked at
            tokens = [*self.tokens[int(request_id)], 0, 0, 0, 0, 0][known : known + 1 + accepted]
            if request["stop"] and (last := request["total"] - 1 - known) < len(tokens):
                tokens[max(last, 0)] = EOS
            self._known[request_id] = min(known + len(tokens), request["total"])
            sampled.append(tokens)
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=sampled
        )

    def _propose(self, output: Any) -> None:
        """Drafts for every request that ran (EngineCore.post_step)."""
        ids = list(output.num_scheduled_tokens)
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [[7] * self.config["drafts"] for _ in ids]))

    def _computed(self, output: Any, request_id: str) -> int:
        for new in output.scheduled_new_reqs:
            if new.req_id == request_id:
                return int(new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        return int(cached.num_computed_tokens[cached.req_ids.index(request_id)])

    def run(self, limit: int = 5_000) -> list[list[int]]:
        """Rows of [scheduled tokens, running, waiting, free blocks, preemptions so far, check of the running order]."""
        self._known = {str(n): r["length"] for n, r in enumerate(self.requests)}
        rows: list[list[int]] = []
        flying: deque[tuple[Any, ModelRunnerOutput]] = deque()
        depth = 2 if self.config["async_scheduling"] else 1
        waiting = deque(range(len(self.requests)))
        step = 0
        while step < limit:
            for number in [n for n in waiting if self.arrives(n, step)]:
                waiting.remove(number)
                self.add(number)
            for number, request in enumerate(self.requests):
                if request["abort"] == step and str(number) in self.live and not self.live[str(number)].is_finished():
                    self.scheduler.finish_requests(str(number), RequestStatus.FINISHED_ABORTED)
            before = {r: live.num_preemptions for r, live in self.live.items()}
            output = self.scheduler.schedule()
            self.preemptions += sum(live.num_preemptions - before[r] for r, live in self.live.items())
            # as EngineCore.step and step_with_batch_queue: a step without tokens waits for the one that runs
            flying.append((output, self.sample(output)))
            if len(flying) == depth:
                self._update(*flying.popleft())
            if not output.num_scheduled_tokens and flying:
                self._update(*flying.popleft())
            rows.append(self._row(output))
            step += 1
            if not waiting and not flying and not self.scheduler.get_num_unfinished_requests():
                return rows
        raise RuntimeError("the workload did not end")

    def _update(self, output: Any, sampled: ModelRunnerOutput) -> None:
        outputs = self.scheduler.update_from_output(output, sampled)
        for messages in outputs.values():
            if messages.scheduler_stats is not None:
                self.queries += messages.scheduler_stats.prefix_cache_stats.queries
                self.hits += messages.scheduler_stats.prefix_cache_stats.hits
        if "drafts" in self.config:
            self._propose(output)

    def _row(self, output: Any) -> list[int]:
        running, waiting = self.scheduler.get_request_counts()
        order = [int(request.request_id) for request in self.scheduler.running]
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        check = 0
        for number in order:
            check = (check * 31 + number + 1) % 1_000_003
        return [output.total_num_scheduled_tokens, running, waiting, free, self.preemptions, check]


def main(target: str, seed: int = 0, count: int = 40) -> None:
    init_none_hash(sha256)
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        for number in range(count):
            case = workload(random.Random(f"{seed}/{number}"))
            driver = Driver(case, Path(folder))
            case["steps"] = driver.run()
            case["prefix_queries"], case["prefix_hits"] = driver.queries, driver.hits
            cases.append(case)
    Path(target).write_text(json.dumps({"vllm": "0.32.0", "cases": cases}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
