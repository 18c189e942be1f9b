"""What vLLM counts, and when: counters, gauges and histograms of one engine.

Rules of vLLM 0.32.0 ``v1/metrics/stats.py`` (IterationStats, PrefillStats) and ``v1/metrics/loggers.py``
(PrometheusStatLogger.record):

* Prompt tokens are counted with a request's first output, cached ones included; recomputing after a preemption is
  counted nowhere.
* A preemption is counted with the preempted request's next output, so one whose request is aborted never is.
* ``iteration_tokens_total`` has one sample for each step that puts anything out: computed prompt tokens of requests
  with their first output in it, and generated tokens. A step that computes only part of a prompt has none.
* Gauges show the state at the end of a step, and stay until the next one ends. Requests that arrived during the step
  are not in them yet, and their queue time begins at its end.
* Prefix queries and hits are tokens, counted at the first admission of a request.
* Aborted requests appear in no per-request histogram and in no ``request_success``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Buckets
from dataclasses import dataclass, field

import numpy as np

from calibration.twin.sequence import Sequence

#: bucket bounds of vLLM 0.32.0 v1/metrics/buckets.py, seconds
REQUEST_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TIME_TO_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
    2560,
)
INTER_TOKEN_LATENCY_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
#: the same file, counts
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PARAMS_N = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


def tokens_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to ``max_model_len`` (vLLM 0.32.0 buckets.py, build_1_2_5_buckets)."""
    bounds = [digit * 10**power for power in range(len(str(max_model_len))) for digit in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= max_model_len)


class Histogram:
    """Counts by bucket, as Prometheus has them before they are made cumulative.

    Args:
        bounds: upper bounds, ascending; a value on a bound is inside. +Inf is added.

    Attributes:
        add: takes one value; it is put into its bucket when the histogram is next read.
    """

    __slots__ = ("_counts", "_pending", "_sum", "add", "bounds")

    def __init__(self, bounds: Buckets[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = np.zeros(len(self.bounds) + 1, dtype=np.int64)
        self._sum = 0.0
        self._pending: list[float] = []
        self.add: Callable[[float], None] = self._pending.append

    def add_times(self, value: float, times: int) -> None:
        """One value ``times`` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._sum += value * times

    def settle(self) -> None:
        """Put what was added into its buckets."""
        if self._pending:
            places = np.searchsorted(self.bounds, self._pending)
            self._counts += np.bincount(places, minlength=len(self._counts))
            self._sum += math.fsum(self._pending)
            self._pending.clear()

    @property
    def counts(self) -> list[int]:
        self.settle()
        counts: list[int] = self._counts.tolist()
        return counts

    @property
    def sum(self) -> float:
        self.settle()
        return self._sum

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class Counters:
    """Everything of one engine. Names are vLLM's without prefix and ``_total``; times are seconds."""

    max_model_len: int

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0

    steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    request_success: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0, "repetition": 0}
    )
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: tuple[int, ...] = ()

    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_TOKENS))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(TIME_TO_FIRST_TOKEN_S))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_LATENCY_S))
    request_time_per_output_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_LATENCY_S))
    e2e_request_latency: Histogram = field(default_factory=lambda: Histogram(REQUEST_LATENCY_S))
    request_queue_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_LATENCY_S))
    request_inference_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_LATENCY_S))
    request_prefill_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_LATENCY_S))
    request_decode_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_LATENCY_S))
    request_num_preemptions: Histogram = field(default_factory=lambda: Histogram(NUM_PREEMPTIONS))
    request_params_n: Histogram = field(default_factory=lambda: Histogram(PARAMS_N))
    request_prompt_tokens: Histogram = field(init=False)
    request_generation_tokens: Histogram = field(init=False)
    request_max_num_generation_tokens: Histogram = field(init=False)
    request_params_max_tokens: Histogram = field(init=False)
    request_prefill_kv_computed_tokens: Histogram = field(init=False)

    def __post_init__(self) -> None:
        bounds = tokens_buckets(self.max_model_len)
        self.request_prompt_tokens = Histogram(bounds)
        self.request_generation_tokens = Histogram(bounds)
        self.request_max_num_generation_tokens = Histogram(bounds)
        self.request_params_max_tokens = Histogram(bounds)
        self.request_prefill_kv_computed_tokens = Histogram(bounds)

    def settle(self) -> None:
        """Put what was added to the histograms into their buckets, so that it does not pile up unread."""
        for name in self.__slots__:
            if isinstance(value := getattr(self, name), Histogram):
                value.settle()

    def count_first_output(self, seq: Sequence, now_s: float) -> int:
        """A request's first output; the prompt tokens it adds to the step's ``iteration_tokens``."""
        self.prompt_tokens += seq.prompt_tokens
        self.prompt_tokens_cached += seq.cached_tokens
        self.time_to_first_token.add(now_s - seq.arrived_s)
        return seq.prompt_tokens - seq.cached_tokens

    def count_preemptions(self, seq: Sequence) -> None:
        """Any output of a request brings the preemptions since its last one."""
        self.num_preemptions += seq.uncounted_preemptions
        seq.uncounted_preemptions = 0

    def count_finished(self, seq: Sequence) -> None:
        """A request has ended; all its times are set. TPOT is 0 for one token, as vLLM has it."""
        arrived_s, queued_s, outputs = seq.arrived_s, seq.queued_s, seq.outputs
        scheduled_s, first_s, last_s = seq.scheduled_s, seq.first_token_s, seq.last_token_s
        assert scheduled_s is not None
        assert first_s is not None
        assert last_s is not None
        self.request_success[seq.finish_reason] += 1
        self.e2e_request_latency.add(last_s - arrived_s)
        self.request_queue_time.add(scheduled_s - queued_s)
        self.request_prefill_time.add(first_s - scheduled_s)
        self.request_inference_time.add(last_s - scheduled_s)
        self.request_decode_time.add(last_s - first_s)
        self.request_time_per_output_token.add((last_s - first_s) / (outputs - 1) if outputs > 1 else 0.0)
        self.request_num_preemptions.add(seq.preemptions)
        self.request_prefill_kv_computed_tokens.add(seq.prompt_tokens - seq.cached_tokens)
        self.request_prompt_tokens.add(seq.prompt_tokens)
        self.request_generation_tokens.add(outputs)
        self.request_max_num_generation_tokens.add(outputs)
        self.request_params_n.add(1)
        self.request_params_max_tokens.add(seq.max_tokens)
