"""/metrics text -> samples by name. The grammar is prometheus_client's; this file decides what is not metrics at all.

Refused, each with :class:`BadMetrics` and the line shown:

* a line the grammar does not know, the same series twice (two scrapes in one file), bytes that are no UTF-8;
* HTML and JSON, named as such: a login page or an API error where metrics were asked for;
* a text whose last line has no end. The format ends every line with a line feed (Prometheus exposition format 0.0.4,
  "Line format"), so a missing one means the server died or the copy was cut, and a number cut in its middle
  (5049 -> 50) reads like a number. Nothing of such a text is believed.

Understood: NaN, +Inf and -Inf, timestamps, exemplars (dropped), CRLF, missing TYPE and HELP lines, blank lines,
comments, ``# EOF``, a byte-order mark, UTF-16 as some shells redirect it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import orjson
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_fd_to_metric_families

#: the grammar's cost grows with the square of a line's length; vLLM's longest (cache_config_info) has 1,600 characters
MAX_LINE_CHARS = 65_536
#: characters of a refused line that a message shows
SHOWN_CHARS = 120

_SAMPLE_NAME = re.compile(r"[^\s{]*")
#: a sample up to its exemplar: quoted label values may hold anything, " # {" too
_BEFORE_EXEMPLAR = re.compile(r'((?:[^"]|"(?:[^"\\]|\\.)*")*?)\s+# \{')
_TITLE = re.compile(r"<title[^>]*>\s*(.*?)\s*</title", re.IGNORECASE | re.DOTALL)


class BadMetrics(ValueError):
    """This is not a /metrics text that can be believed. ``hint`` says what it looks like or what to do, one line."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one series. Timestamps are dropped: the scrape's own stamp is the harness's."""

    labels: Mapping[str, str]
    value: float


#: sample name (``_total``, ``_count``, ``_sum`` included) -> its samples in the order of the text
Samples = dict[str, list[Sample]]


def parse(text: str | bytes, keep: Container[str] | None = None) -> Samples:
    """Read a /metrics text.

    Args:
        text: the whole body.
        keep: sample names to read; lines of other names are passed over unread, malformed or not. A text of one vLLM
            0.32 engine (46 KB, 470 samples) takes 11.7 ms whole and a quarter of that when read for what a ramp needs.

    A counter whose TYPE line lacks ``_total`` is filed under its name with ``_total``, as prometheus_client does.

    Raises:
        BadMetrics: see the head of this file.
    """
    body = _decoded(text) if isinstance(text, bytes) else text.removeprefix("\ufeff")
    _refuse_other_formats(body)
    lines = _Lines(body, keep)
    samples: Samples = {}
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    try:
        for family in text_fd_to_metric_families(lines):  # type: ignore[arg-type]
            _file(family, samples, seen)
    except BadMetrics:
        raise
    except (ValueError, IndexError, OverflowError) as error:
        raise _refused(lines, bool(samples)) from error
    if lines.cut_off:
        raise _cut(lines)
    return samples


def _file(family: Metric, samples: Samples, seen: set[tuple[str, frozenset[tuple[str, str]]]]) -> None:
    for name, labels, value, *_ in family.samples:
        series = (name, frozenset(labels.items()))
        if series in seen:
            raise BadMetrics(f"the series {name}{_braced(labels)} is there twice", "two scrapes in one file?")
        seen.add(series)
        samples.setdefault(name, []).append(Sample(labels, float(value)))


class _Lines:
    """The lines worth reading, with the one being read kept for messages. Lines end at line feeds and nowhere else:
    a label value may hold U+2028 or a form feed."""

    def __init__(self, body: str, keep: Container[str] | None) -> None:
        self._lines = body.split("\n")
        self._keep = keep
        self.number = 0
        self.line = ""
        last = self._lines[-1].strip()
        #: the text stops inside a line; "# EOF" is OpenMetrics' own end and needs no line feed
        self.cut_off = last not in ("", "# EOF")

    def __iter__(self) -> Iterator[str]:
        for number, whole in enumerate(self._lines, 1):
            self.number, self.line = number, whole
            line = whole.strip()
            if line and self._wanted(line):
                if len(line) > MAX_LINE_CHARS:
                    raise ValueError("too long")
                yield _BEFORE_EXEMPLAR.match(line)[1] if _has_exemplar(line) else line  # type: ignore[index]

    @property
    def in_last(self) -> bool:
        return self.number == len(self._lines)

    def _wanted(self, line: str) -> bool:
        if line[0] == "#":
            # HELP is never needed; TYPE only renames counters, so it matters for names that are kept
            words = line.split(None, 3)
            return len(words) > 2 and words[1] == "TYPE" and (self._keep is None or words[2] in self._keep)
        name = _SAMPLE_NAME.match(line)[0]  # type: ignore[index]
        return self._keep is None or not name or name in self._keep


def _has_exemplar(line: str) -> bool:
    return " # {" in line and _BEFORE_EXEMPLAR.match(line) is not None


def _decoded(body: bytes) -> str:
    encoding = "utf-16" if body[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return body.decode(encoding)
    except UnicodeDecodeError as error:
        looks = "gzip data" if body[:2] == b"\x1f\x8b" else "binary data"
        raise BadMetrics(
            f"not text: byte {error.start} is no {encoding.upper()}", f"this looks like {looks}"
        ) from error


def _refuse_other_formats(body: str) -> None:
    head = body.lstrip()
    if head.startswith("<"):
        title = _TITLE.search(head[:20_000])
        named = f" titled {_short(title[1])!r}" if title else ""
        raise BadMetrics(f"this is HTML or XML{named}, not metrics", "a login page or a proxy's error page?")
    if head.startswith(("{", "[")) and _is_json(head):
        raise BadMetrics(f"this is JSON, not metrics: {_short(head)}", "is the path right? vLLM serves /metrics")


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _refused(lines: _Lines, some_good: bool) -> BadMetrics:
    if lines.cut_off and lines.in_last and some_good:
        return _cut(lines)
    if len(lines.line) > MAX_LINE_CHARS:
        return BadMetrics(f"line {lines.number} has {len(lines.line):,} characters, more than {MAX_LINE_CHARS:,}")
    return BadMetrics(f"line {lines.number} is no line of a /metrics text: {_short(lines.line)!r}")


def _cut(lines: _Lines) -> BadMetrics:
    return BadMetrics(
        f"the text is cut off inside its last line: {_short(lines.line)!r}",
        "did the server die while answering? A file that only lost its final line feed needs it back",
    )


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def _braced(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""
