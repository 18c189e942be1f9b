"""What another tool wrote of a failed request -> a kind of failure of ours (DESIGN section 4)."""

from __future__ import annotations

import re
from http import HTTPStatus

from harness.record import Failure, http_failure

#: (pattern of the text, kind), the first that is found. The names are of Python's exceptions, aiohttp's and httpx's,
#: which the tools write down as they come.
_PATTERNS = (
    (
        re.compile(r"without a terminal event|incomplete ?read|payload is not completed|peer closed", re.I),
        Failure.TRUNCATED,
    ),
    (re.compile(r"time(d )?[- ]?out", re.I), Failure.TIMEOUT),
    (re.compile(r"connect|disconnected|broken ?pipe|reset by peer|name or service|ssl", re.I), Failure.CONNECTION),
    (re.compile(r"cancel", re.I), Failure.ABORTED),
)
_STATUS = re.compile(r"(?:status|code|http|error)\D{0,12}\b([45]\d\d)\b|^\s*([45]\d\d)\b", re.I)
_PHRASES = {status.phrase.lower(): int(status) for status in HTTPStatus if status >= 400}


def failure_of(text: str, status: int | None = None) -> tuple[str, int | None]:
    """The kind of failure and the HTTP status, where either can be told.

    Args:
        text: the tool's words: a reason phrase, an exception or a whole traceback.
        status: where the tool keeps it apart.

    A text that tells neither is ``protocol``: an answer that the tool could not use.
    """
    if status is not None and status >= 400:
        return http_failure(status), status
    words = text.strip()
    if (known := _PHRASES.get(words.lower())) is not None:
        return http_failure(known), known
    # of a traceback, the exception itself: its last line
    last = words.splitlines()[-1] if words else ""
    if found := _STATUS.search(last):
        code = int(found[1] or found[2])
        return http_failure(code), code
    for pattern, kind in _PATTERNS:
        if pattern.search(last):
            return kind.value, None
    return Failure.PROTOCOL.value, None


def one_line_of(text: str) -> str:
    """The last line of a traceback, or the text's own, at most 300 characters."""
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else ""
