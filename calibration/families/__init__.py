"""Readers of Hugging Face configurations, one a family: config.json -> :class:`calibration.architecture.Architecture`.

An architecture that is not in the table is refused by name: its cache and weights would be a guess.
"""

from __future__ import annotations

from calibration.families.read import known_architectures, read_config

__all__ = ["known_architectures", "read_config"]
