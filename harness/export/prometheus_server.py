"""Serving a registry of ours to Prometheus, in a thread."""

from __future__ import annotations

import errno
import socket
from socketserver import ThreadingMixIn
from threading import Condition, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app

from harness.errors import UsageError

#: a run's end waits as long for the server's; the standard library's half a second would be seen
_POLL_S = 0.02


class _Reads:
    """Who has read, and whether somebody has since something was shown."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._shown = 0
        self._read = -1

    def begins(self) -> int:
        """A scrape begins; what it will have read when it ends."""
        return self._shown

    def ended(self, shown: int) -> None:
        with self._changed:
            self._read = max(self._read, shown)
            self._changed.notify_all()

    def wait(self, most_s: float) -> bool:
        """Wait until what is shown now has been read, where anybody reads at all; whether it has been."""
        with self._changed:
            if self._read < 0:
                return False
            self._shown += 1
            return self._changed.wait_for(lambda: self._read >= self._shown, most_s)


class _Server(ThreadingMixIn, WSGIServer):
    #: a scraper that hangs keeps nobody from ending
    daemon_threads = True
    reads: _Reads


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    server: _Server

    def handle(self) -> None:
        shown = self.server.reads.begins()
        super().handle()
        self.server.reads.ended(shown)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape a second is no news."""


class MetricsServer:
    """Serves ``/metrics`` from its construction to :meth:`close`.

    Args:
        port: to listen on; 0 takes a free one (:attr:`port` says which).
        address: to bind.

    Raises:
        UsageError: the port is in use, or address and port cannot be bound.
    """

    def __init__(self, registry: CollectorRegistry, *, port: int, address: str) -> None:
        # a second series for every counter and histogram, which tells nothing that Prometheus uses; the library knows
        # the switch for the whole process only
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._server = _listen(address, port, registry)
        self._thread = Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.server_port)

    @property
    def address(self) -> str:
        return str(self._server.server_address[0])

    def wait_for_a_read(self, most_s: float) -> bool:
        """Wait until what is shown now has been read, at most so many seconds and only where somebody has read before;
        whether it has been."""
        return self._server.reads.wait(most_s)

    def close(self) -> None:
        """Stop serving. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _listen(address: str, port: int, registry: CollectorRegistry) -> _Server:
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        kind = _ServerV6 if family == socket.AF_INET6 else _Server
        server = make_server(address, port, make_wsgi_app(registry), kind, _Handler)
        server.reads = _Reads()
        return server
    except (OSError, OverflowError) as error:
        where = f"{address}:{port}"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise UsageError(f"port {where} for the Prometheus export is in use", "take another one, or 0") from error
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot serve the Prometheus export on {where}: {reason}", "take another one") from error
