"""Rules of a gate: ``ttft_ms.p99 > +10%`` and the like, read strictly, held against a comparison.

A rule breaks where the change lies beyond its threshold and its interval does not hold "no change": what is only noise
breaks nothing, and what is only sure breaks nothing either. ``worse`` breaks where any metric is.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from calibration.errors import InputError
from calibration.gate import METRICS, Options, Row, Sample, compare_samples

_RULE = re.compile(r"\s*([a-z_0-9.]+)\s*(<|>)\s*([+-]?)(\d+(?:\.\d+)?)\s*%\s*")
_EXAMPLE = "for example --fail-if 'ttft_ms.p99 > +10%', --fail-if 'output_tokens_per_s < -5%' or --fail-if worse"


@dataclass(frozen=True, slots=True)
class Rule:
    """``metric`` is None for ``worse``. ``threshold``: a share, 0.1 for 10 % (of ``failure_rate``: of all requests)."""

    text: str
    metric: str | None
    sign: Literal["<", ">"]
    threshold: float

    def broken_by(self, row: Row) -> bool:
        """Is this row beyond the threshold, and not by noise?"""
        if self.metric is None:
            return row.verdict == "worse"
        if row.metric != self.metric or row.change is None or row.low is None or row.high is None:
            return False
        if self.sign == ">":
            return row.change > self.threshold and row.low > min(0.0, self.threshold)
        return row.change < self.threshold and row.high < max(0.0, self.threshold)


def parse_rule(text: str) -> Rule:
    """``METRIC > +N%``, ``METRIC < -N%`` or ``worse``.

    Raises:
        InputError: something else; says what was expected.
    """
    if text.strip() == "worse":
        return Rule("worse", None, ">", 0.0)
    match = _RULE.fullmatch(text)
    if match is None:
        raise InputError(f"fail-if = {text!r}, expected METRIC > +N%, METRIC < -N% or worse", _EXAMPLE)
    metric, sign, plus, number = match.groups()
    if metric not in METRICS:
        near = difflib.get_close_matches(metric, METRICS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"fail-if = {text!r}: unknown metric {metric!r}", f"{hint}known: {', '.join(METRICS)}")
    threshold = float(number) / 100 * (-1 if plus == "-" else 1)
    if (sign == ">" and threshold < 0) or (sign == "<" and threshold > 0):
        raise InputError(f"fail-if = {text!r}: it breaks where nothing changes", _EXAMPLE)
    return Rule(" ".join(text.split()), metric, ">" if sign == ">" else "<", threshold)


@dataclass(frozen=True, slots=True)
class Ruling:
    """A rule, the rows that break it, and those of its rows whose samples are too small to tell."""

    rule: Rule
    broken_by: tuple[Row, ...]
    untold: tuple[Row, ...]

    @property
    def broken(self) -> bool:
        return bool(self.broken_by)


def rulings(
    rules: Sequence[Rule], a: Sequence[Sample], b: Sequence[Sample], options: Options | None = None
) -> list[Ruling]:
    """Every rule held against two runs. What a rule asks was said beforehand, so its rows are compared among those of the
    rules alone, and are surer than in the table of everything; ``worse`` asks everything.

    Raises:
        InputError: no load is in both runs, or a rule's metric was measured at none: then it can say nothing, and silence
            is no pass.
    """
    asked = tuple(dict.fromkeys(rule.metric for rule in rules if rule.metric is not None))
    told = compare_samples(a, b, options, asked) if asked else []
    everything = compare_samples(a, b, options) if any(rule.metric is None for rule in rules) else []
    found = []
    for rule in rules:
        rows = [row for row in told if row.metric == rule.metric] if rule.metric is not None else everything
        if all(row.change is None for row in rows):
            raise InputError(f"fail-if = {rule.text!r}: {rule.metric} was not measured at any load of both runs")
        untold = tuple(row for row in rows if row.verdict == "unclear") if rule.metric is not None else ()
        broken = tuple(row for row in rows if rule.broken_by(row))
        found.append(Ruling(rule, broken, untold))
    return found
