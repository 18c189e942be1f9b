"""What decoding costs: microseconds of CPU from the bytes of a read to the times of its tokens.

    python tests/bench/bench_decode.py            prints the table
    pytest -m bench tests/bench/bench_decode.py   holds the common cases to the budget

The chunks are those of vLLM 0.32.0 byte for byte (``model_dump_json(exclude_unset=True)`` in
``entrypoints/openai/completion/serving.py`` and ``chat_completion/serving.py``), 100 tokens a stream, one chunk a read.
The best of many repetitions is taken: a busy machine only ever adds.
"""

from __future__ import annotations

import pytest

from harness.clock import now_ns
from harness.decode import StreamDecoder
from harness.wire.openai import Endpoint

TOKENS = 100
#: microseconds a token may cost: 3 of the 12 CPU seconds that a million tokens may
BUDGET_US = 3.0

_HEAD = b'data: {"id":"cmpl-8d0d3f0f4c9b4e0f9a53b1c2f7e6d5a4","object":"text_completion","created":1790000000,"model":"meta-llama/Llama-3.1-8B-Instruct","choices":['
_CHAT = b'data: {"id":"chatcmpl-8d0d3f0f4c9b4e0f9a53b1c2f7e6d5a4","object":"chat.completion.chunk","created":1790000000,"model":"meta-llama/Llama-3.1-8B-Instruct","choices":['
_REST = b'"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":'
WORDS = [b" the", b" of", b" tok", b"ing", b" 7", b",", b".", b" caf\xc3\xa9", b" and", b" a"]


def completions(i: int, ids: bytes = b"null", usage: bytes = b"") -> bytes:
    return _HEAD + b'{"index":0,"text":"%b",%b%b}]%b}\n\n' % (WORDS[i % 10], _REST, ids, usage)


def usage(i: int) -> bytes:
    return b',"usage":{"prompt_tokens":64,"total_tokens":%d,"completion_tokens":%d}' % (65 + i, 1 + i)


def chat(i: int) -> bytes:
    return (
        _CHAT
        + b'{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        % WORDS[i % 10]
    )


def groups(chunks: list[bytes], size: int) -> list[bytes]:
    return [b"".join(chunks[i : i + size]) for i in range(0, len(chunks), size)]


PLAIN = [completions(i) for i in range(TOKENS)]
CASES: dict[str, tuple[Endpoint, list[bytes]]] = {
    "completions": ("completions", PLAIN),
    "chat": ("chat", [chat(i) for i in range(TOKENS)]),
    "completions, token ids": ("completions", [completions(i, b"[%d]" % (1000 + i)) for i in range(TOKENS)]),
    "completions, continuous usage": ("completions", [completions(i, usage=usage(i)) for i in range(TOKENS)]),
    "completions, 8 chunks a read": ("completions", groups(PLAIN, 8)),
    "completions, each chunk in 2 reads": ("completions", [part for c in PLAIN for part in (c[:150], c[150:])]),
}


def microseconds_per_token(endpoint: Endpoint, reads: list[bytes], repetitions: int = 300) -> float:
    """The best of many whole streams, decoder and all."""
    best_ns = 1 << 62
    for _ in range(repetitions):
        began_ns = now_ns()
        decoder = StreamDecoder(endpoint)
        for stamp_ns, read in enumerate(reads):
            decoder.feed(stamp_ns, read)
        best_ns = min(best_ns, now_ns() - began_ns)
        assert decoder.chunks == TOKENS
    return best_ns / TOKENS / 1e3


@pytest.mark.bench
@pytest.mark.parametrize("name", ["completions", "chat", "completions, token ids"])
def test_a_token_costs_no_more_than_its_budget(name: str) -> None:
    assert microseconds_per_token(*CASES[name]) < BUDGET_US


if __name__ == "__main__":
    for name, (endpoint, reads) in CASES.items():
        print(f"{name:40s} {microseconds_per_token(endpoint, reads):6.2f} us/token")
