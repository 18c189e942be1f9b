"""Fuzz the event-stream parser and the decoder: python tests/wire/fuzz_sse.py SECONDS [SEED]

Streams of the cases and of vLLM-like chunks are mutated, cut in two random ways and fed. It fails when

* anything is raised but SseOverflow of a parser with a small limit (the decoder raises nothing),
* the events differ from the plain reading of the standard (``naive_sse``), or with the cuts,
* the record differs with the cuts, or does not read back.

It prints the seed of a failing input, which gives it again. Exit code 1 on a failure.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field

from naive_sse import parse
from splits import byte_by_byte, cut
from stream_cases import CASES, PLAN, SENT_NS

from harness.clock import NS_PER_S, now_ns
from harness.decode import StreamDecoder, StreamEnd
from harness.record import Record
from harness.wire.openai import Endpoint
from harness.wire.sse import SseOverflow, SseParser

ENDPOINTS: list[Endpoint] = ["chat", "completions"]
#: what a mutation may insert: everything the grammar and the API give a meaning
TOKENS = [
    *[
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b":",
        b" ",
        b"data",
        b"data:",
        b"data: ",
        b"event: error\n",
        b"event: x\n",
        b"id: 1\n",
    ],
    *[
        b"retry: 5\n",
        b": ping\n\n",
        b"\xef\xbb\xbf",
        b"\x00",
        b"\xff",
        "中".encode(),
        b'"',
        b"\\",
        b"\\u0041",
        b"{",
        b"}",
        b"[",
        b"]",
    ],
    *[
        b"data: [DONE]\n\n",
        b'data: {"error":{"message":"boom"}}\n\n',
        b'"error":',
        b"null",
        b"true",
        b"-1",
        b"1e999",
        b"NaN",
    ],
    *[
        b'"finish_reason":"abort"',
        b'"usage":{"completion_tokens":3}',
        b'"token_ids":[1,2]',
        b'"index":1',
        b'"text":"a"',
    ],
    *[b'"delta":{"content":"a"}', b'"reasoning":"r"', b"error: {}\n\n", b"," * 40, b"[" * 300],
]


def vllm_stream(rng: random.Random, endpoint: Endpoint) -> bytes:
    """Chunks that a template can be learned from."""
    place = b'"delta":{"content":"%b"}' if endpoint == "chat" else b'"text":"%b"'
    ids = rng.random() < 0.5
    out = b""
    for i in range(rng.randint(1, 6)):
        text = rng.choice([b" tok", b"a", "中".encode(), b'\\"', b""])
        out += b'data: {"id":"c","created":%d,"choices":[{"index":0,' % rng.choice([1, 1, 1, 2])
        out += place % text + (b',"token_ids":[%d]' % (100 + i) if ids else b"") + b',"finish_reason":null}]}\n\n'
    return out + rng.choice([b"", b"data: [DONE]\n\n"])


def _place(rng: random.Random, stream: bytes) -> int:
    """An offset: two times of three between lines, where a change more often makes another stream than a broken one."""
    if rng.random() < 1 / 3:
        return rng.randint(0, len(stream))
    return rng.choice([0, len(stream), *(at + 1 for at, byte in enumerate(stream) if byte == 0x0A)])


def mutate(rng: random.Random, stream: bytes, other: bytes) -> bytes:
    at, end = sorted((_place(rng, stream), _place(rng, stream)))
    match rng.randrange(6):
        case 0:
            return stream[:at] + rng.choice(TOKENS) + stream[at:]
        case 1:
            return stream[:at] + stream[min(end, at + rng.randint(1, 8)) :]
        case 2:
            return stream[:at] + bytes([rng.randrange(256)]) + stream[at + 1 :]
        case 3:
            return stream[:end] + stream[at:]
        case 4:
            return stream[:at] + other[rng.randint(0, len(other)) :]
        case _:
            return stream.replace(rng.choice(TOKENS), rng.choice(TOKENS), 1)


@dataclass
class Input:
    """One case, all of it drawn from a seed."""

    seed: int
    endpoint: Endpoint = "chat"
    stream: bytes = b""
    splits: list[list[bytes]] = field(default_factory=list)
    end: StreamEnd = StreamEnd.EOF
    limit: int = 0

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.endpoint = rng.choice(ENDPOINTS)
        corpus = [b"".join(data for _, data in case.writes) for case in CASES]
        self.stream = rng.choice(corpus) if rng.random() < 0.5 else vllm_stream(rng, self.endpoint)
        if rng.random() < 0.05:
            self.stream = rng.randbytes(rng.randint(0, 200))
        for _ in range(rng.choice([0, 1, 1, 2, 4, 8])):
            self.stream = mutate(rng, self.stream, rng.choice(corpus))
        self.stream = self.stream[:4000]
        events = [part + b"\n\n" for part in self.stream.split(b"\n\n")]
        events[-1] = events[-1][:-2]
        random_cuts = [rng.randint(0, len(self.stream)) for _ in range(rng.randint(0, 12))]
        self.splits = [[self.stream], events, cut(self.stream, random_cuts), byte_by_byte(self.stream)]
        self.end = rng.choice(list(StreamEnd))
        self.limit = rng.randint(0, 200)


def check_parser(case: Input) -> None:
    expected = [(e.data, e.type, e.id, e.retry_ms) for e in parse(case.stream)]
    ends = set()
    for reads in case.splits:
        parser = SseParser()
        events = [tuple(event[1:]) for read in reads for event in parser.feed(0, read)]
        assert events == expected, f"events {events} are not {expected}"
        ends.add(parser.end())
    assert len(ends) == 1, f"the end depends on the cuts: {ends}"
    small = SseParser(case.limit)
    try:
        for read in case.splits[2]:
            small.feed(0, read)
    except SseOverflow:
        pass


def record_of(case: Input, reads: list[bytes]) -> Record:
    decoder = StreamDecoder(case.endpoint, save_content=True, save_gaps=True)
    for read in reads:
        decoder.feed(SENT_NS, read)
    decoder.drain_gaps()
    return decoder.finish(PLAN, run_start_ns=0, sent_ns=SENT_NS, end=case.end, end_ns=SENT_NS, http_status=200)


def check_decoder(case: Input) -> str:
    records = [record_of(case, reads) for reads in case.splits]
    assert all(record == records[0] for record in records), f"the record depends on the cuts: {records}"
    assert Record.from_json(records[0].to_json()) == records[0]
    return records[0].failure or records[0].outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int, nargs="?", default=0, help="first seed; each input has its own")
    options = parser.parse_args()
    until_ns = now_ns() + int(options.seconds * NS_PER_S)
    seed, outcomes = options.seed, Counter[str]()
    while now_ns() < until_ns:
        try:
            case = Input(seed)
            check_parser(case)
            outcomes[check_decoder(case)] += 1
        except Exception:  # noqa: BLE001 - whatever it is, it is the finding
            traceback.print_exc()
            print(f"seed {seed}: {Input(seed).stream!r}", file=sys.stderr)
            return 1
        seed += 1
    print(f"{seed - options.seed} inputs, seeds {options.seed} to {seed - 1}: {dict(outcomes.most_common())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
