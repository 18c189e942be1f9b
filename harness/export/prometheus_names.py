"""The names and label values of what is exported, and how a comparison is put into them (names: DESIGN section 8).

A label's values are a fixed few, so that the number of series is bounded whatever a run does: outcomes, failure kinds
(``http_<status>`` has three digits), limits and factors; no request, no user, no address.

``vllm_harness_predicted_users{limit}``: users up to which a limit is predicted to hold off.

    kv_full         the KV pool is full with all streams at their end (lock step)
    kv_staggered    the KV pool is full on average
    max_num_seqs    as many as may run at once
    tpot, ttft      the mean reaches the limit that was asked for; knee: more users bring little

``vllm_harness_measured_users{limit}``: a sweep brackets a limit between two of its levels.

    wall, max_num_seqs                most users that ran without a sign of it, where it showed later
    wall_shown, max_num_seqs_shown    fewest users at which it showed
    none                              no limit showed: most users that ran
    knee                              more users bring little beyond here
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Mapping

    from calibration.compare import Comparison, Prediction

PREDICTED_USERS = "vllm_harness_predicted_users"
MEASURED_USERS = "vllm_harness_measured_users"
CORRECTION_FACTOR = "vllm_harness_correction_factor"

PREDICTED_LIMITS = ("kv_full", "kv_staggered", "max_num_seqs", "tpot", "ttft", "knee")
MEASURED_LIMITS = ("none", "wall", "wall_shown", "max_num_seqs", "max_num_seqs_shown", "knee")

#: gauges that a live run and a finished one share, with what they mean and their label: they tell of a deployment, not of
#: a moment
SHARED: Mapping[str, tuple[str, str]] = {
    PREDICTED_USERS: ("Users the model predicts up to a limit.", "limit"),
    MEASURED_USERS: ("Users measured up to a limit; _shown: fewest users at which it showed.", "limit"),
    CORRECTION_FACTOR: ("A fitted correction factor: seconds, or a plain number.", "factor"),
}


def predicted_users(prediction: Prediction | None) -> dict[str, float]:
    """Limit -> users, of a predicted wall; what is unknown is left out."""
    if prediction is None:
        return {}
    known = {
        "kv_full": prediction.kv_full,
        "kv_staggered": prediction.kv_staggered,
        "max_num_seqs": prediction.max_num_seqs,
    }
    return {limit: float(users) for limit, users in known.items() if users is not None}


def measured_users(comparison: Comparison) -> dict[str, float]:
    """Limit -> users, of a sweep; what it does not tell is left out."""
    found, known = comparison.onset, dict[str, float | None]()
    if found is not None and found.sign is None:
        known["none"] = found.last_good
    elif found is not None and found.sign is not None:
        known |= {found.sign.limit: found.last_good, f"{found.sign.limit}_shown": found.first_bad}
    known["knee"] = comparison.knee.users
    return {limit: float(users) for limit, users in known.items() if users is not None}


def gauge(name: str, text: str, rows: Mapping[Any, float | None], *labels: str) -> GaugeMetricFamily | None:
    """A family of gauges; None where no value is known, for what is unknown is not exported.

    Args:
        rows: values by label values: a tuple of them, or a single one, or ``()`` without labels.
    """
    known = {key if isinstance(key, tuple) else (key,): value for key, value in rows.items() if value is not None}
    if not known:
        return None
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in known.items():
        family.add_metric([str(part) for part in key], value)
    return family
