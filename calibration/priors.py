"""What a step is expected to cost before anybody measured it: prices per GPU generation, and the factors they make.

Prices (``catalog/step_priors.yaml``, each with its evidence) are seconds a layer, multiples of a datasheet time, and so
on; times the amounts of :mod:`calibration.physics` they give the prior of each factor of one deployment. Nothing is
fitted to a row: ``tests/bench/derive_step_priors.py`` estimates the prices from public measurements, and quotes the error
on deployments it did not see.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from calibration.catalog import table
from calibration.deployment import Deployment
from calibration.errors import InputError
from calibration.factors import FactorSet, prior
from calibration.gpu import Gpu
from calibration.physics import Physics, measure

_FILE = "step_priors.yaml"
#: kernels for mixtures of experts are as today's from this minor version of vLLM on; older ones cost more a version
_SETTLED_MINOR = 18

#: compute capability -> generation whose prices apply
_GENERATIONS = {
    "8.0": "ampere",
    "8.6": "ampere",
    "8.9": "ada",
    "9.0": "hopper",
    "10.0": "blackwell",
    "10.3": "blackwell",
}


class Prices(NamedTuple):
    """Prices of one GPU generation. Plain numbers multiply a time at datasheet peak; ``_s`` are seconds.

    ``old_moe_kernels`` and ``old_fp8_kernels`` are growth rates for each minor version before 0.18.
    """

    layer_overhead_s: float
    moe_layer_overhead_s: float
    mla_layer_overhead_s: float
    fp8_expert_layer_overhead_s: float
    old_moe_kernels: float
    old_fp8_kernels: float
    weight_read: float
    weight_read_nvfp4: float
    expert_read: float
    unpacked_byte_s: float
    expert_overhead_s: float
    kv_read: float
    kv_read_fp8: float
    sequence_overhead_s: float
    sequence_reduce: float
    sequence_compute: float
    gemm: float
    expert_gemm: float
    prompt_reduce: float
    activation_passes: float
    attention: float
    mixed_layer_overhead_s: float
    sync_step_s: float
    sync_sequence_s: float
    request_overhead_s: float
    request_token_s: float
    wait_steps: float
    prompt_factor: float
    ahead_factor: float


class Generation(NamedTuple):
    """Prices with their spread (standard deviation of the logarithm, by factor), scatter and evidence."""

    name: str
    prices: Prices
    log_sd: Mapping[str, float]
    residual_log_sd: Mapping[str, float]
    evidence: str
    #: a device of this kind for deployments that name no GPU (CPU)
    device: Gpu | None


@cache
def generation(name: str) -> Generation:
    """The prices of a generation: what it states, over what ``common`` states.

    Raises:
        InputError: an unknown name.
    """
    content = table(_FILE)
    if name not in content["generations"]:
        raise InputError(f"generation = {name!r}, expected one of {', '.join(content['generations'])}")
    own = content["generations"][name]
    merged = {**content["common"]["prices"], **own["prices"]}
    prices = Prices(**{name: float(merged[name]) for name in Prices._fields})
    device = own.get("device")
    return Generation(
        name=name,
        prices=prices,
        log_sd={**content["common"]["log_sd"], **own.get("log_sd", {})},
        residual_log_sd={**content["common"]["residual_log_sd"], **own.get("residual_log_sd", {})},
        evidence=str(own["evidence"]),
        device=None if device is None else _device(device),
    )


def _device(table: Mapping[str, Any]) -> Gpu:
    return Gpu(
        name=str(table["name"]),
        title=str(table["name"]),
        memory_bytes=0,
        usable_bytes=0,
        usable_is_measured=False,
        bandwidth_bytes_per_s=float(table["bandwidth_bytes_s"]),
        flops_per_s={kind: float(rate) for kind, rate in table["flops_dense"].items()},
        link_bytes_per_s=float(table["link_bytes_s"]),
        link="memory",
        compute_capability="",
        watts=0.0,
        sources=(str(table["source"]),),
    )


def generation_of(deployment: Deployment) -> Generation:
    """The generation whose prices hold for this deployment; an unknown device takes the generic ones, which are wide."""
    if deployment.device == "cpu":
        return generation("cpu")
    capability = deployment.gpu.compute_capability if deployment.gpu is not None else ""
    return generation(_GENERATIONS.get(capability, "generic"))


def physics_of(deployment: Deployment) -> Physics:
    """Amounts of one step, on the deployment's GPU or the generation's own device.

    Raises:
        Unsupported: no device is known.
    """
    return measure(deployment, generation_of(deployment).device)


def prior_factors(deployment: Deployment, physics: Physics | None = None, prices: Prices | None = None) -> FactorSet:
    """The factors before any measurement, each with the spread seen between deployments; at other prices than the
    catalog's where they are given."""
    kind = generation_of(deployment)
    amounts = physics if physics is not None else physics_of(deployment)
    values = factor_values(prices or kind.prices, amounts, deployment)
    source = f"prior of {kind.name}: {kind.evidence}"
    factors = {name: prior(name, value, kind.log_sd[name], source) for name, value in values.items()}
    return FactorSet(factors, kind.residual_log_sd)


