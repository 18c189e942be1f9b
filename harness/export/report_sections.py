"""The parts of a report that are words and tables: answer, levels, memory, factors, client, what was invalid, how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calibration.factors import FACTORS
from calibration.knee import KNEE_SLOPE
from calibration.memory import plan_memory
from harness.export.charts import NOT_MEASURED, Part, bar, datum, figure
from harness.export.markup import Child, Markup, element, join
from harness.export.memory_bar import gpu_bar

if TYPE_CHECKING:
    from calibration.calibration_file import Calibration
    from calibration.compare import Comparison
    from harness.export.timeline import Timeline
    from harness.store import RunData

Stage = Mapping[str, Any]

_WORDS = (
    ("user", "sends, reads the whole stream, and sends again"),
    ("TTFT", "from the request's last byte handed to the socket to the first content that arrived"),
    ("TPOT", "last content less first content, over the output tokens after the first chunk; a mean over requests"),
    (
        "tokens/s",
        "tokens by their arrival in the window, the part of a stage where the level was held, over its length",
    ),
    ("wall", "users at which the KV pool is full: requests wait for room, or running ones are preempted"),
    (
        "knee",
        f"users beyond which an added user brings under {KNEE_SLOPE:.0%} of the throughput that the first one brought",
    ),
    ("lock step, staggered", "all streams at their end at once; or spread over their outputs, as in steady traffic"),
    ("–", "not measured; never the same as 0"),
)


def section(title: str, *content: Child) -> Markup:
    """A section with its heading."""
    return element("section", element("h2", title), content)


def answer(stages: Sequence[Stage], comparison: Comparison | None, why: str) -> str:
    """The saturation of a run in one sentence."""
    if not stages:
        return "Nothing was measured: the run ended before its first stage did."
    if not any(stage["valid"] for stage in stages):
        return "This run says nothing about the server: every stage of it is invalid."
    if comparison is None:
        return f"This run does not say where the server saturates: {why}."
    expected = ""
    if comparison.prediction is not None:
        low, high = comparison.prediction.interval
        expected = f"; the first limit was predicted between {figure(low)} and {figure(high)} users"
    return f"{_measured(comparison)}{expected}."


def _measured(comparison: Comparison) -> str:
    found, most = comparison.onset, max((level.users for level in comparison.levels), default=0)
    if comparison.binding == "knee" and comparison.users is not None:
        return (
            f"Beyond about {comparison.users:.0f} users an added one brings little throughput;"
            f" no hard limit was reached up to {most}"
        )
    if found is None:
        return "No level says whether requests waited or were preempted, so no limit can be told"
    if found.sign is None or found.first_bad is None:
        return f"{_users(most)} can stream at once, and nothing stopped them: none waited for room or was preempted"
    limit = "the KV pool is full" if found.sign.limit == "wall" else "max_num_seqs is reached"
    shown = f"{_users(found.first_bad)} meant {found.sign.evidence}"
    if found.last_good is None:
        return f"Even the fewest were too many before {limit}: {shown}"
    return f"{_users(found.last_good)} can stream at once before {limit}: {shown}"


def _users(number: int) -> str:
    return f"{number} user" if number == 1 else f"{number} users"


def head(run: RunData, comparison: Comparison | None, why: str) -> Markup:
    """Title: the answer, and what it is about."""
    deployment = run.run["deployment"]
    version = f"vLLM {deployment['vllm_version']}" if deployment.get("vllm_version") else "an OpenAI-compatible server"
    where = without_user(_said(deployment, "base_url"))
    about = f"{deployment['model']} on {version}, {where}, {_said(run.run, 'started')}"
    unfinished = "ended" in run.run and run.run["ended"] is None
    said = "The run did not end in order: it was cut, or it still goes on." if unfinished else None
    if run.run.get("predicted"):
        said = "This is a prediction on the twin's virtual clock: nothing of it was measured."
    return element(
        "header",
        element("p", f"Saturation report: {run.folder.name}", class_="kicker"),
        element("h1", answer(run.stages, comparison, why)),
        element("p", about, class_="soft"),
        element("p", said, class_="warn") if said else None,
    )


def without_user(url: str) -> str:
    """A URL without the user part, which may be a password."""
    return re.sub(r"(://)[^/@\s]+@", r"\1***@", url)


def facts(sentences: Sequence[str]) -> Markup | None:
    """What ``compare`` says, a line each: the first word is the name."""
    if not sentences:
        return None
    pairs = [sentence.split(None, 1) for sentence in sentences]
    return element("dl", [join(element("dt", name), element("dd", said)) for name, said in pairs], class_="facts")


def headed(columns: Sequence[str], rows: Sequence[Markup], label: str, text_columns: Sequence[str] = ()) -> Markup:
    cells = [element("th", name, scope="col", class_="text" if name in text_columns else None) for name in columns]
    table = element("table", element("thead", element("tr", cells)), element("tbody", rows))
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def level_name(stage: Stage) -> str:
    """What a stage asked for: users, or a rate."""
    rate = stage["request_rate"]
    if rate is None:
        return f"{stage['users']}"
    return f"{rate:g}/s" + ("" if stage["users"] is None else f" (at most {stage['users']})")


def levels(stages: Sequence[Stage]) -> Markup:
    """One row a stage."""
    columns = (
        "users",
        "ok",
        "failed",
        "tokens/s",
        "tokens/s a user",
        "TTFT ms",
        "p99",
        "TPOT ms",
        "p99",
        "KV max",
        "waiting",
        "preempted",
        "window",
    )
    return headed(columns, [_level(stage) for stage in stages], "Levels")


def _level(stage: Stage) -> Markup:
    server, requests = stage["server"] or {}, stage["requests"]
    ttft, tpot = stage["ttft_ms"], stage["tpot_ms"]
    numbers = (
        requests["ok"],
        requests["failed"],
        stage["output_tokens_per_s"],
        stage["output_tokens_per_s_per_user"],
        ttft["mean"],
        ttft["p99"],
        tpot["mean"],
        tpot["p99"],
    )
    cells = [element("td", datum(value)) for value in numbers]
    cells.append(element("td", datum(server.get("kv_cache_usage_max"), percent=True)))
    cells += [element("td", datum(server.get(key))) for key in ("waiting_mean", "preemptions")]
    cells.append(element("td", state(stage)))
    name = element("th", level_name(stage), scope="row")
    return element("tr", name, cells, class_=None if stage["valid"] else "invalid")


def state(stage: Stage) -> str:
    """invalid, not steady or steady."""
    if not stage["valid"]:
        return "invalid"
    return "steady" if stage["window"] and stage["window"]["steady"] else "not steady"


def charts(drawn: Sequence[Markup], note: str) -> Markup:
    """Figures side by side, with what is to be said of all of them."""
    said = element("p", note, class_="note") if note else None
    return join(element("div", drawn, class_="charts") if drawn else None, said)


def curves_note(drawn: Sequence[Markup], calibration: Calibration | None, refused: str) -> str:
    if not drawn:
        return "No valid stage held a number of users: there is no curve over users."
    if refused:
        return f"The calibration gives no curve: {refused}."
    if calibration is None:
        return (
            "Predicted curves need a calibration: vllm-harness report RUN --calibration FILE. The shaded span is where the "
            "pool that the server showed is full."
        )
    return f"Bands are 90 % intervals of the prediction, calibrated {calibration.created} by version {calibration.harness_version}."


def timeline_note(line: Timeline) -> str:
    if not line.scrapes:
        return "No reading of /metrics was kept with this run, so nothing is known over time."
    failed = f", {line.errors} failed" if line.errors else ""
    return f"{line.scrapes:,} readings of /metrics{failed}. Grey lines: where a stage's window begins."


def memory(run: RunData, calibration: Calibration | None) -> Markup:
    """The memory of one GPU where the deployment is known, and the pool as the server showed it."""
    return join(None if calibration is None else _gpu_bar(calibration), _pool_bar(run))


def _gpu_bar(calibration: Calibration) -> Markup | None:
    plan = plan_memory(calibration.rebuild_deployment())
    return gpu_bar("memory-gpu", "One {}", plan, "As the calibrated deployment is planned.")


def _pool_bar(run: RunData) -> Markup:
    pool = run.run["deployment"].get("pool")
    usable = pool and pool["usable_tokens"]
    if not usable:
        return element("p", "The server did not show its KV pool.", class_="none")
    peaks = [s["server"].get("kv_cache_usage_max") for s in run.stages if s["server"]]
    peak = max((p for p in peaks if p is not None), default=None)
    blocks = (
        f"{usable:,} tokens: {pool['usable_blocks']} blocks of {pool['block_size']}."
        if pool["usable_blocks"]
        else f"{usable:,} tokens."
    )
    if peak is None:
        return element("p", f"KV pool of one engine: {blocks} How full it was is not known.", class_="none")
    used = min(peak, 1.0) * usable
    parts = [
        Part(name="in use at the fullest moment", size=used, shown=f"{used:,.0f} tokens", look=3),
        Part(name="free", size=usable - used, shown=f"{usable - used:,.0f} tokens", look=0),
    ]
    return bar("memory-pool", "KV pool of one engine", parts, blocks)


def factors(calibration: Calibration | None) -> Markup:
    """Every factor with its 90 % interval, and whether the data told it."""
    if calibration is None:
        return element("p", "No calibration was given: nothing corrects the analytical model here.", class_="none")
    rows = []
    for name in FACTORS:
        factor = calibration.factors[name]
        told = "from the data" if factor.identified else "prior"
        numbers = [element("td", datum(value)) for value in (factor.value, factor.low, factor.high)]
        source = element("td", factor.source, class_="text")
        rows.append(
            element(
                "tr",
                element("th", name, scope="row"),
                numbers,
                element("td", factor.unit or "×"),
                element("td", told),
                source,
            )
        )
    table = headed(
        ("factor", "value", "low", "high", "unit", "told by", "where from"), rows, "Correction factors", ("where from",)
    )
    notes = [element("li", note) for note in calibration.notes]
    return join(table, element("ul", notes) if notes else None)


def client(stages: Sequence[Stage]) -> Markup:
    """Whether the client measured the server or itself."""
    columns = (
        "users",
        "loop lag p99 ms",
        "CPU of a core",
        "schedule delay p99 ms",
        "streams asked",
        "streams in flight",
        "scrape gap max s",
    )
    rows = []
    for stage in stages:
        health, server = stage["client"], stage["server"] or {}
        asked = None if stage["request_rate"] is not None else stage["users"]
        cells = [
            datum(health["loop_lag_ms_p99"]),
            datum(health["cpu"], percent=True),
            datum(health["schedule_delay_ms_p99"]),
            datum(asked),
            datum(health["concurrency_mean"]),
            datum(server.get("scrape_gap_s_max")),
        ]
        name = element("th", level_name(stage), scope="row")
        rows.append(
            element("tr", name, [element("td", cell) for cell in cells], class_=None if stage["valid"] else "invalid")
        )
    return headed(columns, rows, "Client health")


def invalid(stages: Sequence[Stage]) -> Markup:
    """Every reason of every stage: what is invalid, what is only not steady, what failed."""
    rows = []
    for stage in stages:
        said = [*stage["reasons"], *(f"failed: {kind}: {n}" for kind, n in stage["requests"]["by_failure"].items())]
        if not said:
            continue
        reasons = element("ul", [element("li", reason) for reason in said])
        cells = element("td", state(stage)), element("td", reasons, class_="text")
        name = element("th", f"stage {stage['index'] + 1} ({level_name(stage)})", scope="row")
        rows.append(element("tr", name, cells, class_=None if stage["valid"] else "invalid"))
    if not rows:
        return element("p", "Every stage is valid and steady, and no request failed.", class_="good")
    return headed(("stage", "is", "because"), rows, "What was invalid", ("because",))


def _said(table: Mapping[str, Any], key: str) -> str:
    """A value as text; a dash where there is none."""
    value = table.get(key)
    return NOT_MEASURED if value is None else str(value)


def how(run: RunData) -> Markup:
    """Command, versions, lengths, host, and what the server did not show."""
    document = run.run
    deployment, profile = document["deployment"], document["profile"]
    # runs that were imported or predicted have no command, no host, or no versions
    host, versions, workload = document.get("host") or {}, document.get("versions") or {}, profile.get("workload") or {}
    pairs: list[tuple[str, Child]] = [
        ("command", element("code", " ".join(document.get("command") or [NOT_MEASURED]))),
        ("profile", profile.get("name")),
        ("tokens asked", f"{_said(workload, 'prompt_tokens')} prompt, {_said(workload, 'output_tokens')} output"),
        ("began, ended", f"{_said(document, 'started')}, {_said(document, 'ended')}"),
        ("harness, Python", f"{_said(versions, 'vllm-harness')}, {_said(versions, 'python')}"),
        ("client", f"{_said(host, 'system')}, {_said(host, 'cores')} cores"),
        ("served model", str(deployment["model"])),
        *((key, figure(deployment.get(key))) for key in ("max_model_len", "max_num_seqs", "engines")),
    ]
    pairs += [("not shown", f"{item['what']}: {item['why_it_matters']}") for item in deployment.get("missing") or []]
    pairs += [("to mind", note) for note in deployment.get("notes") or []]
    return element("dl", [join(element("dt", k), element("dd", v)) for k, v in pairs], class_="facts")


def words() -> Markup:
    return element("dl", [join(element("dt", k), element("dd", v)) for k, v in _WORDS], class_="facts")
