"""``compare A B``: what changed between two runs or two calibrations, as a table, a document, JUnit XML or Markdown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.errors import GateFailed, LocalFault, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from calibration.gate import Options, Row, Sample
    from calibration.gate_rules import Rule, Ruling
    from harness.store import RunData

_STYLES = {"worse": "bold red", "better": "green", "unclear": "yellow", "missing": "yellow", "same": ""}
#: of a metric over several loads, the first that any load has
_WORST_FIRST = ("worse", "unclear", "missing", "better", "same")


class Asked(NamedTuple):
    """Options of the comparison."""

    fail_if: tuple[str, ...]
    run_noise: float
    junit: Path | None
    markdown: Path | None
    json: bool


class Compared(NamedTuple):
    """Two runs held against each other. ``unmatched``: loads of the first that the second has not, in words."""

    rows: tuple[Row, ...]
    rulings: tuple[Ruling, ...]
    left_out: tuple[str, ...]
    unmatched: tuple[str, ...]
    differences: tuple[str, ...]

    def reasons(self) -> list[str]:
        """Why the gate fails; empty where it passes or nothing was asked."""
        if not self.rulings:
            return []
        broken = [
            f"{ruling.rule.text}: {row.metric} {_percent(row)} at {row.load}"
            for ruling in self.rulings
            for row in ruling.broken_by
        ]
        return broken + [f"{name} was not measured in the second run" for name in self.unmatched]


def compare_two(a: Path, b: Path, asked: Asked) -> None:
    """Compare, print, write what was asked for.

    Raises:
        UsageError: no runs or calibrations, or one of each; InputError: a rule that is none, or no load in both.
        GateFailed: a rule is broken.
    """
    from calibration.gate_rules import parse_rule

    rules = [parse_rule(text) for text in asked.fail_if]
    kinds = [_is_calibration(path) for path in (a, b)]
    if any(kinds):
        from harness.cli.compare_factors import compare_factors

        if not all(kinds):
            raise UsageError(
                f"{a} and {b}: one is a run, one a calibration", "`compare RUN --calibration FILE` holds them"
            )
        if rules or asked.junit or asked.markdown or asked.run_noise:
            raise UsageError(
                "--fail-if, --run-noise, --junit and --markdown are for two runs, not for two calibrations"
            )
        compare_factors(a, b, json=asked.json)
        return
    if not 0 <= asked.run_noise < 1:
        raise UsageError(f"--run-noise: expected a share from 0 to below 1, as 0.02, not {asked.run_noise:g}")
    found = compared(a, b, rules, asked.run_noise)
    _write(asked.junit, lambda: junit(found, a, b))
    _write(asked.markdown, lambda: markdown(found, a, b).encode())
    if asked.json:
        _print_json(found, a, b, asked)
    else:
        _show(found, a, b)
    if reasons := found.reasons():
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise GateFailed(reasons[0] + more, "the table shows every metric at every load")


def _is_calibration(path: Path) -> bool:
    """A file, or a folder that holds a calibration and no run."""
    from harness.calibration_file import NAME
    from harness.store import RUN

    return path.is_file() or (path.is_dir() and (path / NAME).is_file() and not (path / RUN).is_file())


def compared(a: Path, b: Path, rules: Sequence[Rule] = (), run_noise: float = 0.0) -> Compared:
    """Two runs' folders against each other.

    Raises:
        UsageError: a folder holds no run.
        InputError: no load is in both, or a rule can say nothing.
    """
    from calibration.gate import Options, compare_samples
    from calibration.gate_rules import rulings
    from harness.store import read_run

    runs = read_run(a), read_run(b)
    left_out: list[str] = []
    here, there = (_samples(run, name, left_out) for run, name in zip(runs, ("A", "B"), strict=True))
    options = Options(run_log_sd=run_noise)
    return Compared(
        rows=tuple(_all_rows(here, there, options, left_out, compare_samples)),
        rulings=tuple(rulings(rules, here, there, options)),
        left_out=tuple(left_out),
        unmatched=tuple(dict.fromkeys(str(s.load) for s in here if not any(s.same_load(other) for other in there))),
        differences=tuple(_differences(*runs)),
    )


def _all_rows(
    here: Sequence[Sample], there: Sequence[Sample], options: Options, left_out: Sequence[str], compare: Any
) -> list[Row]:
    from calibration.errors import InputError

    try:
        rows: list[Row] = compare(here, there, options)
    except InputError as error:
        raise InputError(error.message, "; ".join(left_out) or error.hint) from error
    return rows


def _samples(run: RunData, name: str, left_out: list[str]) -> list[Sample]:
    """The stages of a run that can be compared; what cannot be goes to ``left_out``."""
    from harness.measure.blocks import sample_of

    requests = run.requests()
    found = []
    for stage in run.stages:
        index = stage["index"]
        sample = sample_of(stage, requests.pop(index)) if index in requests else "it has no records"
        if isinstance(sample, str):
            left_out.append(f"{name}, stage {index}: {sample}")
        else:
            found.append(sample)
    return found


#: what makes another server of one, by the keys of run.json's ``deployment``
_COMPARED = ("model", "vllm_version", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "engines")
_POOL = ("num_blocks", "block_size", "kv_cache_dtype", "prefix_caching")


def _differences(a: RunData, b: RunData) -> list[str]:
    """What differs between the servers, and whether a run is a prediction."""
    one, two = (
        {key: deployment.get(key) for key in _COMPARED}
        | {key: (deployment.get("pool") or {}).get(key) for key in _POOL}
        for deployment in (a.run["deployment"], b.run["deployment"])
    )
    found = [f"{key}: {one[key]} in A, {two[key]} in B" for key in one if one[key] != two[key]]
    predicted = [name for name, run in (("A", a), ("B", b)) if run.run.get("predicted")]
    return found + [f"{name} is a prediction, not a measurement" for name in predicted]


def verdicts(rows: Sequence[Row]) -> dict[str, str]:
    """One verdict a metric, over all loads."""
    by_metric: dict[str, set[str]] = {}
    for row in rows:
        by_metric.setdefault(row.metric, set()).add(row.verdict)
    return {metric: next(v for v in _WORST_FIRST if v in found) for metric, found in by_metric.items()}


# --- as a document ---------------------------------------------------------------------------------------------------


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) != float("inf") else None


def row_json(row: Row) -> dict[str, Any]:
    """One metric at one load; an end that the sample does not hold is null."""
    return {
        **row.load._asdict(),
        "metric": row.metric,
        "a": row.a,
        "b": row.b,
        "change": row.change,
        "low": _finite(row.low),
        "high": _finite(row.high),
        "verdict": row.verdict,
        "n_a": row.n[0],
        "n_b": row.n[1],
    }


def _print_json(found: Compared, a: Path, b: Path, asked: Asked) -> None:
    import orjson

    from calibration.gate import ALPHA
    from harness.cli.display import print_document

    content = {
        "a": str(a),
        "b": str(b),
        "false_alarm_rate": ALPHA,
        "run_noise": asked.run_noise,
        "verdicts": verdicts(found.rows),
        "rows": [row_json(row) for row in found.rows],
        "rules": [
            {
                "rule": ruling.rule.text,
                "broken": ruling.broken,
                "rows": [row_json(row) for row in ruling.broken_by],
                "untold": [str(row.load) for row in ruling.untold],
            }
            for ruling in found.rulings
        ],
        "failed": found.reasons(),
        "left_out": list(found.left_out),
        "unmatched": list(found.unmatched),
        "differences": list(found.differences),
    }
    print_document(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


# --- for people ------------------------------------------------------------------------------------------------------


def _percent(row: Row) -> str:
    if row.change is None:
        return "-"
    return f"{100 * row.change:+.2f} points" if row.metric == "failure_rate" else f"{row.change:+.1%}"


def _interval(row: Row) -> str:
    if row.low is None or row.high is None:
        return ""
    low, high = ("?" if abs(end) == float("inf") or end == -1.0 else f"{100 * end:+.1f}" for end in (row.low, row.high))
    return f"{low} to {high} %"


def _value(value: float | None, metric: str) -> str:
    from harness.cli.predict_view import significant

    if value is None:
        return "-"
    return f"{value:.2%}" if metric == "failure_rate" else significant(value)


def _show(found: Compared, a: Path, b: Path) -> None:
    from rich.table import Table

    from harness.cli.display import Display

    out = Display(width=None if sys.stdout.isatty() else 120, highlight=False)
    out.print(f"A  {a}\nB  {b}", markup=False, soft_wrap=True)
    for load in dict.fromkeys(row.load for row in found.rows):
        table = Table(title=str(load), title_justify="left", box=None, header_style="bold", pad_edge=False)
        table.add_column("metric", no_wrap=True)
        for name in ("A", "B", "change", "interval", "n"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for row in found.rows:
            if row.load == load:
                cells = (_value(row.a, row.metric), _value(row.b, row.metric), _percent(row), _interval(row))
                table.add_row(row.metric, *cells, f"{row.n[0]} / {row.n[1]}", row.verdict, style=_STYLES[row.verdict])
        out.print("", table, sep="\n")
    out.print()
    for line in remarks(found):
        out.print(line, markup=False, soft_wrap=True)


def remarks(found: Compared) -> list[str]:
    """Differences, what was left out, and how each rule fared, a line each."""
    lines = [f"note: {text}" for text in found.differences]
    lines += [f"left out: {text}" for text in found.left_out]
    lines += [f"not compared: {text} is not in B" for text in found.unmatched]
    for ruling in found.rulings:
        lines.append(f"{'FAILED' if ruling.broken else 'passed'}  {ruling.rule.text}")
        lines += [f"        {row.metric} {_percent(row)} ({_interval(row)}) at {row.load}" for row in ruling.broken_by]
        lines += [f"        too few requests to tell {row.metric} at {row.load}" for row in ruling.untold]
    return lines


# --- for CI ----------------------------------------------------------------------------------------------------------


def junit(found: Compared, a: Path, b: Path) -> bytes:
    """JUnit XML: a case for each rule and load where there are rules, else for each metric and load.

    What breaks a rule (without rules: what is worse) failed; what could not be told is skipped.
    """
    from xml.etree import ElementTree as Xml

    cases = list(_cases(found))
    counts = {kind: sum(case[2] == kind for case in cases) for kind in ("failure", "skipped")}
    suite = Xml.Element(
        "testsuite",
        name=f"vllm-harness compare {a} {b}",
        tests=str(len(cases)),
        failures=str(counts["failure"]),
        skipped=str(counts["skipped"]),
        errors="0",
    )
    for where, name, kind, message in cases:
        case = Xml.SubElement(suite, "testcase", classname=where, name=name)
        if kind:
            Xml.SubElement(case, kind, message=message)
    return bytes(Xml.tostring(suite, encoding="utf-8", xml_declaration=True))


def _cases(found: Compared) -> list[tuple[str, str, str, str]]:
    """(load, name, failure | skipped | "", message)."""

    def message(row: Row) -> str:
        return f"{row.metric} {_percent(row)}, {_interval(row)}"

    cases = []
    if not found.rulings:
        kinds = {"worse": "failure", "unclear": "skipped", "missing": "skipped"}
        return [(str(r.load), r.metric, kinds.get(r.verdict, ""), message(r)) for r in found.rows]
    for ruling in found.rulings:
        for load in dict.fromkeys(row.load for row in found.rows):
            broken = [row for row in ruling.broken_by if row.load == load]
            untold = [row for row in ruling.untold if row.load == load]
            kind = "failure" if broken else "skipped" if untold else ""
            cases.append((str(load), ruling.rule.text, kind, "; ".join(map(message, broken or untold))))
    cases += [(name, "measured in both runs", "failure", "not in the second run") for name in found.unmatched]
    return cases


def markdown(found: Compared, a: Path, b: Path) -> str:
    """The verdicts as a Markdown table, what failed first."""
    lines = [f"### {a} -> {b}", ""]
    failed = found.reasons()
    if found.rulings:
        lines += [f"**{'failed' if failed else 'passed'}**", *(f"- {reason}" for reason in failed), ""]
    lines += ["| load | metric | A | B | change | interval | verdict |", "|---|---|---:|---:|---:|---:|---|"]
    order: Mapping[str, int] = {verdict: place for place, verdict in enumerate(_WORST_FIRST)}
    for row in sorted(found.rows, key=lambda row: order[row.verdict]):
        cells = (
            str(row.load), row.metric, _value(row.a, row.metric), _value(row.b, row.metric), _percent(row),
            _interval(row), row.verdict,
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    notes = [line.strip() for line in remarks(found) if not line.startswith(("FAILED", "passed", " "))]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def _write(path: Path | None, content: Any) -> None:
    if path is None:
        return
    try:
        path.write_bytes(content())
    except OSError as error:
        raise LocalFault(f"{path} could not be written: {error.strerror or error}") from error
