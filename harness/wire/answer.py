"""What the chunks of one answer add up to: tokens by choice, usage, finish reasons, text. Pure.

vLLM 0.32.0 counts in two ways in one stream (``completion_stream_generator``, ``chat_completion_stream_generator``):
continuous usage rides on the chunk of one choice and counts that choice so far; the usage of the last chunk, whose
``choices`` is empty, counts all choices together. Both are cumulative, so the last one seen stands and nothing is summed
over time.
"""

from __future__ import annotations

from harness.wire.openai import Delta, Usage


class Choice:
    """What is known of one choice (``n`` > 1 gives several)."""

    __slots__ = ("finish_reason", "ids", "parts", "uncounted", "usage_tokens")

    def __init__(self) -> None:
        #: tokens by token_ids so far; None while none came
        self.ids: int | None = None
        #: some text came without token_ids, so ids is no count of all
        self.uncounted = False
        #: tokens by the last usage that was this choice's own
        self.usage_tokens: int | None = None
        self.finish_reason: str | None = None
        #: the text as it came, where it is kept
        self.parts: list[str] = []


class Answer:
    """The choices of one answer, and its usage.

    Args:
        keep_text: keep the generated text.
    """

    __slots__ = ("_total_tokens", "choices", "final_usage", "keep_text", "prompt_tokens", "usage_seen")

    def __init__(self, *, keep_text: bool) -> None:
        self.keep_text = keep_text
        self.choices: dict[int, Choice] = {}
        self.prompt_tokens: int | None = None
        self._total_tokens: int | None = None
        self.usage_seen = False
        #: usage came in a chunk without choices; content after it takes this back
        self.final_usage = False

    def gain(self, delta: Delta) -> Choice:
        """Add a delta to its choice, and return that."""
        choice = self.choices.get(delta.choice)
        if choice is None:
            choice = self.choices[delta.choice] = Choice()
        if delta.tokens is not None:
            choice.ids = (choice.ids or 0) + delta.tokens
        elif delta.text:
            choice.uncounted = True
        if self.keep_text and delta.text:
            choice.parts.append(delta.text)
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
        return choice

    def add_usage(self, usage: Usage, deltas: tuple[Delta, ...]) -> None:
        """Add the usage of a chunk whose deltas were gained before."""
        self.usage_seen = True
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if len(deltas) == 1:
            self.choices[deltas[0].choice].usage_tokens = usage.completion_tokens
            self._total_tokens = None
        else:
            self._total_tokens = usage.completion_tokens
            self.final_usage = not deltas

    def complete(self, *, done: bool) -> bool:
        """Whether the server said that this is all (the rule stands in :mod:`harness.decode`)."""
        if self.final_usage or (done and self.usage_seen):
            return True
        return bool(self.choices) and all(choice.finish_reason for choice in self.choices.values())

    def usage_tokens(self) -> int | None:
        """Output tokens by usage: the total where the server gave one last, else the sum if each choice was counted."""
        if self._total_tokens is not None:
            return self._total_tokens
        return _sum([choice.usage_tokens for choice in self.choices.values()])

    def id_tokens(self) -> int | None:
        """Output tokens by token ids; None unless all text of each choice came with them."""
        return _sum([None if choice.uncounted else choice.ids for choice in self.choices.values()])

    def finish_reason(self) -> str | None:
        """Of the choice with the lowest index that has one."""
        reasons = [choice.finish_reason for _, choice in sorted(self.choices.items()) if choice.finish_reason]
        return reasons[0] if reasons else None

    def text(self) -> str:
        """The kept text; several choices one below the other."""
        return "\n".join("".join(choice.parts) for _, choice in sorted(self.choices.items()))


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
