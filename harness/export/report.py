"""``report.html``: a run in one file that opens offline, with no script and nothing fetched.

Everything on it is read from ``run.json``, ``summary.json``, ``scrapes.jsonl`` and, where there is one, a calibration;
requests are never read again, so a run of a million of them is reported as quickly as one of a hundred. All text from
outside is escaped, and a content-security policy in the file itself forbids everything but its own style.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.errors import InputError
from harness.errors import LocalFault
from harness.export import report_sections as sections
from harness.export.charts import draw
from harness.export.markup import Markup, element, join
from harness.export.report_curves import curves, groups, of_calibration, over_time
from harness.export.report_repeats import repeats
from harness.export.timeline import timeline

if TYPE_CHECKING:
    from calibration.calibration_file import Calibration
    from calibration.compare import Comparison
    from harness.export.charts import Series
    from harness.export.report_curves import Group
    from harness.store import RunData

NAME = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A sweep held against its prediction, and the sentences that ``compare`` prints of it.

    ``comparison`` is None where nothing could be compared; ``why`` says why.
    """

    comparison: Comparison | None = None
    sentences: Sequence[str] = ()
    why: str = ""


def look() -> str:
    """The style sheet of the report and the page."""
    return files("harness.export").joinpath("look.css").read_text(encoding="utf-8")


def report_html(run: RunData, compared: Compared, calibration: Calibration | None = None) -> str:
    """The report of a run as one HTML document.

    Raises:
        UsageError: ``scrapes.jsonl`` does not read.
    """
    style = look()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    model = str(run.run["deployment"]["model"])
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content="vllm-harness"),
        element("title", f"Saturation of {model}: {run.folder.name}"),
        element("link", rel="icon", href="data:,"),
        element("style", Markup(style)),
    )
    skip = element("a", "Skip to the report", href="#report", class_="skip")
    body = element("body", skip, element("main", report_body(run, compared, calibration), id="report"))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def report_body(run: RunData, compared: Compared, calibration: Calibration | None = None) -> Markup:
    """What stands inside the report, for the page to show as well."""
    comparison = compared.comparison
    wall = comparison.prediction.interval if comparison is not None and comparison.prediction is not None else None
    found = groups(run.stages)
    predictions, refused = _predictions(found, calibration)
    line = timeline(run.scrapes())
    drawn = [draw(chart) for chart in curves(found, predictions, wall if len(found) == 1 else None)]
    watched = [draw(chart) for chart in over_time(line, run.stages)]
    return join(
        sections.head(run, comparison, compared.why),
        sections.facts(compared.sentences),
        sections.section("Levels", sections.levels(run.stages), repeats(run)),
        sections.section(
            "Measured and predicted", sections.charts(drawn, sections.curves_note(drawn, calibration, refused))
        ),
        sections.section("The server over time", sections.charts(watched, sections.timeline_note(line))),
        sections.section("Memory", sections.memory(run, calibration)),
        sections.section("Correction factors", sections.factors(calibration)),
        sections.section("Client health", sections.client(run.stages)),
        sections.section("What was invalid, and why", sections.invalid(run.stages)),
        sections.section("How it was run", sections.how(run)),
        sections.section("The words", sections.words()),
    )


def _predictions(found: Sequence[Group], calibration: Calibration | None) -> tuple[list[dict[str, Series]], str]:
    """Predicted curves of each group by metric; or none, and why."""
    if calibration is None or not found:
        return [], ""
    try:
        return of_calibration(calibration, found), ""
    except InputError as error:
        return [], error.message


def write_report(path: Path, html: str) -> None:
    """Write the file, whole or not at all.

    Raises:
        LocalFault: it could not be written.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(html, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise LocalFault(f"{path} could not be written: {error.strerror or error}") from error
