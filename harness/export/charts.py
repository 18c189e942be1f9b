"""Charts as SVG, for the report and the page alike: values in, markup out.

A chart is a figure with a title, a drawing with a description for who cannot see it, a legend and the values as a table.
Colours, fonts and line widths are classes of ``look.css``: one drawing serves light, dark and print. A series is told from
another by dash and dot as well as by colour; an interval is a band where a curve is predicted, a whisker where it was
measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from harness.export.markup import Markup, element, join

WIDTH, HEIGHT = 440, 284
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 26, 42

Style = Literal["measured", "predicted", "trace"]
Values = Sequence[float | None]

NOT_MEASURED = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values over x, ascending. ``low`` and ``high`` bound each value; None where not known, in any of them.

    ``style``: "measured" is dots on a line with whiskers, "predicted" a dashed line in a band, "trace" a plain line over
    time. ``look`` (1 to 4) is its colour and dot.
    """

    name: str
    x: Sequence[float]
    y: Values
    low: Values = ()
    high: Values = ()
    style: Style = "measured"
    look: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What is counted, and how: ``log`` needs values above 0; ``most`` is where the axis ends at least."""

    label: str
    log: bool = False
    most: float | None = None
    percent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A span of x that means something (a predicted wall, a stage), or one value where ``low`` is ``high``."""

    label: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """``key`` is unique on its page. ``note`` is shown below the drawing and read with it."""

    key: str
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = field(default=())
    note: str = ""


