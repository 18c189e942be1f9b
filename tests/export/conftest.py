import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))
sys.path.insert(0, str(Path(__file__).parent))

from console import cli, no_process_left

__all__ = ["cli", "no_process_left"]
