"""Charts: what is drawn is what was given, and nothing a text holds is markup."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.export.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Chart,
    Mark,
    Part,
    Series,
    bar,
    draw,
    figure,
    linear_ticks,
    log_ticks,
    svg,
)
from harness.export.markup import element, join, text

SVG = "{http://www.w3.org/2000/svg}"
LEVELS = Series(name="measured", x=[1, 4, 16, 64], y=[10.0, 40.0, 120.0, 130.0])


def chart(*series: Series, **more: object) -> Chart:
    about = {"key": "c", "title": "Tokens", "x": Axis(label="users", log=True), "y": Axis(label="tokens/s")}
    return Chart(**(about | {"series": series} | more))  # type: ignore[arg-type]  # by name


def drawn(*series: Series, **more: object) -> ET.Element:
    return ET.fromstring(svg(chart(*series, **more), series))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (float("inf"), "∞"),
        (0, "0"),
        (0.0, "0"),
        (12, "12"),
        (9.996, "10.00"),
        (10.04, "10.0"),
        (0.01234, "0.0123"),
        (1234.5, "1,234"),
        (0.00001, "1.00e-05"),
        (-3.14159, "-3.14"),
    ],
)
def test_a_number_has_three_significant_digits(value: float | None, shown: str) -> None:
    assert figure(value) == shown


def test_a_share_is_a_percentage() -> None:
    assert figure(0.275, percent=True) == "27.5 %"


@given(low=st.floats(0, 1e6), span=st.floats(1e-3, 1e9))
def test_linear_ticks_cover_the_span_in_few_equal_steps(low: float, span: float) -> None:
    ticks = linear_ticks(low, low + span)
    assert ticks[0] <= low + 1e-6 * span
    assert ticks[-1] >= low + span * (1 - 1e-6)
    assert 2 <= len(ticks) <= 9


@given(low=st.integers(1, 1000), times=st.integers(2, 100_000))
def test_log_ticks_are_powers_of_two_inside_the_span(low: int, times: int) -> None:
    ticks = log_ticks(low, low * times)
    assert 1 <= len(ticks) <= 8
    assert all(
        low * 0.999 <= tick <= low * times * 1.001 and tick == 2 ** round(tick.bit_length() - 1)
        for tick in map(int, ticks)
    )


def test_every_measured_value_is_a_dot_at_its_place() -> None:
    dots = drawn(LEVELS).findall(f".//{SVG}circle")
    assert [round(float(dot.get("cx", "0"))) for dot in dots] == [LEFT, LEFT + 123, LEFT + 247, WIDTH - RIGHT]
    floor, top = HEIGHT - BOTTOM, TOP
    # the axis goes to 150
    assert float(dots[2].get("cy", "0")) == pytest.approx(floor - (floor - top) * 120 / 150, abs=0.1)


def test_a_value_that_is_missing_breaks_the_line() -> None:
    gap = Series(name="m", x=[1, 2, 4, 8, 16], y=[1.0, 2.0, None, 3.0, 4.0])
    assert len(drawn(gap).findall(f".//{SVG}polyline")) == 2
    assert len(drawn(gap).findall(f".//{SVG}circle")) == 4


def test_an_interval_is_a_whisker_where_measured_and_a_band_where_predicted() -> None:
    ends = {"low": [1.0, 3.0], "high": [3.0, None]}
    measured = drawn(Series(name="m", x=[1, 2], y=[2.0, 4.0], **ends))  # type: ignore[arg-type]
    assert [path.get("class") for path in measured.findall(f".//{SVG}path")] == ["whisker"]
    ends = {"low": [1.0, 3.0], "high": [3.0, 5.0]}
    band = drawn(Series(name="p", x=[1, 2], y=[2.0, 4.0], style="predicted", **ends))  # type: ignore[arg-type]
    polygon = band.find(f".//{SVG}polygon")
    assert polygon is not None
    assert len(polygon.get("points", "").split()) == 4


def test_nothing_is_drawn_outside_the_frame() -> None:
    wild = Series(name="p", x=[1, 2], y=[1.0, 2.0], low=[0.1, 0.2], high=[float("inf"), 1e9], style="predicted")
    polygon = drawn(wild, marks=[Mark(label="wall", low=0.5, high=99.0)]).find(f".//{SVG}polygon")
    assert polygon is not None
    for point in polygon.get("points", "").split():
        x, y = map(float, point.split(","))
        assert LEFT <= x <= WIDTH - RIGHT
        assert TOP <= y <= HEIGHT - BOTTOM


def test_who_cannot_see_it_is_told_ends_and_greatest_value() -> None:
    said = drawn(LEVELS, marks=[Mark(label="predicted wall", low=20, high=30)], note="A note.").find(f"{SVG}desc")
    assert said is not None
    assert said.text == (
        "tokens/s over users. measured: 10 at 1, 130 at 64; greatest 130 at 64. predicted wall: 20 to 30. A note."
    )


def test_the_table_holds_exact_values() -> None:
    page = ET.fromstring(draw(chart(Series(name="m", x=[1, 2], y=[1 / 3, None]))))
    cells = page.findall(".//tbody/tr/td")
    exact = cells[0].find("data")
    assert exact is not None
    assert float(exact.get("value", "")) == 1 / 3
    assert exact.text == "0.333"
    assert "".join(cells[1].itertext()) == "–"


def test_a_chart_of_nothing_says_so() -> None:
    assert "Nothing was measured here." in draw(chart(Series(name="m", x=[1, 2], y=[None, None])))


def test_a_logarithmic_axis_refuses_zero() -> None:
    with pytest.raises(ValueError, match="cannot show 0"):
        drawn(Series(name="m", x=[0, 2], y=[1.0, 2.0]))


def test_a_bar_is_to_scale() -> None:
    parts = [Part(name="a", size=3, shown="3 GiB", look=1), Part(name="b", size=1, shown="1 GiB", look=0)]
    page = ET.fromstring(bar("m", "Memory", parts))
    widths = [float(r.get("width", "0")) for r in page.findall(f"{SVG}svg/{SVG}rect")]
    assert widths == [WIDTH * 0.75, WIDTH * 0.25]
    assert "a 3 GiB (75.0%)" in "".join(page.itertext())


@given(st.text())
def test_no_text_becomes_markup(value: str) -> None:
    made = element("p", value, title=value)
    parsed = ET.fromstring(made)
    assert len(parsed) == 0
    assert "<" not in text(value)
    assert set(parsed.attrib) == {"title"}


def test_markup_is_not_escaped_twice() -> None:
    assert join(element("b", "1 < 2"), [None, ["&"]]) == "<b>1 &lt; 2</b>&amp;"


def test_a_flag_has_no_value_and_none_is_left_out() -> None:
    assert element("input", required=True, value=None, checked=False, aria_label="x", class_="k") == (
        '<input required aria-label="x" class="k">'
    )
