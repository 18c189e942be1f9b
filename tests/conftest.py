"""What holds for every test.

Tests that measure time over real sockets and processes are run again, up to twice, when they fail: a virtual machine that
pauses for seconds is not a finding about the client. Tests of the pure rooms get one try, and so do measurements, which take
minutes and are to be read, not repeated until they please.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
#: rooms and files whose tests time real sockets or processes
TIMED = (
    "cli/",
    "export/",
    "faults/",
    "load/",
    "observe/",
    "selftest/",
    "vllm/",
    "twin/test_twin_server",
    "twin/test_twin_command",
    "ui/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        measures = item.get_closest_marker("bench") is not None
        if not measures and item.path.relative_to(ROOT).as_posix().startswith(TIMED):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=1))
