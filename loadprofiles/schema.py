"""The JSON schema of a profile, for editors: ``vllm-harness profiles --schema``, and ``profile.schema.json`` beside this
file, which a test holds equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loadprofiles.profile import ProfileFile

SCHEMA_FILE = Path(__file__).parent / "profile.schema.json"


def profile_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of what a profile's YAML may hold."""
    schema = ProfileFile.model_json_schema()
    # OpenAPI's word, which JSON Schema does not know: each member of the union names its own kind
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "vllm-harness load profile",
        **{key: value for key, value in _without(schema, "discriminator").items() if key != "title"},
    }


def schema_text() -> str:
    """The schema as the file holds it."""
    return json.dumps(profile_schema(), indent=1, ensure_ascii=False) + "\n"


def _without(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _without(item, key) for name, item in value.items() if name != key}
    return [_without(item, key) for item in value] if isinstance(value, list) else value
