"""What is running there: asked of /v1/models, /health, /version, /metrics, /tokenize and /server_info.

Works against any vLLM since 0.4, with and without an API key, with and without /metrics, and against other
OpenAI-compatible servers, of which it learns less: what is missing is named, and what that costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict

from harness.errors import NotVllm, Refused, ServerError
from harness.http_get import Answer, Getter, base_url_of
from harness.observe.pool import Pool, pool_of
from harness.observe.snapshot import NoSuchModel, Snapshot, read
from harness.wire.prom import BadMetrics

#: /server_info gathers the server's environment at its first call, which takes seconds
SERVER_INFO_TIMEOUT_S = 15.0


class Missing(BaseModel):
    """Something the server does not show, and what that costs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: str
    why_it_matters: str


class ProbeResult(BaseModel):
    """The deployment as the server shows it; None is what it does not show. ``to_dict`` is run.json's ``deployment``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str
    #: the name to send in requests
    model: str
    #: the ``model_name`` its metrics carry: the first served name of the base model, also for aliases and LoRA adapters
    metrics_model: str | None = None
    #: what the server loaded (a path or a hub name), where it says
    model_root: str | None = None
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    vllm_version: str | None = None
    is_vllm: bool = False
    version_family: str | None = None
    engines: int | None = None
    #: of one engine
    pool: Pool | None = None
    #: of all engines together, the null blocks left out
    usable_pool_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    speculative_decoding: bool | None = None
    #: /tokenize answers
    tokenize: bool = False
    #: where metrics can be read; None where they cannot
    metrics_url: str | None = None
    missing: tuple[Missing, ...] = ()
    #: what to mind before measuring
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProbeResult:
        """A probe back from run.json. Raises pydantic.ValidationError for an unknown, missing or mistyped key."""
        return cls.model_validate(data)


class ModelCard(BaseModel):
    """One entry of /v1/models, as far as it is read."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    root: str | None = None
    #: set for a LoRA adapter: the model it adapts
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None


async def probe(
    getter: Getter, base_url: str, *, model: str | None = None, metrics_url: str | None = None
) -> ProbeResult:
    """Ask a server what it is.

    Args:
        base_url: with or without a trailing slash or ``/v1``.
        model: the served model; needed where there are several.
        metrics_url: where /metrics is, if not below ``base_url``.

    Raises:
        UsageError: a URL that is none.
        Unreachable: no connection, or no answer in time.
        Refused: no key or a wrong one, an unknown model, several models and none named, an engine that is dead.
        NotVllm: not an OpenAI-compatible server.
    """
    base = base_url_of(base_url)
    target = metrics_address(metrics_url, "--metrics-url") if metrics_url else metrics_address(base)
    cards = await _cards(getter, base)
    card = choose_model(cards, model)
    max_model_len = card.max_model_len or _base_of(cards, card).max_model_len
    await _refuse_dead_engine(getter, base)
    found = _Findings()
    version = await _version(getter, base, found)
    metrics_model = metrics_name(cards, card)
    snapshot = await _metrics(getter, target, metrics_model, found)
    pool = _pool(snapshot, max_model_len, found)
    limits = await _scheduler_limits(getter, base, found)
    tokenize = await _tokenizes(getter, base, card.id, found)
    if max_model_len is None:
        found.lacks(
            "max_model_len in /v1/models", "prompts that are too long are seen only when the server refuses them"
        )
    if snapshot is not None:
        found.notes.extend(_notes(snapshot))
    usable = pool.usable_tokens if pool else None
    return ProbeResult(
        base_url=base,
        model=card.id,
        metrics_model=snapshot.model if snapshot else metrics_model,
        model_root=card.root,
        models=tuple(c.id for c in cards),
        max_model_len=max_model_len,
        vllm_version=version,
        is_vllm=snapshot is not None or card.owned_by == "vllm",
        version_family=snapshot.version_family if snapshot else None,
        engines=snapshot.engines if snapshot else None,
        pool=pool,
        usable_pool_tokens=usable * snapshot.engines if usable is not None and snapshot else None,
        max_num_seqs=limits.get("max_num_seqs"),
        max_num_batched_tokens=limits.get("max_num_batched_tokens"),
        speculative_decoding=None if snapshot is None else snapshot.spec_decode_drafts is not None,
        tokenize=tokenize,
        metrics_url=target if snapshot else None,
        missing=tuple(found.missing),
        notes=tuple(found.notes),
    )


