"""A sizing as the page shows it: markup made of the numbers of ``plan --json``, each exact beside its rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from calibration.kv_users import users_full
from calibration.limits import NAMES
from harness.cli.plan_view import headline, limit_rows, memory_rows, sentence
from harness.export.charts import figure
from harness.export.markup import Child, Markup, element, join
from harness.export.memory_bar import gpu_bar
from harness.ui.sizing import Sized


def card(sized: Sized, number: int) -> Markup:
    """What one deployment gives: answer, numbers, memory, limits, what to mind. ``number``: from 1, of those side by side."""
    told = sized.document
    return element(
        "article",
        element("p", headline(sized.plan), class_="kicker"),
        _answer(told),
        element("p", sentence(sized.plan, sized.sizing)),
        _numbers(sized, told),
        _memory_bar(sized, number),
        _vram(sized),
        _limits(sized),
        _notes(sized),
        class_=f"card look{number}",
        data_fits="yes" if told["fits"] else "no",
    )


def spoken(sized: list[Sized]) -> str:
    """What a screen reader is told after a change."""
    return " ".join(sentence(one.plan, one.sizing) for one in sized)


def _answer(told: Mapping[str, Any]) -> Markup:
    """Streams at once, what binds and what would next."""
    if not told["fits"]:
        return element("h3", "Does not fit", class_="answer bad")
    users = told["users"]
    limits = {name: users[name] for name in NAMES if users[name] is not None}
    binding, following = users["binding"], users["next"]
    said = [element("b", _whole(limits[binding])), " streams at once"]
    then = "" if following is None else f", next {NAMES[following]} at {figure(math.floor(limits[following]))}"
    return join(
        element("h3", said, class_="answer"),
        element("p", f"Binding: {NAMES[binding]}{then}", class_="soft", data_binding=binding, data_next=following),
    )


def _whole(value: float) -> Markup:
    """Whole streams, the exact limit beside them."""
    return element("data", f"{math.floor(value + 1e-9):,}", value=repr(value), data_key="users")


_ESTIMATES = (
    ("throughput_tokens_per_s", "Output, all streams", "tokens/s"),
    ("throughput_tokens_per_s_per_user", "Output, one stream", "tokens/s"),
    ("tpot_ms", "Time per output token", "ms"),
    ("ttft_ms", "Time to first token", "ms"),
)


def _numbers(sized: Sized, told: Mapping[str, Any]) -> Markup:
    """Rates and latencies at the binding limit with their intervals, the pool, and a stream's share of it."""
    rows = [_estimate(told, *row) for row in _ESTIMATES if told.get(row[0]) is not None]
    cluster = told["memory"]["cluster"]
    rows.append(_fact("KV pool", [_datum("kv_pool_tokens", cluster["kv_pool_tokens"]), " tokens"]))
    if told["fits"] and cluster["kv_pool_tokens"]:
        rows.append(_fact("KV of a token", [_datum("kv_bytes_per_token", cluster["kv_bytes_per_token"]), " bytes"]))
    rows.append(_fact("Streams of the whole context", _whole_context(sized)))
    rows.append(_fact("Longest request", [_datum("max_context_tokens", told["max_context_tokens"]), " tokens"]))
    where = (
        f"With {told['at_users']:,} users, at {NAMES.get(told['at_limit'], told['at_limit'])}:"
        if "at_users" in told
        else None
    )
    return join(element("p", where, class_="note") if where else None, element("dl", rows, class_="facts numbers"))


def _whole_context(sized: Sized) -> list[Child]:
    """As many requests of max_model_len as the pool holds: what vLLM calls its maximum concurrency at start."""
    d, pool = sized.plan.deployment, sized.plan.memory.pool
    held = 0.0 if pool is None else users_full(pool, d.max_model_len - 1, 1) * d.dp
    return [_datum("whole_context_streams", held), f", {d.max_model_len:,} tokens each"]


def _estimate(told: Mapping[str, Any], key: str, name: str, unit: str) -> Markup:
    found = told[key]
    ends = [_datum(f"{key}.low", found["low"]), " to ", _datum(f"{key}.high", found["high"])]
    interval = element("span", " (", ends, ", ", found["basis"], ")", class_="soft")
    return _fact(name, [element("b", _datum(f"{key}.value", found["value"])), f" {unit}", interval])


def _fact(name: str, *said: Child) -> Markup:
    return join(element("dt", name), element("dd", said))


def _datum(key: str, value: float | None) -> Markup:
    """A number under the key it has in the plan's document."""
    return element("data", figure(value), value=repr(value), data_key=key)


def _memory_bar(sized: Sized, number: int) -> Markup | None:
    return gpu_bar(f"bar-{number}", "Memory of one {}", sized.plan.memory)


def _vram(sized: Sized) -> Markup:
    head = ("", "bytes", "share", "meaning")
    rows = [
        element(
            "tr",
            element("th", name, scope="row"),
            element("td", size),
            element("td", share),
            element("td", meaning, class_="text"),
        )
        for name, size, share, meaning in memory_rows(sized.plan)
    ]
    return _folded("VRAM, byte by byte", head, rows)


def _limits(sized: Sized) -> Markup:
    rows = [
        element(
            "tr",
            element("th", name.replace("<-", "← binds"), scope="row"),
            element("td", users),
            element("td", meaning, class_="text"),
        )
        for name, users, meaning in limit_rows(sized.plan, sized.sizing)
    ]
    return _folded("Limits on users", ("limit", "users", "meaning"), rows)


def _folded(title: str, head: tuple[str, ...], rows: list[Markup]) -> Markup:
    looks = ["left", *("text" if name == "meaning" else None for name in head[1:])]
    cells = [element("th", name, scope="col", class_=look) for name, look in zip(head, looks, strict=True)]
    table = element("table", element("thead", element("tr", cells)), element("tbody", rows))
    scroll = element("div", table, class_="scroll", tabindex=0, role="region", aria_label=title)
    return element("details", element("summary", title), scroll, open=True)


def _notes(sized: Sized) -> Markup | None:
    found = [*sized.notes, *sized.plan.warnings]
    return element("ul", [element("li", note) for note in found], class_="notes") if found else None
