"""A finished run as OpenMetrics text, for whatever takes such a file in: what ``vllm-harness exporter RUN`` would serve
(:mod:`harness.export.prometheus_finished`), once."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest

from harness.export.prometheus_finished import Finished


def openmetrics(families: Sequence[Metric]) -> bytes:
    """The text of these families, ``# EOF`` included."""
    registry = CollectorRegistry()
    registry.register(Finished(families))
    return bytes(generate_latest(registry))  # type: ignore[no-untyped-call]
