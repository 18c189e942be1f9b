"""A calibration and a check of one, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from calibration.calibration_file import Calibration
    from calibration.design import DesignedStage
    from calibration.drift import Drift
    from calibration.factors import Factor

#: what a factor is, in words
MEANINGS = {
    "step_overhead": "every step: kernel launches, and the weights it reads",
    "expert_read_factor": "reading the chosen experts, over their bytes at datasheet bandwidth",
    "per_sequence": "each running sequence, every step",
    "kv_read_factor": "reading the KV cache, over its bytes at datasheet bandwidth",
    "prefill_factor": "a prompt token, over its operations at datasheet peak",
    "attention_factor": "a prompt's attention to itself, over its operations at peak",
    "mixed_step_overhead": "a step with a prompt in it, whatever its length",
    "request_overhead": "a request outside the steps: HTTP, tokenizer, first chunk",
    "request_token": "each prompt token outside the steps",
    "wait_steps": "steps a request waits before its own prompt's",
    "prompt_factor": "a prompt's own time to first token, over what it costs others",
    "ahead_factor": "prompts computed together with it, over their own time",
}


def amount(value: float, unit: str) -> str:
    """Three significant digits; seconds in the unit that suits them."""
    if unit != "s":
        return f"{value:.3g}"
    for scale, name in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if value * scale >= 1.0 or name == "us":
            return f"{value * scale:.3g} {name}"
    raise AssertionError("microseconds take the rest")


def design_table(stages: Sequence[DesignedStage]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("users", "prompt", "output", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("what it tells")
    for stage in stages:
        table.add_row(
            str(stage.users),
            str(stage.prompt_tokens),
            str(stage.output_tokens),
            f"{stage.expected_s:.0f}",
            stage.purpose,
        )
    return table


def factor_table(calibration: Calibration) -> Table:
    """Factors that took part, those the data told first."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("factor", no_wrap=True)
    for name in ("value", "90 % interval", "prior"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what it is")
    findings = calibration.fit.findings
    for name in sorted(findings, key=lambda name: not findings[name].identified):
        factor = calibration.factors[name]
        told = findings[name].identified
        table.add_row(
            name,
            amount(factor.value, factor.unit),
            _interval(factor),
            amount(factor.prior_value, factor.unit),
            Text("measured" if told else "not told", style="green" if told else "yellow"),
            MEANINGS[name],
        )
    return table


def _interval(factor: Factor) -> str:
    return f"{amount(factor.low, factor.unit)} to {amount(factor.high, factor.unit)}"


def sentences(calibration: Calibration) -> list[str]:
    """What to say beside the table."""
    scatter, used, left = calibration.fit.scatter, calibration.used, calibration.left_out
    errors = [abs(stage.tpot_error) for stage in used if stage.tpot_error is not None]
    little = [abs(stage.little_error) for stage in used if stage.little_error is not None]
    said = [f"{len(used)} stages fitted, {len(left)} left out."]
    if errors:
        said[0] += f" TPOT is met within {sum(errors) / len(errors):.1%} on average, {max(errors):.1%} at worst"
        said[0] += f"; a single stage scatters by {scatter.get('tpot', 0.0):.1%} (TTFT {scatter.get('ttft', 0.0):.0%})."
    if little:
        said.append(
            f"Little's law, which no fit saw, meets the measured throughput within {sum(little) / len(little):.1%} on average,"
            f" {max(little):.1%} at worst."
        )
    for metric, name in (("tpot", "TPOT"), ("ttft", "TTFT")):
        missed = [abs(row.predicted / row.measured - 1) for row in calibration.held_out if row.metric == metric]
        if missed:
            said.append(
                f"Fitted without the top level of each shape, {name} there is predicted within {sum(missed) / len(missed):.1%} on"
                f" average, {max(missed):.1%} at worst."
            )
    condition = calibration.fit.condition
    said.append(
        "The design cannot tell its factors apart (singular)."
        if condition is None
        else f"Condition number of the design {condition:.1f}."
    )
    return said


def not_told(calibration: Calibration) -> list[str]:
    """Factors that stayed at their priors, and which stage would tell them."""
    return [f"{name}: {finding.advice}" for name, finding in calibration.fit.findings.items() if finding.advice]


def drift_tables(drift: Drift) -> list[Table]:
    stages = Table(box=None, header_style="bold", pad_edge=False)
    stages.add_column("stage", no_wrap=True)
    for name in ("TPOT", "TTFT"):
        stages.add_column(name, justify="right")
    stages.add_column("")
    for row in drift.stages:
        stages.add_row(
            row.label,
            f"{row.tpot_error:+.1%}",
            "-" if row.ttft_error is None else f"{row.ttft_error:+.1%}",
            "" if row.inside else Text("outside the interval", style="yellow"),
        )
    factors = Table(box=None, header_style="bold", pad_edge=False)
    factors.add_column("factor", no_wrap=True)
    for name in ("moved by", "90 % interval", "p", "p, all tests"):
        factors.add_column(name, justify="right", no_wrap=True)
    for shift in drift.shifts:
        factors.add_row(
            shift.factor,
            f"{shift.ratio - 1:+.1%}",
            f"{shift.low - 1:+.1%} to {shift.high - 1:+.1%}",
            f"{shift.test.p:.2g}",
            f"{shift.test.p_adjusted:.2g}",
        )
    return [stages, factors]
