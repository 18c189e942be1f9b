"""One request inside an engine."""

from __future__ import annotations

from enum import Enum
from typing import Any

from calibration.twin.blocks import Chain
from calibration.twin.content import Content


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


class Sequence:
    """A request's state. Times are seconds on the engine's clock; ``None`` until it happened.

    Args:
        prompt_tokens: tokens of the prompt, at least 1.
        output_tokens: tokens it will produce, at least 1: what ends it is decided when it is made.
        max_tokens: what was asked, for the counters (default: ``output_tokens``).
        finish_reason: ``length`` when ``output_tokens`` is the limit, ``stop`` when an end-of-text token comes first;
            the scheduler foresees the first, not the second (it matters under asynchronous scheduling).
        content: what the prefix cache sees; by default nothing is shared.
        priority: smaller runs first, under the policy ``priority``.
        payload: the front end's own, never looked at.
    """

    __slots__ = (
        "arrived_s",
        "blocks",
        "cached_tokens",
        "chain",
        "computed",
        "content",
        "decoding",
        "finish_reason",
        "finish_step",
        "finished_s",
        "first_token_s",
        "joined_step",
        "last_token_s",
        "max_tokens",
        "order",
        "output_tokens",
        "outputs",
        "payload",
        "preemptions",
        "prefilled",
        "priority",
        "prompt_tokens",
        "queued_s",
        "scheduled_s",
        "status",
        "uncounted_preemptions",
    )

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: int,
        *,
        max_tokens: int | None = None,
        finish_reason: str = "length",
        content: Content | None = None,
        priority: int = 0,
        payload: Any = None,
    ) -> None:
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(
                f"a sequence has at least 1 prompt and 1 output token, not {prompt_tokens}/{output_tokens}"
            )
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_tokens = output_tokens if max_tokens is None else max_tokens
        self.finish_reason = finish_reason
        self.content = content if content is not None else Content()
        self.priority = priority
        self.payload = payload
        self.status = Status.WAITING
        #: output tokens produced so far; while it decodes, the decoders know better
        self.outputs = 0
        #: tokens whose KV is computed; while it decodes, the decoders know better
        self.computed = 0
        #: of these, while it decodes, the ones whose blocks were in the cache when its prefill ended
        self.prefilled = 0
        #: blocks held, shared ones included; while it decodes, the decoders know better
        self.blocks = 0
        #: its own blocks in the pool, where the pool keeps contents
        self.chain: Chain | None = None
        #: position in the running list: admissions count up
        self.order = 0
        #: step of its prefill's end, and step of its last token as far as is known
        self.joined_step = 0
        self.finish_step = 0
        self.decoding = False
        self.preemptions = 0
        #: preemptions not yet in the counter: vLLM counts them with the request's next output
        self.uncounted_preemptions = 0
        #: prompt tokens found in the prefix cache at the first admission
        self.cached_tokens = 0
        #: at the engine; in the scheduler's queue, which is when the step under way then had ended
        self.arrived_s = 0.0
        self.queued_s = 0.0
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.finished_s: float | None = None

    @property
    def tokens(self) -> int:
        """Prompt and output so far: what must be computed before the next token (vLLM ``Request.num_tokens``)."""
        return self.prompt_tokens + self.outputs

    @property
    def ended(self) -> bool:
        return self.status in (Status.FINISHED, Status.ABORTED)
