"""The prices of a step (:class:`calibration.priors.Prices`) out of a table of measurements, and the model's error where a
deployment's own rows were left out of them.

Method: TPOT of rows below the wall, at the number of sequences that the row's own TTFT and TPOT imply (Little's law). The
terms are those of :mod:`calibration.physics` at :mod:`calibration.priors`; least squares on the logarithm, robust (soft
L1), each deployment weighted by the square root of its rows, every price with a log-normal prior of its own, stated below.
What stands in front of the first token is estimated from TTFT at those steps.

``tests/bench/derive_step_priors.py`` prints what the catalog holds; ``accuracy --left-out`` scores with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from calibration.accuracy import Report, predict_point, score, walls
from calibration.factors import FactorSet
from calibration.fit import TTFT_FACTORS
from calibration.measurements import Measurement, Unusable
from calibration.physics import expected_share
from calibration.priors import Prices, generation, generation_of, physics_of, prior_factors, waits_for_scheduler
from calibration.queueing import first_token_amounts, launched_s, mean_step
from calibration.regression import solve
from calibration.serving import Serving, serving

Floats = npt.NDArray[np.float64]

#: price -> (prior, log sd); those of PER_GENERATION are estimated for Hopper and Blackwell separately
PRIORS: dict[str, tuple[float, float]] = {
    "layer_overhead_s": (65e-6, 0.3),
    "moe_layer_overhead_s": (25e-6, 0.6),
    "mla_layer_overhead_s": (15e-6, 0.7),
    "fp8_expert_layer_overhead_s": (35e-6, 0.5),
    "old_moe_kernels": (0.03, 0.7),
    "old_fp8_kernels": (0.2, 0.5),
    "weight_read": (1.1, 0.15),
    "weight_read_nvfp4": (1.1, 0.15),
    "expert_read": (0.9, 0.2),
    "unpacked_byte_s": (0.28e-12, 0.3),
    "expert_overhead_s": (0.1e-6, 0.7),
    "kv_read": (1.5, 0.4),
    "kv_read_fp8": (2.0, 0.3),
    "sequence_overhead_s": (10e-6, 0.6),
    "sequence_reduce": (4.0, 0.5),
    "sequence_compute": (0.5, 0.8),
    "gemm": (1.6, 0.3),
    "expert_gemm": (2.5, 0.5),
    "prompt_reduce": (2.0, 0.4),
    "activation_passes": (6.0, 0.5),
    "attention": (2.0, 0.3),
    "mixed_layer_overhead_s": (20e-6, 1.0),
    "sync_step_s": (0.5e-3, 0.7),
    "sync_sequence_s": (10e-6, 0.7),
}
PER_GENERATION = (
    "layer_overhead_s",
    "moe_layer_overhead_s",
    "fp8_expert_layer_overhead_s",
    "weight_read",
    "kv_read",
    "sequence_reduce",
    "gemm",
    "expert_gemm",
    "prompt_reduce",
    "mixed_layer_overhead_s",
)
#: A100: the price of a layer over Hopper's, the rest alike
AMPERE_LAYER = (1.25, 0.3)
NAMES: tuple[str, ...] = (
    *(name for name in PRIORS if name not in PER_GENERATION),
    *(f"{name}@{kind}" for name in PER_GENERATION for kind in ("hopper", "blackwell")),
    "layer@ampere",
)
SCATTER = 0.06


def usable(row: Measurement) -> bool:
    """A TPOT, and no long wait in front of the first token."""
    if row.tpot_s is None:
        return False
    wait = row.ttft_s or 0.0
    return wait < 5.0 and wait < 0.5 * row.tpot_s * row.shape.output_tokens


def running(row: Measurement) -> float:
    """Sequences of one replica that ran, by Little's law."""
    assert row.tpot_s is not None
    decoding = row.tpot_s * row.shape.output_tokens
    if row.users is None:
        assert row.requests_per_s is not None
        return row.requests_per_s * decoding
    return row.users * decoding / (decoding + (row.ttft_s or 0.0))


