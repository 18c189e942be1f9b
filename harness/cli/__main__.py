"""``python -m harness.cli``: the console script without its wrapper."""

from __future__ import annotations

from harness.cli import main

if __name__ == "__main__":
    main()
