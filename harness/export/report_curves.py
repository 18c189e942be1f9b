"""The curves of a report: what was measured at each level, and what the calibrated model predicts between and beyond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from calibration.predict import Load, Prediction, Predictor, measured_loads
from calibration.prediction import Estimate, propagate
from calibration.queueing import Shape, closed_loop
from calibration.serving import Serving, serving
from harness.export.charts import Axis, Chart, Mark, Series
from harness.export.timeline import Timeline

if TYPE_CHECKING:
    from calibration.calibration_file import Calibration
    from calibration.factors import FactorSet

Stage = Mapping[str, Any]

#: points of a predicted curve between the levels of a run
BETWEEN = 9
#: users span more than this from least to most: a logarithmic axis
_LOG_SPAN = 6.0


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


def spread(low: float, high: float, points: int) -> list[float]:
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
    """What a calibration predicts for these lengths, by metric, at the levels of the run and between them: as ``predict``
    does, so from the wall on by the twin.

    Raises:
        InputError: its deployment cannot be rebuilt.
    """
    shape = Shape(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    stages = [(stage.observation.users, stage.observation.shape) for stage in calibration.used]
    predictor = Predictor(serving(calibration.rebuild_deployment()), calibration.factors, measured_loads(stages))
    between = {round(n) for n in spread(min(users), max(users), BETWEEN)}
    at, found = [], []
    for n in sorted(between | {round(n) for n in users}):
        prediction = predictor.predict(Load(shape=shape, users=n), percentiles=False)
        assert isinstance(prediction, Prediction), "only a rate can overload"
        at.append(float(n))
        found.append(prediction)
    by_metric = {
        "throughput": [p.output_tokens_per_s for p in found],
        "ttft": [p.ttft_s for p in found],
        "tpot": [p.tpot_s for p in found],
    }
    return {m.key: predicted_series("predicted", at, by_metric[m.key], m.scale, 2) for m in METRICS}


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
        measured = [
            _with_intervals("measured", rows, users, "output_tokens_per_s", [s["output_tokens_per_s"] for s in rows])
        ]
    else:
        key = f"{metric.key}_ms"
        mean = _with_intervals("measured mean", rows, users, key, [s[key]["mean"] for s in rows])
        tail = Series(name="measured p99", x=users, y=[s[key]["p99"] for s in rows], style="trace", look=3)
        measured = [mean, tail]
    sure = bool(measured[0].low)
    return Chart(
        key=f"curve-{metric.key}",
        title=metric.title,
        x=axis,
        y=Axis(label=metric.unit),
        series=[*more, *measured],
        marks=marks,
        note="Whiskers are 90 % intervals of the mean." if sure else "",
    )


def _with_intervals(name: str, rows: Sequence[Stage], users: list[float], key: str, y: list[float | None]) -> Series:
    """A measured curve with the intervals that the summary has of its means; runs of older versions have none."""
    ends = [(stage.get("intervals") or {}).get(key) for stage in rows]
    if not any(ends):
        return Series(name=name, x=users, y=y)
    return Series(name=name, x=users, y=y, low=[e and e["low"] for e in ends], high=[e and e["high"] for e in ends])


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