def amounts(row: Measurement) -> dict[str, float]:
    """What each price multiplies in this row's mean step."""
    p, d, shape, batch = physics_of(row.deployment), row.deployment, row.shape, running(row)
    bandwidth, tokens = p.bandwidth_bytes_per_s, shape.computed_tokens
    budget = max(1.0, d.max_num_batched_tokens - batch)
    chunks = max(1, int(np.ceil(tokens / budget)))
    prompts = batch / shape.output_tokens
    mixed = -np.expm1(-prompts * chunks)
    hit = p.expert_bytes_hit(batch) * (1 - mixed) + p.expert_bytes_hit(batch + tokens / chunks) * mixed

    def number_hit(at: float) -> float:
        return sum(g.layers * g.total * expected_share(g.total, g.per_token, at) for g in p.experts)

    fp8_cache = d.kv.bytes_per_element <= 1
    cached = shape.prompt_tokens - tokens
    kv = p.kv_bytes(batch, batch * shape.mean_context) / bandwidth
    return {
        "layers": p.layers,
        "moe": p.moe_layers,
        "mla": p.mla_layers,
        "fp8": p.fp8_expert_layers,
        "age": max(0, 18 - d.version[1]),
        "weights": p.weight_bytes / bandwidth,
        "nvfp4": float(d.weights.name == "nvfp4" and not p.experts),
        "unpacked": float(p.unpacks_experts),
        "bandwidth": bandwidth,
        "sync": float(waits_for_scheduler(d)),
        "experts": hit / bandwidth,
        "expert_count": number_hit(batch) * (1 - mixed) + number_hit(batch + tokens / chunks) * mixed,
        "kv": kv,
        "kv_fp8": float(fp8_cache),
        "batch": batch,
        "batch_reduce": batch * p.reduced_bytes_per_token / p.link_bytes_per_s,
        "batch_compute": batch * (p.compute_s_per_token + p.expert_compute_s_per_token),
        "gemm": prompts * tokens * p.compute_s_per_token,
        "expert_gemm": prompts * tokens * p.expert_compute_s_per_token,
        "reduce": prompts * tokens * p.reduced_bytes_per_token / p.link_bytes_per_s,
        "passes": prompts * tokens * p.activation_bytes_per_token / bandwidth,
        "attention": prompts * p.attention_flops(tokens, cached + tokens / 2) / p.attention_flops_per_s,
        "mixed_layers": mixed * p.layers,
    }


@dataclass(frozen=True)
class Table:
    """Amounts of many rows as columns."""

    columns: dict[str, Floats]
    tpot_s: Floats
    deployment: npt.NDArray[np.object_]
    generation: npt.NDArray[np.object_]

    def where(self, rows: npt.NDArray[np.bool_]) -> Table:
        return Table(
            {k: v[rows] for k, v in self.columns.items()},
            self.tpot_s[rows],
            self.deployment[rows],
            self.generation[rows],
        )


def _key(row: Measurement) -> str:
    return "|".join(map(str, row.deployment_key))


def table(rows: Sequence[Measurement]) -> Table:
    """The columns of these rows."""
    each = [amounts(row) for row in rows]
    keys = np.empty(len(rows), dtype=object)
    keys[:] = [_key(row) for row in rows]
    kinds = np.empty(len(rows), dtype=object)
    kinds[:] = [generation_of(row.deployment).name for row in rows]
    columns = {name: np.array([a[name] for a in each], dtype=np.float64) for name in each[0]}
    return Table(columns, np.array([row.tpot_s for row in rows], dtype=np.float64), keys, kinds)


def tpot_s(prices: dict[str, float], t: Table) -> Floats:
    """The model's TPOT at measured B: ``calibration.priors`` and ``queueing``, for columns."""
    blackwell = t.generation == "blackwell"

    def g(name: str) -> Floats:
        return np.where(blackwell, prices[f"{name}@blackwell"], prices[f"{name}@hopper"])

    c = t.columns
    layer = g("layer_overhead_s") * np.where(t.generation == "ampere", prices["layer@ampere"], 1.0)
    routed = g("moe_layer_overhead_s") * c["moe"] + prices["mla_layer_overhead_s"] * c["mla"]
    launches = (
        layer * c["layers"]
        + routed * (1 + prices["old_moe_kernels"]) ** c["age"]
        + g("fp8_expert_layer_overhead_s") * c["fp8"] * (1 + prices["old_fp8_kernels"]) ** c["age"]
    )
    weights = g("weight_read") * np.where(c["nvfp4"] > 0, prices["weight_read_nvfp4"], 1.0) * c["weights"]
    unpacked = np.where(c["unpacked"] > 0, prices["unpacked_byte_s"] * c["bandwidth"], 0.0)
    kernel = np.maximum(prices["expert_read"], unpacked)
    experts = kernel * c["experts"] + prices["expert_overhead_s"] * c["expert_count"]
    slow = (c["kv_fp8"] > 0) & ~blackwell
    kv = g("kv_read") * np.where(slow, prices["kv_read_fp8"], 1.0) * c["kv"]
    sequences = (
        prices["sequence_overhead_s"] * c["batch"]
        + g("sequence_reduce") * c["batch_reduce"]
        + prices["sequence_compute"] * c["batch_compute"]
    )
    prompts = (
        g("gemm") * c["gemm"]
        + g("expert_gemm") * c["expert_gemm"]
        + g("prompt_reduce") * c["reduce"]
        + prices["activation_passes"] * c["passes"]
        + prices["attention"] * c["attention"]
        + g("mixed_layer_overhead_s") * c["mixed_layers"]
    )
    scheduler = c["sync"] * (prices["sync_step_s"] + prices["sync_sequence_s"] * c["batch"])
    total: Floats = scheduler + launches + weights + experts + kv + sequences + prompts
    return total


