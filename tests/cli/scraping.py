"""Prometheus as the harness's own export knows it: somebody who reads it again and again."""

from __future__ import annotations

import socket
import threading
from typing import Self
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

#: (name, labels) -> value
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Scraper:
    """Reads a port from when it is first served to when it is not any more; a context manager.

    ``readings`` are what was read, in order; ``gaps`` the readings that failed between two that did not.
    """

    def __init__(self, port: int, every_s: float = 0.1) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._missed = 0
        self.readings: list[Series] = []
        self.gaps = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(20)

    def values(self, name: str, label: str) -> list[dict[str, float]]:
        """Of each reading: the value of the label -> that of the series."""
        return [
            {dict(labels)[label]: value for (found, labels), value in reading.items() if found == name}
            for reading in self.readings
        ]

    def _run(self) -> None:
        opener = build_opener(ProxyHandler({}))
        while not self._ended.wait(self._every_s):
            try:
                with opener.open(self._url, timeout=5) as answer:
                    text = answer.read().decode()
            except (URLError, ConnectionError):
                self._missed += bool(self.readings)
                continue
            self.gaps, self._missed = self.gaps + self._missed, 0
            self.readings.append(
                {
                    (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                    for family in text_string_to_metric_families(text)
                    for sample in family.samples
                }
            )
