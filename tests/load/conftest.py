import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))
sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))

from console import cli, no_process_left
from fault_thread import FaultThread

__all__ = ["cli", "faults", "no_process_left"]


@pytest.fixture
def faults() -> Iterator[FaultThread]:
    """A fault server in a thread."""
    with FaultThread() as served:
        yield served
