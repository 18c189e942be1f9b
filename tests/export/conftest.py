import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "cli")]

from console import cli, no_process_left

__all__ = ["cli", "no_process_left"]
