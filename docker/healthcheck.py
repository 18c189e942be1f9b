"""The image's health check: HEALTH_URL answers with 200 within three seconds. Without one there is nothing to ask."""

from __future__ import annotations

import os
import sys
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener


def problem(url: str) -> str | None:
    """Why it is not healthy; None where it is. Never through a proxy: it asks its own container."""
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=3) as answer:
            return None if answer.status == 200 else f"{url} answers {answer.status}"
    except (URLError, OSError, ValueError) as error:
        return f"{url}: {error}"


if __name__ == "__main__":
    asked = os.environ.get("HEALTH_URL", "")
    sys.exit(problem(asked) if asked else None)
