"""The memory of one GPU as a bar: one way for the report and the page."""

from __future__ import annotations

from calibration.memory import MemoryPlan
from harness.export.charts import Part, bar
from harness.export.markup import Markup

GIB = 1 << 30
#: what the pieces are called, and how they look
_PIECES = (("weights", 1), ("runtime and activations", 2), ("KV pool", 3), ("unused: the pool was given", 0))


def gpu_bar(key: str, title: str, memory: MemoryPlan, note: str = "") -> Markup | None:
    """The tightest GPU of a plan; None where no GPU is planned. ``title``: with {} for the GPU's name."""
    parts, gpu = memory.parts, memory.deployment.gpu
    if parts is None or gpu is None:
        return None
    pieces = [
        # nothing is unused where the pool takes all that is left
        _part(name, size, look)
        for (name, look), size in zip(_PIECES, parts[:-1], strict=True)
        if size or look
    ]
    return bar(key, title.format(gpu.title), [*pieces, _part("left to others", parts.others, 0)], note)


def _part(name: str, size: int, look: int) -> Part:
    return Part(name=name, size=float(size), shown=f"{size / GIB:.2f} GiB", look=look)