class _Findings:
    def __init__(self) -> None:
        self.missing: list[Missing] = []
        self.notes: list[str] = []

    def lacks(self, what: str, why_it_matters: str) -> None:
        self.missing.append(Missing(what=what, why_it_matters=why_it_matters))


# --- /v1/models ----------------------------------------------------------------------------------------------------


async def _cards(getter: Getter, base: str) -> list[ModelCard]:
    url = f"{base}/v1/models"
    answer = await getter.get(url)
    if answer.status in (401, 403):
        raise _key_refused(answer, getter.has_key)
    if answer.status == 404:
        raise NotVllm(f"{url} does not exist (HTTP 404)", "is --base-url the root of an OpenAI-compatible server?")
    if not answer.ok:
        raise Refused(f"{url} answers HTTP {answer.status}", "is the server still loading its model?")
    return read_cards(answer.body, url)


def read_cards(body: bytes, url: str) -> list[ModelCard]:
    """The cards of a /v1/models answer. Raises NotVllm where it is none."""
    try:
        cards = [ModelCard.model_validate(card) for card in orjson.loads(body)["data"]]
    except (ValueError, KeyError, TypeError) as error:  # pydantic's and orjson's errors are ValueErrors
        shown = " ".join(body[:120].decode("utf-8", "replace").split())
        raise NotVllm(
            f"{url} answers with no list of models: {shown!r}", "is there another service behind it?"
        ) from error
    if not cards:
        raise Refused(f"{url} lists no model", "the server has loaded none")
    return cards


def _key_refused(answer: Answer, has_key: bool) -> Refused:
    if has_key:
        return Refused(f"the server refuses the API key (HTTP {answer.status})", "check --api-key or OPENAI_API_KEY")
    return Refused(f"the server wants an API key (HTTP {answer.status})", "set OPENAI_API_KEY, or give --api-key")


def choose_model(cards: Sequence[ModelCard], asked: str | None) -> ModelCard:
    """The asked card; else the only base model, whose aliases count as one and whose LoRA adapters do not count.

    Raises:
        Refused: not there, or several and none asked; names the models there are.
    """
    ids = ", ".join(card.id for card in cards)
    if asked is not None:
        if (card := next((c for c in cards if c.id == asked), None)) is None:
            raise Refused(f"no model {asked!r} there", f"there are: {ids}")
        return card
    base = [card for card in cards if card.parent is None] or list(cards)
    if len({card.root or card.id for card in base}) > 1:
        raise Refused("several models are served and none was named", f"--model one of: {ids}")
    return base[0]


def metrics_name(cards: Sequence[ModelCard], card: ModelCard) -> str:
    """The ``model_name`` in the metrics of a card: the first served name of its base model (vllm 0.32.0, v1/metrics/
    loggers.py: served_model_name's first, LoRA requests included)."""
    base = _base_of(cards, card)
    return next((c.id for c in cards if c.parent is None and c.root is not None and c.root == base.root), base.id)


def _base_of(cards: Sequence[ModelCard], card: ModelCard) -> ModelCard:
    """The model a LoRA adapter's card belongs to (its own card has no context length); any other card itself."""
    return next((c for c in cards if c.id == card.parent), card)


async def _refuse_dead_engine(getter: Getter, base: str) -> None:
    answer = await _try(getter, f"{base}/health")
    if answer is not None and answer.status == 503:
        raise Refused("the server says its engine is dead (/health answers HTTP 503)", "look into its log, restart it")


# --- what may be missing ---------------------------------------------------------------------------------------------


async def _version(getter: Getter, base: str, found: _Findings) -> str | None:
    answer = await _try(getter, f"{base}/version")
    version = _json(answer).get("version")
    if isinstance(version, str):
        return version
    found.lacks("the version (/version)", "defaults that changed between vLLM releases cannot be told apart")
    return None


def metrics_address(url: str, option: str = "--base-url") -> str:
    """``/metrics`` below a server's root; an address that already ends so is taken as it is."""
    root = base_url_of(url, option)
    return root if root.endswith("/metrics") else f"{root}/metrics"


