"""Small questions to a server: one GET or POST, one whole answer; and the one place where aiohttp's errors become ours.

Probe and scrape ask through :class:`Getter`. The load itself goes another way (:mod:`harness.client`) but explains its
errors by the same table, :data:`RULES`: each exception of aiohttp, of ssl and of the operating system stands for one
sentence, one hint and one failure kind.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp import http_exceptions

from harness.clock import NS_PER_S, now_ns
from harness.errors import HarnessError, LocalFault, NotVllm, Refused, Unreachable, UsageError
from harness.record import Failure

#: an answer larger than this is no answer to a small question; a /metrics text of 64 engines has about 4 MB
MAX_BODY_BYTES = 64 * 1024 * 1024
#: seconds an idle connection is kept: below uvicorn's 5 s, so that no question goes into a closing one
KEEP_ALIVE_S = 2.5


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole HTTP answer. Stamps are on the run's clock (:mod:`harness.clock`), taken around the call."""

    url: str
    status: int
    body: bytes
    headers: Mapping[str, str]
    started_ns: int
    ended_ns: int

    @property
    def elapsed_s(self) -> float:
        return (self.ended_ns - self.started_ns) / NS_PER_S

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def text(self) -> str:
        """The body as UTF-8; bytes that are none become U+FFFD. For showing, not for reading values."""
        return self.body.decode("utf-8", "replace")


class Getter:
    """Asks small questions. An async context manager over one session of connections.

    Args:
        api_key: sent as ``Authorization: Bearer``; never part of a message.
        key_url: the key is for this URL's host and goes to no other (a --metrics-url elsewhere); None sends it always.
        headers: sent with every question.
        verify_tls: False accepts any certificate.
        timeout_s: seconds for one whole question, unless the call says otherwise.
        connect_timeout_s: seconds for the connection alone.

    Proxies are those of the environment (HTTP_PROXY, HTTPS_PROXY, NO_PROXY); a loopback address never goes through one.
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        key_url: str | None = None,
        headers: Mapping[str, str] | None = None,
        verify_tls: bool = True,
        timeout_s: float = 10.0,
        connect_timeout_s: float = 5.0,
    ) -> None:
        self._headers = dict(headers or {})
        self._key_header = bearer(api_key)
        self._key_host = None if key_url is None else urlsplit(key_url).hostname
        self._verify_tls = verify_tls
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def has_key(self) -> bool:
        return bool(self._key_header)

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._verify_tls, limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, url: str, *, timeout_s: float | None = None) -> Answer:
        """GET ``url``, any status. Redirects are followed (vLLM before 0.6 sends /metrics to /metrics/).

        Raises:
            UsageError: the URL is none.
            Unreachable, Refused, NotVllm, LocalFault: by :func:`explain`.
        """
        return await self._ask("GET", url, None, timeout_s)

    async def post_json(self, url: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> Answer:
        """POST a JSON document to ``url``; raises what :meth:`get` raises."""
        return await self._ask("POST", url, body, timeout_s)

    async def _ask(self, method: str, url: str, json: Mapping[str, Any] | None, timeout_s: float | None) -> Answer:
        if self._session is None:
            raise RuntimeError("a Getter asks only inside its `async with`")
        total = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s, connect=self._connect_timeout_s)
        try:
            headers = self._key_header if self._key_host in (None, urlsplit(url).hostname) else {}
            started_ns = now_ns()
            async with self._session.request(
                method, url, json=json, headers=headers, timeout=total, proxy=proxy_for(url)
            ) as response:
                body = await _read(response)
                ended_ns = now_ns()
                return Answer(str(response.url), response.status, body, dict(response.headers), started_ns, ended_ns)
        except MAPPED as error:
            raise explain(error, url) from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise NotVllm(f"{response.url} answers with more than {MAX_BODY_BYTES >> 20} MiB: not what was asked for")
    return b"".join(parts)


def bearer(api_key: str | None) -> dict[str, str]:
    """The authorization header of a key, or nothing. Raises UsageError (without the key) where no header can carry it."""
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        raise UsageError(
            "the API key has characters no HTTP header can carry (line breaks, blanks at its ends or non-ASCII)",
            "check --api-key, OPENAI_API_KEY or VLLM_API_KEY",
        )
    return {"Authorization": f"Bearer {api_key}"}


def base_url_of(url: str, option: str = "--base-url") -> str:
    """The root of a server's API: scheme, host, port and path prefix, without a trailing slash or ``/v1``.

    Raises:
        UsageError: it is not an http(s) URL, or carries a query, a fragment or credentials.
    """
    text = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{option} {_shown(url)} is not a URL: {error}", "expected http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"{option} {_shown(url)} is not an http(s) URL", "expected http://HOST:PORT")
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{option} {_shown(url)} carries credentials", "give a key by --api-key or OPENAI_API_KEY")
    if parts.query or parts.fragment:
        raise UsageError(f"{option} {_shown(url)} has a query or fragment", "expected http://HOST:PORT")
    return text


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def proxy_for(url: str) -> str | None:
    """The environment's proxy for a URL (HTTP_PROXY, HTTPS_PROXY, NO_PROXY); none for a loopback address."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host) or proxy_bypass(host):
        return None
    return getproxies().get(parts.scheme)


