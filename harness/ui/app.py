"""The page's server: routes over the functions that the commands call. Everything it shows is made here; the browser draws it.

GET  /                         the page, and /static/*, /look.css
GET  /api/catalog              what the controls offer
POST /api/size                 a deployment -> its card
POST /api/curves               up to four deployments -> curves over users
POST /api/launch               a deployment -> launch script and compose file
GET  /api/runs                 what lies in results/
GET  /api/runs/{name}          a run's report, as a part of the page; /report.html as a page of its own
GET  /api/runs/{name}/events   the run as it goes on, as server-sent events
POST /api/runs/{name}/stop     stop a ramp that the page started
POST /api/compare              two runs, level by level
POST /api/ramps/check          probe a server: what a start would send, and a ticket
POST /api/ramps/start          start what a ticket names
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from calibration.errors import InputError
from harness.cli.compare_gate import compared as compare_runs
from harness.cli.report import calibration_of, compared
from harness.errors import UsageError
from harness.export.charts import draw
from harness.export.markup import element
from harness.export.report import look, report_body, report_html
from harness.ui import sizing
from harness.ui.follow import Follower, view
from harness.ui.guard import COOKIE, LOGIN, MOST_BODY, Guard, middleware, problem, see_other
from harness.ui.ramps import Ramps, wanted_of
from harness.ui.runs import Results
from harness.ui.runs_view import listing, side_by_side
from harness.ui.sizing_view import card, spoken
from harness.ui.work import Busy, Work
from loadprofiles.profile import builtin_names, load_profile

#: deployments side by side
MOST_SIDE_BY_SIDE = 4
#: seconds between two looks at a run that goes on
LOOK_S = 1.0
#: watchers of runs at once
MOST_WATCHERS = 32
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Pages:
    """The handlers, and what they share."""

    def __init__(self, results: Path, guard: Guard) -> None:
        self._guard = guard
        self._results = Results(results)
        self._ramps = Ramps(self._results)
        self._work: Work[bytes] = Work()
        self._watchers: set[asyncio.Task[Any]] = set()
        # read once: a name in a request never becomes a path
        folder = files("harness.ui").joinpath("static")
        self._static = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self._catalog: bytes | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._page),
            web.get("/static/{name}", self._file),
            web.get("/look.css", self._look),
            web.get(LOGIN, self._login_page),
            web.post(LOGIN, self._login),
            web.get("/api/catalog", self._get_catalog),
            web.post("/api/size", self._size),
            web.post("/api/curves", self._curves),
            web.post("/api/launch", self._launch),
            web.get("/api/runs", self._list_runs),
            web.post("/api/compare", self._compare),
            web.post("/api/ramps/check", self._check),
            web.post("/api/ramps/start", self._start),
            web.get("/api/runs/{name:.+}/report.html", self._report),
            web.get("/api/runs/{name:.+}/events", self._events),
            web.post("/api/runs/{name:.+}/stop", self._stop),
            web.get("/api/runs/{name:.+}", self._show_run),
        ]

    async def close(self, app: web.Application) -> None:
        for watcher in list(self._watchers):
            watcher.cancel()
        await self._ramps.close()
        self._work.close()

    # ------------------------------------------------------------------ files

    async def _page(self, request: web.Request) -> web.Response:
        return self._static_file("index.html")

    async def _file(self, request: web.Request) -> web.Response:
        return self._static_file(request.match_info["name"])

    def _static_file(self, name: str) -> web.Response:
        if name not in self._static:
            raise web.HTTPNotFound(reason="no such file")
        return web.Response(body=self._static[name], content_type=_TYPES[Path(name).suffix], charset="utf-8")

    async def _look(self, request: web.Request) -> web.Response:
        return web.Response(text=look(), content_type="text/css")

    async def _login_page(self, request: web.Request) -> web.Response:
        return self._static_file("login.html")

    async def _login(self, request: web.Request) -> web.Response:
        form = await request.post()
        if not self._guard.is_token(str(form.get("token", ""))):
            return problem(401, "that is not the token", "`vllm-harness ui` was started with it")
        response = see_other("/")
        response.set_cookie(COOKIE, self._guard.cookie(), httponly=True, samesite="Strict", secure=request.secure)
        return response

    # ------------------------------------------------------------------ sizing

    async def _get_catalog(self, request: web.Request) -> web.Response:
        if self._catalog is None:
            profiles = [{"name": name, "about": load_profile(name).about} for name in builtin_names()]
            self._catalog = orjson.dumps({**sizing.catalog(), "profiles": profiles})
        return _json(self._catalog)

    async def _size(self, request: web.Request) -> web.Response:
        content = await _content(request)

        def call() -> bytes:
            sized = sizing.size_up(sizing.asked_of(content), self._results.calibration)
            return orjson.dumps({"html": card(sized, 1), "spoken": spoken([sized]), "plan": sized.document})

        return await self._worked("size", content, call)

    async def _curves(self, request: web.Request) -> web.Response:
        content = await _content(request)

        def call() -> bytes:
            asked = _several(content)
            names = ["predicted"] if len(asked) == 1 else [f"deployment {i}" for i in range(1, len(asked) + 1)]
            charts = [draw(chart) for chart in sizing.curves(asked, names, self._results.calibration)]
            return orjson.dumps({"html": element("div", charts, class_="charts") if charts else ""})

        return await self._worked("curves", content, call)

    async def _launch(self, request: web.Request) -> web.Response:
        content = await _content(request)

        def call() -> bytes:
            return orjson.dumps(sizing.launch_files(sizing.asked_of(content)))

        return await self._worked("launch", content, call)

    async def _worked(self, what: str, content: Any, call: Callable[[], bytes]) -> web.Response:
        key = what.encode() + orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
        try:
            return _json(await self._work.do(key, call))
        except Busy:
            response = problem(503, "too many ask at once", "ask again in a second")
            response.headers["Retry-After"] = "1"
            return response

    # ------------------------------------------------------------------ runs

    async def _list_runs(self, request: web.Request) -> web.Response:
        entries = await asyncio.to_thread(self._results.entries)
        ours = self._ramps.going()
        return _json(
            orjson.dumps({"runs": [asdict(entry) for entry in entries], "ours": ours, "html": listing(entries)})
        )

    async def _show_run(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        corrected_by = request.query.get("calibration")

        def call() -> bytes:
            run = self._results.run(name)
            found = calibration_of(run.folder, None if corrected_by is None else self._results.folder(corrected_by))
            return orjson.dumps({"html": report_body(run, compared(run), found)})

        return _json(await asyncio.to_thread(call))

    async def _report(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]

        def call() -> str:
            run = self._results.run(name)
            return report_html(run, compared(run), calibration_of(run.folder, None))

        response = web.Response(text=await asyncio.to_thread(call), content_type="text/html")
        # the file has a policy of its own, by the hash of its one style
        response.headers["Content-Security-Policy"] = (
            "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        return response

    async def _compare(self, request: web.Request) -> web.Response:
        content = await _content(request)
        if not isinstance(content, dict) or not all(isinstance(content.get(key), str) for key in ("a", "b")):
            raise InputError("expected a and b, names of two runs")

        def call() -> bytes:
            a, b = (self._results.run(content[key]) for key in ("a", "b"))
            try:
                found, why = compare_runs(a.folder, b.folder), ""
            except InputError as error:
                found, why = None, error.message
            return orjson.dumps({"html": side_by_side(a, b, found, why)})

        return _json(await asyncio.to_thread(call))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        follower = Follower(self._results.folder(request.match_info["name"]))
        if len(self._watchers) >= MOST_WATCHERS:
            return problem(503, f"{MOST_WATCHERS} already watch", "close another page")
        seen = await asyncio.to_thread(follower.look)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        task = asyncio.current_task()
        assert task is not None
        self._watchers.add(task)
        try:
            await response.prepare(request)
            while True:
                data = {"html": view(seen), "going": seen.going}
                await response.write(b"data: " + orjson.dumps(data) + b"\n\n")
                if not seen.going:
                    break
                await asyncio.sleep(LOOK_S)
                seen = await asyncio.to_thread(follower.look)
        except (ConnectionResetError, asyncio.CancelledError):
            # the reader has gone, or the server ends: nothing is left to say to it
            return response
        finally:
            self._watchers.discard(task)
        return response

    # ------------------------------------------------------------------ ramps

    async def _check(self, request: web.Request) -> web.Response:
        ticket = await self._ramps.ask(wanted_of(await _content(request)))
        return _json(orjson.dumps(asdict(ticket)))

    async def _start(self, request: web.Request) -> web.Response:
        content = await _content(request)
        if not isinstance(content, dict) or not isinstance(content.get("ticket"), str):
            raise InputError("expected ticket, as the check gave it")
        return _json(orjson.dumps({"run": await self._ramps.start(content["ticket"])}))

    async def _stop(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not self._ramps.stop(name):
            raise UsageError(
                f"{name[:200]!r} is no ramp that this page started, or it has ended",
                "a ramp of the command line is stopped where it runs, with Ctrl-C",
            )
        return _json(orjson.dumps({"stopping": name}))


def _json(document: bytes) -> web.Response:
    return web.Response(body=document, content_type="application/json")


async def _content(request: web.Request) -> Any:
    """The JSON of a request.

    Raises:
        InputError: it is none.
    """
    raw = await request.read()
    try:
        return json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InputError("the request is no JSON", "expected an object") from error


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _several(content: Any) -> list[sizing.Asked]:
    if not isinstance(content, list) or not 1 <= len(content) <= MOST_SIDE_BY_SIDE:
        raise InputError(f"expected a list of 1 to {MOST_SIDE_BY_SIDE} deployments")
    return [sizing.asked_of(item) for item in content]


def make_app(results: Path, host: str = "127.0.0.1", token: str | None = None) -> web.Application:
    """The application.

    Args:
        results: the folder of runs.
        host: the address that will be served.
        token: needed with every request where set.
    """
    guard = Guard(host, token)
    app = web.Application(middlewares=[middleware(guard)], client_max_size=MOST_BODY)
    pages = Pages(results, guard)
    app.add_routes(pages.routes())
    app.on_shutdown.append(pages.close)
    return app
