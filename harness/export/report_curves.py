"""The curves of a report: what was measured at each level, and what the calibrated model predicts between and beyond."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from calibration.prediction import Estimate, propagate
from calibration.queueing import Shape, closed_loop
from calibration.serving import Serving, serving
from harness.export.charts import Axis, Chart, Mark, Series, Style
from harness.export.timeline import Timeline

if TYPE_CHECKING:
    from calibration.calibration_file import Calibration
    from calibration.factors import FactorSet

Stage = Mapping[str, Any]

#: points of a predicted curve
POINTS = 25
#: users span more than this from least to most: a logarithmic axis
_LOG_SPAN = 6.0
#: a 90 % interval of a mean, in standard errors
_Z90 = 1.645


class Metric(NamedTuple):
    """A curve over users: key of the prediction, title, unit, and the scale from the model's units."""

    key: str
    title: str
    unit: str
    scale: float


METRICS = (
    Metric("throughput", "Output tokens a second, all streams", "tokens/s", 1.0),
    Metric("ttft", "Time to first token", "ms", 1e3),
    Metric("tpot", "Time per output token", "ms", 1e3),
)


def predicted(served: Serving, factors: FactorSet, shape: Shape, users: Sequence[float]) -> dict[str, list[Estimate]]:
    """Throughput (tokens/s), TTFT and TPOT (s) at each number of users, with 90 % intervals."""
    found: dict[str, list[Estimate]] = {metric.key: [] for metric in METRICS}
    for n in users:

        def outcome(f: FactorSet, n: float = n) -> dict[str, float]:
            point = closed_loop(served.server(f, shape), shape, n)
            return {"throughput": point.output_tokens_per_s, "ttft": point.ttft_s, "tpot": point.tpot_s}

        basis = factors.basis(n, shape.prompt_tokens, shape.output_tokens)
        for key, estimate in propagate(outcome, factors, basis).items():
            found[key].append(estimate)
    return found


def spread(low: float, high: float, points: int = POINTS) -> list[float]:
    """``points`` numbers of users from low to high, equal in ratio."""
    if high <= low:
        return [low]
    ratio = (high / low) ** (1 / (points - 1))
    return [low * ratio**i for i in range(points)]


def predicted_series(
    name: str, users: Sequence[float], estimates: Sequence[Estimate], scale: float, look: int
) -> Series:
    """A predicted curve with its band."""
    return Series(
        name=name,
        x=users,
        y=[e.value * scale for e in estimates],
        low=[e.low * scale for e in estimates],
        high=[e.high * scale for e in estimates],
        style="predicted",
        look=look,
    )


def of_calibration(
    calibration: Calibration, prompt_tokens: float, output_tokens: float, users: Sequence[float]
) -> dict[str, Series]:
    """What a calibration predicts for these lengths, by metric, over the users of the run.

    Raises:
        InputError: its deployment cannot be rebuilt.
    """
    at = spread(min(users), max(users))
    shape = Shape(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    found = predicted(serving(calibration.rebuild_deployment()), calibration.factors, shape, at)
    return {m.key: predicted_series("predicted", at, found[m.key], m.scale, 2) for m in METRICS}


def curves(stages: Sequence[Stage], predictions: Mapping[str, Series], wall: tuple[float, float] | None) -> list[Chart]:
    """Throughput, TTFT and TPOT over users, of valid stages; ``wall`` is the predicted interval of the first limit."""
    rows = sorted((s for s in stages if s["valid"] and _is_level(s)), key=lambda s: s["users"])
    if not rows:
        return []
    users = [float(s["users"]) for s in rows]
    axis = Axis(label="users", log=max(users) / min(users) >= _LOG_SPAN)
    marks = [] if wall is None else [Mark(label="predicted first limit", low=wall[0], high=wall[1])]
    return [
        _curve(metric, axis, rows, users, [predictions[metric.key]] if metric.key in predictions else [], marks)
        for metric in METRICS
    ]


def _is_level(stage: Stage) -> bool:
    return stage["request_rate"] is None and stage["users"] is not None


def _curve(
    metric: Metric, axis: Axis, rows: Sequence[Stage], users: list[float], more: list[Series], marks: list[Mark]
) -> Chart:
    if metric.key == "throughput":
        measured = [Series(name="measured", x=users, y=[s["output_tokens_per_s"] for s in rows])]
        note = ""
    else:
        stats = [s[f"{metric.key}_ms"] for s in rows]
        ends = [_mean_interval(s) for s in stats]
        low, high = [e and e[0] for e in ends], [e and e[1] for e in ends]
        mean = Series(name="measured mean", x=users, y=[s["mean"] for s in stats], low=low, high=high)
        tail: Style = "trace"
        measured = [mean, Series(name="measured p99", x=users, y=[s["p99"] for s in stats], style=tail, look=3)]
        note = "Whiskers are 90 % intervals of the mean, requests taken as independent."
    return Chart(
        key=f"curve-{metric.key}",
        title=metric.title,
        x=axis,
        y=Axis(label=metric.unit),
        series=[*more, *measured],
        marks=marks,
        note=note,
    )


def _mean_interval(stats: Mapping[str, Any]) -> tuple[float, float] | None:
    """A 90 % interval of a mean from count and standard deviation; None from fewer than two."""
    if stats["mean"] is None or stats["n"] < 2:
        return None
    half = _Z90 * stats["std"] / math.sqrt(stats["n"] - 1)
    return max(0.0, stats["mean"] - half), stats["mean"] + half


def over_time(line: Timeline, stages: Sequence[Stage]) -> list[Chart]:
    """KV usage, waiting and running, preemptions and tokens over time; edges are where stages' windows begin."""
    if not line.at_s:
        return []
    edges = [
        Mark(label="", low=s["window"]["start_s"], high=s["window"]["start_s"])
        for s in stages
        if s["window"] is not None
    ]
    axis = Axis(label="seconds since the run began")

    def chart(key: str, title: str, y: Axis, *series: tuple[str, Sequence[float | None]]) -> Chart:
        drawn = [Series(name=n, x=line.at_s, y=v, style="trace", look=i) for i, (n, v) in enumerate(series, 1)]
        return Chart(key=f"time-{key}", title=title, x=axis, y=y, series=drawn, marks=edges)

    full = Axis(label="share of the pool", percent=True, most=1.0)
    return [
        chart("kv", "KV cache in use, the fullest engine", full, ("KV usage", line.kv_cache_usage)),
        chart("queue", "Streams", Axis(label="streams"), ("running", line.running), ("waiting", line.waiting)),
        chart("preempted", "Preemptions so far", Axis(label="preemptions"), ("preemptions", line.preemptions)),
        chart("tokens", "Output tokens a second", Axis(label="tokens/s"), ("tokens/s", line.output_tokens_per_s)),
    ]
