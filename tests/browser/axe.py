"""axe-core, the checks of accessibility that a page is held to: npm's, as ``make test`` fetched it, or an older one that a
Python package carries where there is no npm."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parents[2] / ".cache"

#: (rule, nodes) of every serious or critical violation of the page
VIOLATIONS = (
    "axe.run(document, {resultTypes: ['violations']}).then(r => r.violations"
    ".filter(v => ['serious', 'critical'].includes(v.impact))"
    ".map(v => [v.id, v.nodes.map(n => n.target.join(' ') + ': ' + n.failureSummary)]))"
)


def source() -> str:
    """Its script; skips the test where there is none."""
    packed = sorted(CACHE.glob("axe-core-*.tgz"))
    if packed:
        with tarfile.open(packed[-1]) as package:
            script = package.extractfile("package/axe.min.js")
            assert script is not None, packed[-1]
            return script.read().decode()
    carried = pytest.importorskip("axe_core_python", reason="axe-core-python carries axe-core")
    return Path(carried.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
