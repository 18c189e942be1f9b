import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))

from console import cli

__all__ = ["cli"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or replaces what this user's selftest said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
