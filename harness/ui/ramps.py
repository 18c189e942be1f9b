"""Ramps that the page starts: each is `vllm-harness ramp` in a process of its own, so its files are those of the command.

A start takes two steps. The first probes the server and says what would be sent: to which host, and how many users at the
most; it gives a ticket. The second needs that ticket, once, and nothing else may be changed by then.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calibration.errors import InputError
from harness.clock import wall_time
from harness.errors import UsageError
from harness.http_get import Getter
from harness.observe.probe import probe
from harness.ui.runs import Results
from loadprofiles.profile import Profile, builtin_names, load_profile, parse_profile, resolve
from loadprofiles.stage import RateRamp

#: tickets kept; an older one is forgotten
MOST_TICKETS = 50
#: ramps that may go on at once
MOST_RAMPS = 4
#: seconds until a ramp that was started must have made its folder
BEGIN_S = 60.0
END_S = 20.0


class Wanted(BaseModel):
    """A ramp as the page asks for it: a shipped profile, or levels of users of one length."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    base_url: Annotated[str, Field(min_length=1, max_length=500)]
    model: Annotated[str, Field(max_length=300)] | None = None
    profile: Annotated[str, Field(max_length=80)] | None = None
    users: Annotated[list[Annotated[int, Field(ge=1, le=100_000)]], Field(min_length=1, max_length=100)] | None = None
    duration_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 256
    output_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 128
    api_key: Annotated[str, Field(max_length=1000)] | None = None


def wanted_of(content: object) -> Wanted:
    """What the page asks.

    Raises:
        InputError: a key that is unknown, missing or holds something else; names it.
    """
    try:
        wanted = Wanted.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the request"
        shown = "***" if key == "api_key" else f"{first['input']!r:.80}"
        raise InputError(f"{key}: {first['msg'].lower()}, not {shown}") from error
    if (wanted.profile is None) == (wanted.users is None):
        raise InputError("expected either profile, a name, or users, a list of levels")
    if wanted.profile is not None and wanted.profile not in builtin_names():
        raise InputError(f"profile = {wanted.profile!r}, expected one of {', '.join(builtin_names())}")
    if urlsplit(wanted.base_url).scheme not in ("http", "https"):
        raise InputError(f"base_url = {wanted.base_url!r:.80}, expected http://HOST:PORT")
    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a confirmation names. ``most_users``: streams in flight at the most; None: a rate without a cap."""

    id: str
    host: str
    model: str
    most_users: int | None
    most_rate: float | None
    about_s: float | None
    stages: int


@dataclass
class Ramp:
    """A ramp in its process. ``said`` is what it wrote on stderr."""

    name: str
    process: asyncio.subprocess.Process
    said: bytearray = field(default_factory=bytearray)


class Ramps:
    """Starts ramps into a folder of runs, and stops them."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._tickets: dict[str, tuple[Ticket, Wanted]] = {}
        self._going: dict[str, Ramp] = {}
        self._readers: set[asyncio.Task[None]] = set()

    async def ask(self, wanted: Wanted) -> Ticket:
        """Probe the server, and say what a start would send. Nothing but GETs is sent.

        Raises:
            ServerError: it cannot be reached or used.
            ProfileError: the profile does not suit it.
        """
        async with Getter(api_key=wanted.api_key, key_url=wanted.base_url) as getter:
            probed = await probe(getter, wanted.base_url, model=wanted.model)
        profile = resolve(_profile(wanted), max_model_len=probed.max_model_len, pool_tokens=probed.usable_pool_tokens)
        most, rate, about_s = _greatest(profile)
        ticket = Ticket(
            id=secrets.token_urlsafe(16),
            host=urlsplit(probed.base_url).netloc.rsplit("@", 1)[-1],
            model=probed.model,
            most_users=most,
            most_rate=rate,
            about_s=about_s,
            stages=len(profile.stages),
        )
        self._tickets[ticket.id] = (ticket, wanted)
        while len(self._tickets) > MOST_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        return ticket

    async def start(self, ticket_id: str) -> str:
        """Start what a ticket names; the name of its run. A ticket is good once.

        Raises:
            UsageError: no such ticket, too many ramps at once, or the ramp ended before it began; says what it said.
        """
        ticket, wanted = self._tickets.pop(ticket_id, (None, None))
        if ticket is None or wanted is None:
            raise UsageError("this confirmation was used or is too old", "check the ramp again")
        self._forget_ended()
        if len(self._going) >= MOST_RAMPS:
            raise UsageError(f"{MOST_RAMPS} ramps go on already", "stop one of them")
        name = self._name(wanted.profile or "levels")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "harness.cli", *_command(wanted, self._results.root / name)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # no key on the command line, where every process list shows it
            env=_environment(wanted.api_key),
            start_new_session=True,
        )
        ramp = self._going[name] = Ramp(name, process)
        reader = asyncio.create_task(_listen(ramp))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        await self._begun(ramp)
        return name

    async def _begun(self, ramp: Ramp) -> None:
        for _ in range(int(BEGIN_S / 0.1)):
            if (self._results.root / ramp.name / "run.json").is_file():
                return
            if ramp.process.returncode is not None:
                break
            await asyncio.sleep(0.1)
        else:
            ramp.process.send_signal(signal.SIGINT)
        await ramp.process.wait()
        raise UsageError(ended_with(ramp), "nothing was sent to the server")

    def stop(self, name: str) -> bool:
        """Ask a ramp of ours to stop: once, and the streams in flight may end; twice cuts them. False: it is not ours, or
        has ended."""
        self._forget_ended()
        ramp = self._going.get(name)
        if ramp is None:
            return False
        ramp.process.send_signal(signal.SIGINT)
        return True

    def going(self) -> list[str]:
        """Names of the ramps that the page may stop."""
        self._forget_ended()
        return list(self._going)

    async def close(self) -> None:
        """End every ramp of ours in order: a load without who started it goes on against a server for nobody."""
        self._forget_ended()
        for ramp in self._going.values():
            ramp.process.send_signal(signal.SIGINT)
        for ramp in self._going.values():
            try:
                await asyncio.wait_for(ramp.process.wait(), END_S)
            except TimeoutError:
                ramp.process.send_signal(signal.SIGINT)
                await ramp.process.wait()
        await asyncio.gather(*self._readers)

    def _forget_ended(self) -> None:
        for name in [name for name, ramp in self._going.items() if ramp.process.returncode is not None]:
            del self._going[name]

    def _name(self, profile: str) -> str:
        base = f"{wall_time():%Y%m%d-%H%M%S}-{profile}"
        there = [base, *(f"{base}-{i}" for i in range(2, 100))]
        return next(name for name in there if not (self._results.root / name).exists())