def prior_of(name: str) -> tuple[float, float]:
    return AMPERE_LAYER if name == "layer@ampere" else PRIORS[name.split("@")[0]]


def fit(t: Table, start: Floats | None = None) -> dict[str, float]:
    """Prices of these rows; their priors where there is no row."""
    if not len(t.tpot_s):
        return {name: prior_of(name)[0] for name in NAMES}
    centre = np.log([prior_of(name)[0] for name in NAMES])
    spread = np.array([prior_of(name)[1] for name in NAMES])
    _, inverse, counts = np.unique(t.deployment.astype(str), return_inverse=True, return_counts=True)
    weight = 0.5 * (counts[inverse] / counts[inverse].mean()) ** -0.25
    target = np.log(t.tpot_s)

    def residuals(x: Floats) -> Floats:
        model = tpot_s(dict(zip(NAMES, np.exp(x), strict=True)), t)
        return np.concatenate([weight * (np.log(model) - target) / SCATTER, (x - centre) / spread])

    found = least_squares(
        residuals, centre if start is None else start, loss="soft_l1", f_scale=1.5, xtol=1e-5, ftol=1e-5
    )
    return dict(zip(NAMES, map(float, np.exp(found.x)), strict=True))


def left_out(t: Table, groups: Iterable[Any]) -> Floats:
    """TPOT of each row with the prices of all other groups (deployments, models or GPUs)."""
    labels = np.array([str(group) for group in groups])
    everything = fit(t)
    start = np.log([everything[name] for name in NAMES])
    predicted = np.full(len(labels), np.nan)
    for label in sorted(set(labels)):
        out = labels == label
        predicted[out] = tpot_s(fit(t.where(~out), start), t.where(out))
    return predicted


@dataclass(frozen=True)
class FirstTokens:
    """TTFT of rows below the wall as columns: what each price in front of the first token multiplies, the part that no
    price changes, the measured time, the deployment, the generation and the row."""

    amounts: Floats
    fixed_s: Floats
    ttft_s: Floats
    deployment: npt.NDArray[np.object_]
    generation: npt.NDArray[np.object_]

    def where(self, rows: npt.NDArray[np.bool_]) -> FirstTokens:
        return FirstTokens(
            self.amounts[rows], self.fixed_s[rows], self.ttft_s[rows], self.deployment[rows], self.generation[rows]
        )


def first_tokens(rows: Sequence[Measurement]) -> FirstTokens:
    """The columns of these rows, at the catalog's own step prices."""
    beyond, _ = walls(rows)
    each = [_first_token(row) for row in rows if row.ttft_s is not None and row.row not in beyond]
    kinds = np.empty(len(each), dtype=object)
    kinds[:] = [kind for *_, kind in each]
    keys = np.empty(len(each), dtype=object)
    keys[:] = [key for *_, key, _ in each]
    columns = [np.array([item[i] for item in each], dtype=np.float64) for i in range(3)]
    return FirstTokens(columns[0], columns[1], columns[2], keys, kinds)