# --- errors ------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """What a kind of foreign exception means: the failure kind of a request, and the error of a question."""

    types: tuple[type[BaseException], ...]
    failure: Failure
    explain: Callable[[BaseException, str], HarnessError]


def _invalid_url(error: BaseException, url: str) -> HarnessError:
    return UsageError(f"{_shown(url)} is not a URL that can be asked: {_reason(error)}", "expected http://HOST:PORT")


def _bad_redirect(error: BaseException, url: str) -> HarnessError:
    return Refused(f"{_shown(url)} redirects in circles or to no HTTP address", "give the address it really has")


def _unknown_host(error: BaseException, url: str) -> HarnessError:
    return Unreachable(
        f"unknown host {_host(url)}: {_reason(error)}", "check the name, and that this machine resolves it"
    )


def _certificate(error: BaseException, url: str) -> HarnessError:
    return Unreachable(
        f"the TLS certificate of {_host(url)} is not trusted: {_reason(error)}",
        "name its authority by SSL_CERT_FILE, or accept any certificate with --insecure",
    )


def _tls(error: BaseException, url: str) -> HarnessError:
    return Unreachable(f"TLS with {_host(url)} failed: {_reason(error)}", "does the server speak http:// there?")


def _proxy(error: BaseException, url: str) -> HarnessError:
    return Unreachable(
        f"the proxy on the way to {_host(url)} failed: {_reason(error)}",
        "check HTTP_PROXY and HTTPS_PROXY, or name the host in NO_PROXY",
    )


def _connect_timeout(error: BaseException, url: str) -> HarnessError:
    plain = ", or a server that speaks http:// there" if url.startswith("https:") else ""
    return Unreachable(
        f"no connection to {_host(url)} in time", f"a firewall, a wrong port, a machine that is down{plain}"
    )


def _timeout(error: BaseException, url: str) -> HarnessError:
    return Unreachable(f"no whole answer from {_shown(url)} in time", "the server is busy, starting, or stuck")


def _broke_off(error: BaseException, url: str) -> HarnessError:
    return Unreachable(f"{_host(url)} broke off the connection before the answer was whole", "did the server die?")


def _not_http(error: BaseException, url: str) -> HarnessError:
    return NotVllm(f"{_host(url)} does not answer in HTTP: {_reason(error)}", "check the port")


def _system(error: BaseException, url: str) -> HarnessError:
    code = _errno(error)
    if code == errno.ECONNREFUSED:
        return Unreachable(f"{_host(url)} refused the connection", "is the server up, and is the port right?")
    if code in (errno.EMFILE, errno.ENFILE):
        return LocalFault("this process may open no more files or connections", "raise `ulimit -n`")
    if code in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return Unreachable(f"no route to {_host(url)}", "check the network, a VPN, or the address")
    if code in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED):
        return _broke_off(error, url)
    return Unreachable(f"no connection to {_host(url)}: {_reason(error)}", "check the address and the network")