def figure(value: float | None, *, percent: bool = False) -> str:
    """Three significant digits with thousands separated, whole numbers as they are; a dash where nothing was measured."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED if value is None or math.isnan(value) else "∞"
    if percent:
        return f"{100 * value:.3g} %"
    size = abs(value)
    if value == round(value) and size < 1e12:
        return f"{value:,.0f}"
    if size < 0.001 or size >= 1e12:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(size)))
    return f"{value:,.{digits}f}"


def _tick(value: float, axis: Axis) -> str:
    return f"{100 * value:.6g} %" if axis.percent else f"{value:,.6g}"


def draw(chart: Chart) -> Markup:
    """The figure: drawing, legend, table of values."""
    known = [s for s in chart.series if any(value is not None for value in s.y)]
    if not known:
        empty = element("p", "Nothing was measured here.", class_="none")
        return element("figure", element("h3", chart.title), empty, class_="chart")
    caption = [_legend(known, chart.marks), element("p", chart.note, class_="note") if chart.note else None]
    return element(
        "figure",
        element("h3", chart.title, id=f"{chart.key}-head"),
        svg(chart, known),
        element("figcaption", caption),
        _table(chart, known),
        class_="chart",
    )


def describe(chart: Chart, known: Sequence[Series]) -> str:
    """The drawing in words: ends and greatest value of each series, and the marks."""
    said = [f"{chart.y.label} over {chart.x.label}."]
    for series in known:
        points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]
        (x0, y0), (x1, y1) = points[0], points[-1]
        top = max(points, key=lambda point: point[1])
        shown = [(figure(x), figure(y, percent=chart.y.percent)) for x, y in ((x0, y0), (x1, y1), top)]
        said.append(
            f"{series.name}: {shown[0][1]} at {shown[0][0]}, {shown[1][1]} at {shown[1][0]};"
            f" greatest {shown[2][1]} at {shown[2][0]}."
        )
    said += [f"{mark.label}: {_span(mark)}." for mark in chart.marks if mark.label]
    return " ".join([*said, chart.note]).strip()


def _span(mark: Mark) -> str:
    return figure(mark.low) if mark.low == mark.high else f"{figure(mark.low)} to {figure(mark.high)}"


class _Scale:
    """Values of one axis to units of the drawing, and where its ticks stand."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool) -> None:
        self.log = log
        self.ticks = log_ticks(low, high) if log else linear_ticks(low, high)
        self.low = low if log else min(low, self.ticks[0])
        self.high = high if log else max(high, self.ticks[-1])
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        a, b, v = (self.low, self.high, value)
        if self.log:
            a, b, v = math.log(a), math.log(b), math.log(max(value, self.low))
        share = 0.5 if b == a else (v - a) / (b - a)
        return self._start + min(max(share, 0.0), 1.0) * (self._end - self._start)


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Steps of 1, 2 or 5 times a power of ten that cover the span, at most ``most`` of them and one."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Powers of two inside the span, every one, second, third ... so that at most ``most`` stand."""
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    every = max(1, -(-(last - first + 1) // most))
    return [2.0**power for power in range(first, last + 1, every)]


def svg(chart: Chart, known: Sequence[Series]) -> Markup:
    """The drawing alone, with its title and description."""
    x, y = _x_scale(chart, known), _y_scale(chart, known)
    title, about = f"{chart.key}-title", f"{chart.key}-desc"
    return element(
        "svg",
        element("title", chart.title, id=title),
        element("desc", describe(chart, known), id=about),
        _marks(chart.marks, x),
        _axes(chart, x, y),
        [_band(s, x, y) for s in known if s.style == "predicted"],
        [_drawn(s, x, y) for s in known],
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"{title} {about}",
    )


def _x_scale(chart: Chart, known: Sequence[Series]) -> _Scale:
    values = [v for s in known for v in s.x]
    low, high = min(values), max(values)
    if chart.x.log and low <= 0:
        raise ValueError(f"{chart.key}: a logarithmic axis cannot show {low}")
    if low == high:
        low, high = (low / 2, high * 2) if chart.x.log else (low - 1, high + 1)
    return _Scale(low, high, LEFT, WIDTH - RIGHT, log=chart.x.log)


def _y_scale(chart: Chart, known: Sequence[Series]) -> _Scale:
    """From 0, up to the values; an interval that is far wider than its curve is cut rather than the curve flattened."""
    values = [v for s in known for v in s.y if v is not None]
    ends = [v for s in known for v in s.high if v is not None and math.isfinite(v)]
    top = max(values, default=0.0)
    high = max([top, chart.y.most or 0.0, *(min(end, 2 * top) for end in ends)])
    return _Scale(0.0, high or 1.0, HEIGHT - BOTTOM, TOP, log=False)


def _axes(chart: Chart, x: _Scale, y: _Scale) -> Markup:
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y.ticks:
        at = y(tick)
        parts.append(element("line", x1=LEFT, x2=right, y1=at, y2=at, class_="grid"))
        shown = _tick(tick, chart.y)
        parts.append(element("text", shown, x=LEFT - 6, y=at + 4, text_anchor="end", class_="tick"))
    for tick in x.ticks:
        if x.low <= tick <= x.high:
            at = x(tick)
            parts.append(element("line", x1=at, x2=at, y1=floor, y2=floor + 4, class_="axis"))
            shown = _tick(tick, chart.x)
            parts.append(element("text", shown, x=at, y=floor + 17, text_anchor="middle", class_="tick"))
    parts.append(element("line", x1=LEFT, x2=right, y1=floor, y2=floor, class_="axis"))
    middle = (LEFT + right) / 2
    parts.append(element("text", chart.x.label, x=middle, y=HEIGHT - 6, text_anchor="middle", class_="label"))
    # above the axis, where it is as long as it likes
    parts.append(element("text", chart.y.label, x=2, y=12, class_="label"))
    return element("g", parts)


def _marks(marks: Sequence[Mark], x: _Scale) -> list[Markup]:
    drawn = []
    for mark in marks:
        low, high = x(max(mark.low, x.low)), x(min(mark.high, x.high))
        if mark.high < x.low or mark.low > x.high:
            continue
        wide = max(high - low, 1.5)
        kind = "mark" if mark.label else "edge"
        drawn.append(element("rect", x=low, y=TOP, width=wide, height=HEIGHT - BOTTOM - TOP, class_=kind))
    return drawn


def _runs(series: Series) -> Iterator[list[int]]:
    """Indices of values that stand side by side without a gap."""
    indices = range(len(series.x))
    for there, group in groupby(indices, key=lambda i: series.y[i] is not None):
        if there:
            yield list(group)


def _band(series: Series, x: _Scale, y: _Scale) -> Markup | None:
    rows = [
        (x(at), y(low), y(high if math.isfinite(high) else y.high))
        for at, low, high in zip(series.x, series.low, series.high, strict=False)
        if low is not None and high is not None
    ]
    if not rows:
        return None
    there = [f"{at:.1f},{top:.1f}" for at, _, top in rows]
    back = [f"{at:.1f},{bottom:.1f}" for at, bottom, _ in reversed(rows)]
    return element("polygon", points=" ".join(there + back), class_=f"band s{series.look}")


def _drawn(series: Series, x: _Scale, y: _Scale) -> Markup:
    parts: list[Markup | None] = []
    for run in _runs(series):
        points = " ".join(f"{x(series.x[i]):.1f},{y(series.y[i] or 0.0):.1f}" for i in run)
        parts.append(element("polyline", points=points, class_="line"))
    if series.style == "measured":
        parts += [_whisker(series, i, x, y) for i in range(len(series.x))]
        parts += [_dot(series.look, x(at), y(v)) for at, v in zip(series.x, series.y, strict=True) if v is not None]
    return element("g", parts, class_=f"{series.style} s{series.look}")


def _whisker(series: Series, index: int, x: _Scale, y: _Scale) -> Markup | None:
    if not series.low or not series.high:
        return None
    low, high = series.low[index], series.high[index]
    if low is None or high is None or series.y[index] is None:
        return None
    at, bottom, top = x(series.x[index]), y(low), y(high)
    path = f"M{at - 4:.1f} {top:.1f}h8M{at:.1f} {top:.1f}V{bottom:.1f}M{at - 4:.1f} {bottom:.1f}h8"
    return element("path", d=path, class_="whisker")


def _dot(look: int, at: float, height: float) -> Markup:
    """Circle, square, diamond, triangle by look."""
    if look == 2:
        return element("rect", x=at - 3.5, y=height - 3.5, width=7, height=7, class_="dot")
    if look == 3:
        return element("path", d=f"M{at:.1f} {height - 5:.1f}l5 5l-5 5l-5 -5z", class_="dot")
    if look == 4:
        return element("path", d=f"M{at:.1f} {height - 5:.1f}l5 9h-10z", class_="dot")
    return element("circle", cx=at, cy=height, r=3.8, class_="dot")


def _legend(known: Sequence[Series], marks: Sequence[Mark]) -> Markup:
    items = [element("li", _swatch(series), element("span", series.name)) for series in known]
    named = [mark for mark in marks if mark.label]
    items += [element("li", _mark_swatch(), element("span", f"{m.label}: {_span(m)}")) for m in named]
    return element("ul", items, class_="legend")


def _swatch(series: Series) -> Markup:
    inside = [element("line", x1=1, x2=27, y1=7, y2=7, class_="line")]
    if series.style == "measured":
        inside.append(_dot(series.look, 14.0, 7.0))
    box = element("rect", x=1, y=1, width=26, height=12, class_=f"band s{series.look}")
    drawn = element("g", inside, class_=f"{series.style} s{series.look}")
    banded = series.style == "predicted" and len(series.low) > 0
    return element("svg", box if banded else None, drawn, viewBox="0 0 28 14", class_="swatch", aria_hidden="true")


def _mark_swatch() -> Markup:
    box = element("rect", x=8, y=1, width=12, height=12, class_="mark")
    return element("svg", box, viewBox="0 0 28 14", class_="swatch", aria_hidden="true")


def _table(chart: Chart, known: Sequence[Series]) -> Markup:
    """The values, one row an x; folded away until asked for."""
    places = sorted({at for series in known for at in series.x})
    columns = [{at: i for i, at in enumerate(series.x)} for series in known]
    head = [element("th", chart.x.label, scope="col")]
    head += [element("th", f"{series.name} ({chart.y.label})", scope="col") for series in known]
    rows = []
    for at in places:
        cells = [_cell(s, column.get(at), chart.y) for s, column in zip(known, columns, strict=True)]
        rows.append(element("tr", element("th", _shown_x(at, chart.x), scope="row"), cells))
    table = element("table", element("thead", element("tr", head)), element("tbody", rows))
    scroll = element("div", table, class_="scroll", tabindex=0, role="region", aria_label=f"Values: {chart.title}")
    return element("details", element("summary", "Values"), scroll)


def _shown_x(at: float, axis: Axis) -> str:
    return f"{at:g}" if at == int(at) and abs(at) < 1e6 else figure(at, percent=axis.percent)


def _cell(series: Series, index: int | None, axis: Axis) -> Markup:
    value = None if index is None else series.y[index]
    shown: list[Markup | str] = [datum(value, percent=axis.percent)]
    if index is not None and series.low and series.high and series.low[index] is not None:
        low, high = (figure(end[index], percent=axis.percent) for end in (series.low, series.high))
        shown.append(f" ({low} to {high})")
    return element("td", shown)


def datum(value: float | None, *, percent: bool = False) -> Markup:
    """A number as shown, with the exact one beside it for machines."""
    shown = figure(value, percent=percent)
    return join(shown) if value is None else element("data", shown, value=repr(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a bar: ``look`` 1 to 4, or 0 for what is free."""

    name: str
    size: float
    shown: str
    look: int


def bar(key: str, title: str, parts: Sequence[Part], note: str = "") -> Markup:
    """A stacked bar whose pieces are to scale, with a legend that gives each its size."""
    total = sum(part.size for part in parts)
    at, drawn = 0.0, []
    for part in parts:
        wide = WIDTH * part.size / total if total else 0.0
        drawn.append(element("rect", x=at, y=0, width=wide, height=34, class_=f"part p{part.look}"))
        at += wide
    about = "; ".join(f"{p.name} {p.shown} ({p.size / total:.1%})" for p in parts if total)
    drawing = element(
        "svg",
        element("title", title, id=f"{key}-title"),
        element("desc", about, id=f"{key}-desc"),
        drawn,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} 34",
        preserveAspectRatio="none",
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        class_="bar",
    )
    items = [
        element(
            "li",
            element(
                "svg",
                element("rect", x=1, y=1, width=12, height=12, class_=f"part p{part.look}"),
                viewBox="0 0 14 14",
                class_="swatch small",
                aria_hidden="true",
            ),
            element("span", f"{part.name} {part.shown}"),
        )
        for part in parts
    ]
    caption = element(
        "figcaption", element("ul", items, class_="legend"), element("p", note, class_="note") if note else None
    )
    return element("figure", element("h3", title), drawing, caption, class_="chart wide")