def _first_token(row: Measurement) -> tuple[list[float], float, float, str, str]:
    served = serving(row.deployment)
    factors = prior_factors(row.deployment, served.physics)
    point = predict_point(row, served, factors)
    server = served._replace(pool=None).server(factors, row.shape)
    users = (row.users or point.users) / server.replicas
    running = point.running / server.replicas
    others = max(0.0, running * (users - 1) / users) if row.users else running
    step = mean_step(server, row.shape, others, users if row.users else None)
    amounts = list(first_token_amounts(row.shape, users, step))
    assert row.ttft_s is not None
    fixed = launched_s(server, step, follows=row.users is not None)
    return amounts, fixed, row.ttft_s, _key(row), generation_of(row.deployment).name


def ttft_prices(t: FirstTokens) -> dict[str, float]:
    """Prices in front of the first token of these rows, by the factor's name; their priors where there is no row."""
    prior, spread = np.array([1e-3, 7e-6, 1.0, 1.0, 1.0]), np.array([1.0, 0.5, 0.4, 0.4, 0.5])
    if not len(t.ttft_s):
        return dict(zip(TTFT_FACTORS, map(float, prior), strict=True))
    _, inverse, counts = np.unique(t.deployment.astype(str), return_inverse=True, return_counts=True)
    own = 0.12 * (counts[inverse] / counts[inverse].mean()) ** 0.25
    found = np.exp(solve(t.amounts, t.fixed_s, t.ttft_s, own, prior, spread, 0.12).log_factors)
    return dict(zip(TTFT_FACTORS, map(float, found), strict=True))


#: factor in front of the first token -> the price it is
_TTFT_PRICES = {
    "request_overhead": "request_overhead_s",
    "request_token": "request_token_s",
    "wait_steps": "wait_steps",
    "prompt_factor": "prompt_factor",
    "ahead_factor": "ahead_factor",
}
#: what may be left out together: a deployment, or a model with all its deployments
UNITS: dict[str, Callable[[Measurement], Hashable]] = {
    "deployment": lambda row: row.deployment_key,
    "model": lambda row: row.model,
}


def score_left_out(
    rows: Sequence[Measurement],
    skipped: Sequence[Unusable] = (),
    unit: str = "deployment",
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Report:
    """Every row predicted with prices from the rows of all other deployments (or models): nothing of it was seen.

    A generation whose prices do not come out of the table (A100's spread, what was never measured) keeps the catalog's.
    """
    label = UNITS[unit]
    told = [row for row in rows if usable(row)]
    steps, firsts = table(told), first_tokens(rows)
    labels = np.array([str(label(row)) for row in told])
    of_first = _labels(rows, firsts, label)
    everything = fit(steps)
    start = np.log([everything[name] for name in NAMES])
    groups = sorted({str(label(row)) for row in rows})
    found: dict[str, tuple[dict[str, float], FirstTokens]] = {}
    for number, group in enumerate(groups):
        others = labels != group
        own = everything if others.all() else fit(steps.where(others), start)
        found[group] = own, firsts.where(of_first != group)
        progress(number + 1, len(groups))

    @cache
    def prices(group: str, kind: str) -> Prices:
        return prices_of(kind, generation(kind).prices, *found[group])

    def factors_of(row: Measurement, served: Serving) -> FactorSet:
        kind = generation_of(row.deployment).name
        return prior_factors(row.deployment, served.physics, prices(str(label(row)), kind))

    return score(rows, skipped, factors_of)


def _labels(
    rows: Sequence[Measurement], firsts: FirstTokens, label: Callable[[Measurement], Hashable]
) -> npt.NDArray[np.str_]:
    by_key = {_key(row): str(label(row)) for row in rows}
    return np.array([by_key[str(key)] for key in firsts.deployment])


def prices_of(kind: str, stated: Prices, found: dict[str, float], first: FirstTokens) -> Prices:
    """Prices of a generation: those found, over the catalog's where the table says nothing of them."""
    if kind not in ("hopper", "blackwell", "ampere"):
        return stated
    suffix = "@blackwell" if kind == "blackwell" else "@hopper"
    own = {name: found[name + suffix if name in PER_GENERATION else name] for name in PRIORS}
    if kind == "ampere":
        own["layer_overhead_s"] *= found["layer@ampere"]
    if kind == "blackwell":
        # an FP8 cache is read at its own speed there: catalog, common
        own["kv_read_fp8"] = stated.kv_read_fp8
    own_kind = first.generation == kind
    told = ttft_prices(first.where(own_kind) if kind != "ampere" and own_kind.any() else first)
    return stated._replace(**own, **{price: told[name] for name, price in _TTFT_PRICES.items()})
