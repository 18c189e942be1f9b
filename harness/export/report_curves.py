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
from harness.measure.repeats import pooled, usable

if TYPE_CHECKING:
    from calibration.calibration_file import Calibration
    from calibration.factors import FactorSet

Stage = Mapping[str, Any]

#: points of a predicted curve between the levels of a run
BETWEEN = 9
#: request lengths that are drawn apart, and how far two may differ and be one
MOST_LENGTHS, _SAME_LENGTH = 4, 0.05
#: what is said where passes were pooled
REPEATED = (
    "A level that was repeated is one point, the geometric mean of its passes, with an interval no narrower than the passes"
    " lie apart."
)
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


class Group(NamedTuple):
    """Valid stages of one request length, by users, ascending; lengths are means, in tokens."""

    prompt_tokens: float
    output_tokens: float
    stages: tuple[Stage, ...]

    @property
    def users(self) -> list[float]:
        """Its levels, each once."""
        return sorted({float(stage["users"]) for stage in self.stages})

    @property
    def name(self) -> str:
        return f"{self.prompt_tokens:.0f} + {self.output_tokens:.0f} tokens"

    def at(self, users: float) -> list[Stage]:
        return [stage for stage in self.stages if stage["users"] == users]


def groups(stages: Sequence[Stage]) -> list[Group]:
    """The valid stages of a number of users that have token counts, by the lengths of their requests: those with the most
    stages first, as many as a drawing can tell apart."""
    found: dict[tuple[float, float], list[Stage]] = {}
    for stage in stages:
        lengths = stage["totals"]["prompt_tokens_mean"], stage["totals"]["output_tokens_mean"]
        if not stage["valid"] or not _is_level(stage) or None in lengths:
            continue
        key = next((known for known in found if _alike(known, lengths)), lengths)
        found.setdefault(key, []).append(stage)
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))[:MOST_LENGTHS]
    return [Group(*lengths, tuple(sorted(rows, key=lambda s: int(s["users"])))) for lengths, rows in ranked]


def _is_level(stage: Stage) -> bool:
    return stage["request_rate"] is None and bool(stage["users"])


def _alike(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return all(abs(x - y) <= _SAME_LENGTH * max(x, y) for x, y in zip(a, b, strict=True))


def of_calibration(calibration: Calibration, found: Sequence[Group]) -> list[dict[str, Series]]:
    """What a calibration predicts for each group, by metric, at its levels and between them: as ``predict`` does, so from
    the wall on by the twin.

    Raises:
        InputError: its deployment cannot be rebuilt.
    """
    stages = [(stage.observation.users, stage.observation.shape) for stage in calibration.used]
    predictor = Predictor(serving(calibration.rebuild_deployment()), calibration.factors, measured_loads(stages))
    return [_of_group(predictor, group, i, alone=len(found) == 1) for i, group in enumerate(found, 1)]


def _of_group(predictor: Predictor, group: Group, place: int, *, alone: bool) -> dict[str, Series]:
    shape = Shape(prompt_tokens=group.prompt_tokens, output_tokens=group.output_tokens)
    between = {round(n) for n in spread(min(group.users), max(group.users), BETWEEN)}
    at, predictions = [], []
    for n in sorted(between | {round(n) for n in group.users}):
        prediction = predictor.predict(Load(shape=shape, users=n), percentiles=False)
        assert isinstance(prediction, Prediction), "only a rate can overload"
        at.append(float(n))
        predictions.append(prediction)
    by_metric = {
        "throughput": [p.output_tokens_per_s for p in predictions],
        "ttft": [p.ttft_s for p in predictions],
        "tpot": [p.tpot_s for p in predictions],
    }
    name, look = ("predicted", 2) if alone else (f"{group.name}, predicted", place)
    return {m.key: predicted_series(name, at, by_metric[m.key], m.scale, look) for m in METRICS}


def curves(
    found: Sequence[Group], predictions: Sequence[Mapping[str, Series]], wall: tuple[float, float] | None
) -> list[Chart]:
    """Throughput, TTFT and TPOT over users, measured and predicted; ``wall`` is the predicted interval of the first limit."""
    if not found:
        return []
    users = [n for group in found for n in group.users]
    axis = Axis(label="users", log=max(users) / min(users) >= _LOG_SPAN)
    marks = [] if wall is None else [Mark(label="predicted first limit", low=wall[0], high=wall[1])]
    return [_curve(metric, axis, found, predictions, marks) for metric in METRICS]


def _curve(
    metric: Metric, axis: Axis, found: Sequence[Group], predictions: Sequence[Mapping[str, Series]], marks: list[Mark]
) -> Chart:
    series = [predicted_of[metric.key] for predicted_of in predictions]
    for place, group in enumerate(found, 1):
        series += _measured(metric, group, place, alone=len(found) == 1)
    repeated = any(len(group.at(n)) > 1 for group in found for n in group.users)
    said = ["Whiskers are 90 % intervals of the mean."] if any(s.style == "measured" and s.low for s in series) else []
    said += [REPEATED] if repeated else []
    return Chart(
        key=f"curve-{metric.key}",
        title=metric.title,
        x=axis,
        y=Axis(label=metric.unit),
        series=series,
        marks=marks,
        note=" ".join(said),
    )


def _measured(metric: Metric, group: Group, place: int, *, alone: bool) -> list[Series]:
    if metric.key == "throughput":
        name = "measured" if alone else f"{group.name}, measured"
        return [_with_intervals(name, group, "output_tokens_per_s", place)]
    key = f"{metric.key}_ms"
    if not alone:
        return [_with_intervals(f"{group.name}, measured mean", group, key, place)]
    tail = [_mean([stage[key]["p99"] for stage in group.at(n)]) for n in group.users]
    p99 = Series(name="measured p99", x=group.users, y=tail, style="trace", look=3)
    return [_with_intervals("measured mean", group, key, place), p99]


def _with_intervals(name: str, group: Group, key: str, look: int) -> Series:
    """A measured curve with the intervals that the summary has of its means; runs of older versions have none. Passes of
    one level are pooled."""
    points = [_point(group.at(n), key) for n in group.users]
    y, low, high = ([point[i] for point in points] for i in range(3))
    if all(end is None for end in low):
        return Series(name=name, x=group.users, y=y, look=look)
    return Series(name=name, x=group.users, y=y, low=low, high=high, look=look)


def _point(row: Sequence[Stage], key: str) -> tuple[float | None, float | None, float | None]:
    """A level's value with the ends of its interval, as far as there is one."""
    passes = [stage for stage in row if usable(stage)]
    if (found := pooled(passes, key)) is not None:
        return found.value, found.low, found.high
    known = [(stage[key] if key == "output_tokens_per_s" else stage[key]["mean"], stage) for stage in row]
    value, stage = next(((value, stage) for value, stage in known if value is not None), (None, row[0]))
    interval = (stage.get("intervals") or {}).get(key)
    return (value, None, None) if interval is None else (value, interval["low"], interval["high"])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


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