#: not in every aiohttp this project supports
_UPLOAD_ABORTED: tuple[type[BaseException], ...] = tuple(
    getattr(aiohttp, name) for name in ("UploadAbortedError",) if hasattr(aiohttp, name)
)

#: from the most specific to the most general; the first that matches speaks
RULES: tuple[Rule, ...] = (
    Rule(
        (
            aiohttp.InvalidUrlRedirectClientError,
            aiohttp.NonHttpUrlRedirectClientError,
            aiohttp.RedirectClientError,
            aiohttp.TooManyRedirects,
        ),
        Failure.PROTOCOL,
        _bad_redirect,
    ),
    Rule((aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError), Failure.CLIENT, _invalid_url),
    Rule((aiohttp.ClientConnectorDNSError, socket.gaierror), Failure.CONNECTION, _unknown_host),
    Rule(
        (aiohttp.ClientConnectorCertificateError, aiohttp.ServerFingerprintMismatch, ssl.SSLCertVerificationError),
        Failure.CONNECTION,
        _certificate,
    ),
    Rule((aiohttp.ClientSSLError, ssl.SSLError), Failure.CONNECTION, _tls),
    Rule((aiohttp.ClientProxyConnectionError, aiohttp.ClientHttpProxyError), Failure.CONNECTION, _proxy),
    Rule((aiohttp.ConnectionTimeoutError,), Failure.TIMEOUT, _connect_timeout),
    Rule((aiohttp.ServerTimeoutError, TimeoutError), Failure.TIMEOUT, _timeout),
    Rule((aiohttp.ClientPayloadError, http_exceptions.PayloadEncodingError), Failure.TRUNCATED, _broke_off),
    Rule(
        (aiohttp.ClientResponseError, http_exceptions.HttpProcessingError, aiohttp.WebSocketError),
        Failure.PROTOCOL,
        _not_http,
    ),
    Rule(
        (aiohttp.ServerConnectionError, aiohttp.ClientConnectionResetError, *_UPLOAD_ABORTED),
        Failure.CONNECTION,
        _broke_off,
    ),
    Rule((aiohttp.ClientConnectionError, OSError), Failure.CONNECTION, _system),
    # yarl, idna and the proxy code refuse what they cannot read with a plain ValueError
    Rule((ValueError,), Failure.CLIENT, _invalid_url),
)
#: what :func:`explain` knows; anything else is a bug of ours and is not caught
MAPPED: tuple[type[BaseException], ...] = (*(kind for rule in RULES for kind in rule.types), aiohttp.ClientError)


def rule_of(error: BaseException) -> Rule | None:
    """The first rule that knows ``error``; None for an exception of no kind in the table."""
    return next((rule for rule in RULES if isinstance(error, rule.types)), None)


def explain(error: BaseException, url: str) -> HarnessError:
    """The error to show for a question that failed: what happened in one sentence, and what to do."""
    rule = rule_of(error)
    return _system(error, url) if rule is None else rule.explain(error, url)


def failure_kind(error: BaseException) -> Failure:
    """The failure kind of a request that ended with ``error`` (DESIGN section 4)."""
    rule = rule_of(error)
    return Failure.CONNECTION if rule is None else rule.failure


def _errno(error: BaseException) -> int | None:
    """The system's error number, also out of aiohttp's wrapping and of several attempts that failed alike."""
    inner = getattr(error, "os_error", error)
    if isinstance(inner, ConnectionRefusedError):
        return errno.ECONNREFUSED
    return getattr(inner, "errno", None)


def _reason(error: BaseException) -> str:
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", error)
    return (
        getattr(inner, "strerror", None) or getattr(inner, "message", None) or str(inner) or type(inner).__name__
    ).strip()


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2] or _shown(url)


def _shown(url: str) -> str:
    """A URL as a message may show it: credentials cut out."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}" if mark else repr(url)