async def _listen(ramp: Ramp) -> None:
    assert ramp.process.stderr is not None
    while chunk := await ramp.process.stderr.read(4096):
        ramp.said += chunk
        del ramp.said[:-4096]
    await ramp.process.wait()


def ended_with(ramp: Ramp) -> str:
    """Why a ramp ended at once, in its own words."""
    lines = [line for line in ramp.said.decode(errors="replace").splitlines() if line.startswith("vllm-harness: ")]
    why = lines[-1].removeprefix("vllm-harness: ") if lines else "it said nothing"
    return f"the ramp did not start (exit {ramp.process.returncode}): {why}"


def _profile(wanted: Wanted) -> Profile:
    if wanted.profile is not None:
        return load_profile(wanted.profile)
    lengths = {"prompt_tokens": wanted.prompt_tokens, "output_tokens": wanted.output_tokens}
    stage = {"users": wanted.users, "duration": wanted.duration_s}
    return parse_profile({"name": "levels", "workload": lengths, "stages": [stage]}, "the page")


def _command(wanted: Wanted, out: Path) -> list[str]:
    command = ["ramp", "--base-url", wanted.base_url, "--out", str(out), "--quiet"]
    if wanted.model is not None:
        command += ["--model", wanted.model]
    if wanted.profile is not None:
        return [*command, "--profile", wanted.profile]
    assert wanted.users is not None
    return [
        *command,
        *("--users", ",".join(map(str, wanted.users)), "--duration", f"{wanted.duration_s:g}s"),
        *("--prompt-tokens", str(wanted.prompt_tokens), "--output-tokens", str(wanted.output_tokens)),
    ]


def _environment(api_key: str | None) -> Mapping[str, str]:
    return dict(os.environ) if api_key is None else {**os.environ, "OPENAI_API_KEY": api_key}


def _greatest(profile: Profile) -> tuple[int | None, float | None, float | None]:
    """The most users of any stage or probe (None where a rate has no cap), the greatest rate, and seconds where all are
    known."""
    users: list[int | None] = [stage.users if isinstance(stage.users, int) else None for stage in profile.stages]
    rates = [_rate(stage.request_rate) for stage in profile.stages if stage.request_rate is not None]
    seconds = [stage.duration for stage in profile.stages]
    if profile.search is not None:
        most = (
            profile.search.most
            if profile.limits.max_users is None
            else min(profile.search.most, profile.limits.max_users)
        )
        return most, None, None
    known = [value for value in users if value is not None]
    total = sum(second for second in seconds if second is not None) * profile.repeat.times
    return (
        max(known) if len(known) == len(users) else None,
        max(rates, default=None),
        None if None in seconds else total,
    )


def _rate(rate: float | RateRamp) -> float:
    return max(rate.ramp.start, rate.ramp.end) if isinstance(rate, RateRamp) else rate