def factor_values(prices: Prices, amounts: Physics, deployment: Deployment) -> dict[str, float]:
    """The value of every factor at these prices."""
    return {
        "step_overhead": (
            launches_s(prices, amounts, deployment.version)
            + weights_s(prices, amounts, deployment)
            + (prices.sync_step_s if waits_for_scheduler(deployment) else 0.0)
        ),
        "expert_read_factor": expert_read_factor(prices, amounts),
        "per_sequence": per_sequence_s(prices, amounts)
        + (prices.sync_sequence_s if waits_for_scheduler(deployment) else 0.0),
        "kv_read_factor": kv_read_factor(prices, deployment),
        "prefill_factor": prefill_factor(prices, amounts),
        "attention_factor": prices.attention,
        "mixed_step_overhead": prices.mixed_layer_overhead_s * amounts.layers,
        "request_overhead": prices.request_overhead_s,
        "request_token": prices.request_token_s,
        "wait_steps": prices.wait_steps,
        "prompt_factor": prices.prompt_factor,
        "ahead_factor": prices.ahead_factor,
    }


def waits_for_scheduler(deployment: Deployment) -> bool:
    """Does each step wait for the CPU to schedule it? Not where the next one is scheduled while the last one runs (vLLM's
    asynchronous scheduling, default from 0.14)."""
    return deployment.device == "cuda" and deployment.concurrent_batches <= deployment.pp


def launches_s(prices: Prices, amounts: Physics, version: tuple[int, int, int]) -> float:
    """Seconds of a step that no byte explains: launches and tails of every layer's kernels. Linear in layers across 8
    dense deployments and TP 1 to 8; routing, MLA and block-scaled FP8 experts bring kernels of their own."""
    age = max(0, _SETTLED_MINOR - version[1]) if version[0] == 0 else 0
    routed = prices.moe_layer_overhead_s * amounts.moe_layers + prices.mla_layer_overhead_s * amounts.mla_layers
    fp8 = prices.fp8_expert_layer_overhead_s * amounts.fp8_expert_layers
    dense = prices.layer_overhead_s * amounts.layers
    return dense + routed * (1 + prices.old_moe_kernels) ** age + fp8 * (1 + prices.old_fp8_kernels) ** age


def weights_s(prices: Prices, amounts: Physics, deployment: Deployment) -> float:
    """Seconds to read the weights that every step reads."""
    small = prices.weight_read_nvfp4 if deployment.weights.name == "nvfp4" and not amounts.experts else 1.0
    return prices.weight_read * small * amounts.weight_bytes / amounts.bandwidth_bytes_per_s


def expert_read_factor(prices: Prices, amounts: Physics) -> float:
    """Time of reading experts over bytes / bandwidth: the kernel's efficiency, plus a fixed cost for each expert, which
    weighs the more the thinner tensor parallelism slices it. Where experts are unpacked, that goes at a rate of its own:
    gpt-oss on H200 is hardly faster than on H100."""
    kernel = prices.expert_read
    if amounts.unpacks_experts:
        kernel = max(kernel, prices.unpacked_byte_s * amounts.bandwidth_bytes_per_s)
    if not amounts.experts:
        return kernel
    ideal = amounts.expert_bytes / amounts.bandwidth_bytes_per_s
    fixed = prices.expert_overhead_s * sum(group.layers * group.total for group in amounts.experts)
    return kernel + fixed / ideal


def per_sequence_s(prices: Prices, amounts: Physics) -> float:
    """Seconds each running sequence adds to a step: sampling and bookkeeping, its activations in two all-reduces a
    layer, and the part of its matrix products that reading the weights does not hide."""
    reduce = prices.sequence_reduce * amounts.reduced_bytes_per_token / amounts.link_bytes_per_s
    compute = prices.sequence_compute * (amounts.compute_s_per_token + amounts.expert_compute_s_per_token)
    return prices.sequence_overhead_s + reduce + compute


def kv_read_factor(prices: Prices, deployment: Deployment) -> float:
    """Time of reading the cache over bytes / bandwidth; on Hopper an FP8 cache is read no faster than a 16-bit one."""
    return prices.kv_read * (prices.kv_read_fp8 if deployment.kv.bytes_per_element <= 1 else 1.0)


def prefill_factor(prices: Prices, amounts: Physics) -> float:
    """Time of a prompt token over operations / peak: matrix products, the all-reduce of its activations, and passes over
    the residual stream, which tensor parallelism does not split."""
    ideal = amounts.compute_s_per_token + amounts.expert_compute_s_per_token
    products = prices.gemm * amounts.compute_s_per_token + prices.expert_gemm * amounts.expert_compute_s_per_token
    reduce = prices.prompt_reduce * amounts.reduced_bytes_per_token / amounts.link_bytes_per_s
    passes = prices.activation_passes * amounts.activation_bytes_per_token / amounts.bandwidth_bytes_per_s
    return (products + reduce + passes) / ideal