async def _metrics(getter: Getter, url: str, model: str, found: _Findings) -> Snapshot | None:
    try:
        answer = await getter.get(url)
        if answer.ok:
            return _read_metrics(answer.body, model, found)
        problem = f"HTTP {answer.status}"
        if answer.status in (401, 403):
            problem += ", guarded: a proxy lets only others read them"
    except ServerError as error:
        problem = error.message
    except BadMetrics as error:
        problem = f"{error.message}; {error.hint}" if error.hint else error.message
    found.lacks(
        f"the server's metrics ({url}: {problem})",
        "waiting, preemptions, KV usage and the pool stay unknown: what limits the server can only be told from outside"
        " (--metrics-url names another address)",
    )
    return None


def _read_metrics(body: bytes, model: str, found: _Findings) -> Snapshot:
    try:
        return read(body, model)
    except NoSuchModel:
        # behind a gateway that renames models the metrics carry the engine's own name; with one there is no doubt
        snapshot = read(body)
        found.notes.append(f"the metrics are of model {snapshot.model!r}, not {model!r}: taken as the same server")
        return snapshot


def _pool(snapshot: Snapshot | None, max_model_len: int | None, found: _Findings) -> Pool | None:
    if snapshot is None:
        return None
    pool = pool_of(snapshot, max_model_len)
    if pool is None or pool.num_blocks is None:
        found.lacks(
            "the size of the KV pool (vllm:cache_config_info)",
            "the wall is predicted from model and GPU instead of being read from the server",
        )
    if snapshot.waiting_by_reason is None:
        found.lacks(
            "waiting by reason (vLLM 0.32 has it)",
            "waiting for capacity is not told from waiting for another cause; preemptions alone show the wall",
        )
    return pool


async def _scheduler_limits(getter: Getter, base: str, found: _Findings) -> dict[str, int]:
    """max_num_seqs and max_num_batched_tokens, which vLLM shows only in its developer mode."""
    answer = await _try(getter, f"{base}/server_info?config_format=json", SERVER_INFO_TIMEOUT_S)
    config = _json(answer).get("vllm_config")
    scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
    wanted = ("max_num_seqs", "max_num_batched_tokens")
    limits = {k: scheduler[k] for k in wanted if isinstance(scheduler, dict) and isinstance(scheduler.get(k), int)}
    if "max_num_seqs" not in limits:
        found.lacks(
            "max_num_seqs (shown only by /server_info, with VLLM_SERVER_DEV_MODE=1)",
            "the limit on running requests is taken from vLLM's defaults, or must be given",
        )
    return limits


async def _tokenizes(getter: Getter, base: str, model: str, found: _Findings) -> bool:
    try:
        answer = await getter.post_json(f"{base}/tokenize", {"model": model, "prompt": "one two three"})
        count = _json(answer).get("count")
    except ServerError:
        count = None
    if isinstance(count, int) and count > 0:
        return True
    found.lacks("/tokenize", "the length of chat prompts is learned from the usage of the first answers")
    return False


def _notes(snapshot: Snapshot) -> list[str]:
    notes = []
    if snapshot.asleep:
        notes.append("an engine sleeps (engine_sleep_state): wake it before measuring")
    if snapshot.running or snapshot.waiting:
        notes.append(
            f"{snapshot.running} requests run and {snapshot.waiting} wait by the gauges: other clients' traffic,"
            " or gauges left over from requests that were broken off"
        )
    config = snapshot.cache_config
    if config is not None and config.enable_prefix_caching:
        notes.append("prefix caching is on: prompts that share a beginning are measured faster than new ones")
    if config is not None and config.unread:
        notes.append(f"cache_config_info has values of an unknown kind: {', '.join(config.unread)}")
    return notes


async def _try(getter: Getter, url: str, timeout_s: float | None = None) -> Answer | None:
    """An answer if there is one: for questions whose missing answer is itself a finding."""
    try:
        return await getter.get(url, timeout_s=timeout_s)
    except ServerError:
        return None


def _json(answer: Answer | None) -> dict[str, Any]:
    """The JSON object of a good answer; empty for anything else."""
    if answer is None or not answer.ok:
        return {}
    try:
        document = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}
