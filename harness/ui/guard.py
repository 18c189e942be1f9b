"""Who may ask, and what an answer may do: Host, Origin, token, content-security policy, size, and errors as JSON.

A page of another site can make a browser send requests to loopback. What stops it here, each on its own: the Host header must
name this machine (a rebound name does not), an Origin must be the page's own, a fetch that the browser calls cross-site is
refused, whatever changes something is a POST of JSON, and on any address but loopback a token is needed.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import platform
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from calibration.errors import CalibrationError
from harness.errors import HarnessError
from loadprofiles.profile import ProfileError

LOG = logging.getLogger("vllm-harness.ui")

#: bytes of a request's body: a config.json or a calibration, with room
MOST_BODY = 2 << 20
COOKIE = "vllm_harness_ui"
LOGIN = "/login"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Forbidden(Exception):
    """A request that is refused for who sends it, or from where; ``status`` is the answer's."""

    def __init__(self, message: str, status: int = 403) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


@dataclass(frozen=True, slots=True)
class Guard:
    """Who may ask.

    Args:
        host: the address served.
        token: needed with every request where set.
    """

    host: str
    token: str | None = None

    def check(self, request: web.Request) -> None:
        """Refuse a request that is not ours to answer.

        Raises:
            Forbidden: a foreign Host or Origin, a cross-site fetch, a body that is no JSON, or no token.
        """
        host = request.headers.get("Host", "")
        if not self._is_ours(_name_of(host)):
            raise Forbidden(f"Host {host!r} is not this server", 421)
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            raise Forbidden(f"Origin {origin!r} is another site")
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not _is_visit(request):
            raise Forbidden("the browser says that another site asks")
        if request.method == "POST" and request.path != LOGIN and request.content_type != "application/json":
            raise Forbidden("expected a body of application/json", 415)
        if self.token is not None and request.path not in (LOGIN, "/look.css", "/static/page.css"):
            self._check_token(request)

    def _is_ours(self, name: str) -> bool:
        if name in ("localhost", "127.0.0.1", "::1") or name == self.host.lower():
            return True
        # behind a token: by address, or by this machine's own name; a rebound name is neither
        return self.token is not None and (_is_address(name) or name == platform.node().lower())

    def _check_token(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and self.is_token(given):
            return
        if not hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), self.cookie().encode()):
            raise Forbidden("a token is needed", 401)

    def is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def cookie(self) -> str:
        """What the cookie holds of the token: the same after a restart, and not the token."""
        return hashlib.sha256(f"vllm-harness ui {self.token}".encode()).hexdigest()


def _name_of(host: str) -> str:
    """Host header without its port, lower case, brackets of IPv6 off; "" for anything odd."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_visit(request: web.Request) -> bool:
    """A link followed from elsewhere to the page itself, which shows nothing by being opened."""
    return (
        request.method == "GET" and request.path in ("/", LOGIN) and request.headers.get("Sec-Fetch-Mode") == "navigate"
    )


def middleware(guard: Guard) -> Middleware:
    """Checks, headers, and every error as one JSON object: ``{"error": what happened, "hint": what to do}``."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            guard.check(request)
            response = await handler(request)
        except Forbidden as error:
            if error.status == 401 and request.path == "/":
                response = see_other(LOGIN)
            else:
                response = problem(error.status, error.message)
        except web.HTTPException as error:
            response = problem(error.status, error.reason)
        except (HarnessError, CalibrationError, ProfileError) as error:
            response = problem(422, error.message, error.hint)
        except ConnectionResetError:
            raise
        except Exception:  # whatever it is, the asker gets a sentence and the terminal the trace
            LOG.exception("%s %s", request.method, request.path)
            response = problem(500, "this is a bug of ours: the terminal of `vllm-harness ui` says more")
        if not response.prepared:
            for name, value in _HEADERS.items():
                response.headers.setdefault(name, value)
        return response

    return guarded


def problem(status: int, message: str, hint: str = "") -> web.Response:
    """An error for the page."""
    return web.json_response({"error": message, "hint": hint}, status=status)


def see_other(path: str) -> web.Response:
    """A redirection to another page of ours."""
    return web.Response(status=303, headers={"Location": path})
