"""Score the memory model on servers others measured: predicted KV pool beside the one vLLM made, row by row.

Rows are those of ``public_memory_measurements.csv``: blank means not stated. Nothing is fitted to a row; a row whose
``max_num_seqs`` and ``max_num_batched_tokens`` are not stated is planned with vLLM's defaults and counts apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, resolve_deployment
from calibration.memory import MemoryPlan, plan_memory

GIB = 1 << 30
#: what CUDA reports on an H100-80 where a row does not say (llm-d-planner's eight servers)
_H100_GIB = 79.18


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """Bytes on one GPU. ``error`` is predicted / measured - 1; ``flags_recorded``: both scheduler limits are stated."""

    model: str
    tp: int
    vllm_version: str
    flags_recorded: bool
    predicted_bytes: int
    measured_bytes: int
    weights_bytes: int
    overhead_bytes: int
    is_multimodal: bool

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def score_rows(rows: Iterable[Mapping[str, str]]) -> list[ScoredRow]:
    """Each row of the table, planned and held against what was measured.

    Raises:
        InputError: a row whose model or GPU is not in the catalog, or a value that cannot be.
    """
    return [_score(row) for row in rows]


def _score(row: Mapping[str, str]) -> ScoredRow:
    plan = plan_memory(_deployment(row))
    stage = plan.tightest
    architecture = plan.deployment.architecture
    return ScoredRow(
        model=row["model"],
        tp=plan.deployment.tp,
        vllm_version=row["vllm_version"],
        flags_recorded=bool(row["max_num_seqs"] and row["max_num_batched_tokens"]),
        predicted_bytes=stage.kv_bytes,
        measured_bytes=_measured(row, plan),
        weights_bytes=stage.weights.total_bytes,
        overhead_bytes=0 if stage.overhead is None else stage.overhead.total_bytes,
        is_multimodal=any(weight.role == "vision" for weight in architecture.extra_weights),
    )


def _deployment(row: Mapping[str, str]) -> Deployment:
    gpu = find_gpu(row["gpu"])
    total = float(row["total_gib"]) if row["total_gib"] else _H100_GIB
    limits = {key: int(row[key]) for key in ("max_num_seqs", "max_num_batched_tokens") if row[key]}
    return resolve_deployment(
        find_model(row["model"]),
        gpu=gpu._replace(usable_bytes=int(total * GIB)),
        tp=int(row["tp"]),
        weights=row["weight_dtype"],
        gpu_memory_utilization=float(row["gpu_mem_util"]),
        vllm_version=row["vllm_version"],
        max_num_seqs=limits.get("max_num_seqs"),
        max_num_batched_tokens=limits.get("max_num_batched_tokens"),
    )


def _measured(row: Mapping[str, str], plan: MemoryPlan) -> int:
    """Bytes of the measured pool: as printed, else its blocks times the bytes of one token in every layer."""
    if row["kv_gib_per_gpu"]:
        return int(float(row["kv_gib_per_gpu"]) * GIB)
    return int(row["num_gpu_blocks"]) * int(row["block_size"]) * plan.kv_bytes_per_token_per_gpu


def table(rows: Sequence[ScoredRow]) -> str:
    """The rows as text, one a line, GiB on one GPU."""
    lines = [f"{'model':48} TP  flags     weights overhead  predicted  measured   error"]
    for row in rows:
        sizes = (row.weights_bytes, row.overhead_bytes, row.predicted_bytes, row.measured_bytes)
        weights, overhead, predicted, measured = (size / GIB for size in sizes)
        flags = "recorded" if row.flags_recorded else "assumed"
        lines.append(
            f"{row.model:48} {row.tp:2}  {flags:8} {weights:8.2f} {overhead:8.2f} {predicted:10.2f} {measured:9.2f}"
            f" {row.error:+7.2%}" + ("  multimodal" if row.is_multimodal else "")
        )
    return "\n".join(lines)
