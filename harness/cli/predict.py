"""``vllm-harness predict``: what users get under loads nobody ran, from a calibration or from a plan alone."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, HelpFormatter
from typing import TYPE_CHECKING, Any

from calibration.errors import InputError
from harness.cli import calibrated, plan
from harness.cli.plan_limits import parse_slo
from harness.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from calibration.deployment import Deployment
    from calibration.limits import Limits
    from calibration.predict import Load, Overloaded, Prediction, Predictor
    from calibration.queueing import Shape
    from loadprofiles.profile import Profile

#: a request where none is asked for, as a ramp's
_PROMPT_TOKENS, _OUTPUT_TOKENS = 256, 128
#: levels where none are asked for: powers of two to beyond the first hard limit, not more than this
_MOST_LEVELS = 12


def options() -> ArgumentParser:
    """The options of ``predict``; the deployment's are those of ``plan``."""
    parser = ArgumentParser(
        prog="vllm-harness predict",
        allow_abbrev=False,
        description="Throughput, TTFT and TPOT for users, rates or profiles that were not run, with 90 %% intervals.",
        formatter_class=lambda prog: HelpFormatter(prog, max_help_position=44, width=118),
    )
    calibrated.add_options(parser)
    plan.add_served(parser)
    plan.add_engine(parser)
    add = parser.add_argument_group("the load").add_argument
    add("--users", metavar="N,N,...", help="concurrent users (powers of two to beyond the limit)")
    add("--request-rate", metavar="R,R,...", help="Poisson arrivals a second instead")
    add("--prompt-tokens", type=int, metavar="TOKENS", help=f"mean prompt ({_PROMPT_TOKENS})")
    add("--output-tokens", type=int, metavar="TOKENS", help=f"mean answer ({_OUTPUT_TOKENS})")
    add("--think", metavar="TIME", default="0s", help="pause of a user between its requests (none)")
    add("--profile", metavar="NAME|FILE", help="the stages of a load profile instead")
    add("--slo", metavar="ttft:MS,tpot:MS", help="limits on mean latencies: how many users fit")
    add = parser.add_argument_group("the virtual clock").add_argument
    add("--simulate", action="store_true", help="play the load second by second: the summary that a ramp would give")
    add("--duration", metavar="TIME", help="of each level with --simulate (30s)")
    add("--requests", type=int, metavar="N", help="of each level with --simulate; whichever ends first")
    add("--noise", type=float, metavar="SD", default=0.0, help="of the logarithm of a step's time, with --simulate (0)")
    add("--seed", type=int, metavar="N", default=0, help="of arrivals, lengths and noise (0)")
    add("--out", metavar="DIR", help="with --simulate: a run's folder there, as a ramp writes it")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON document on standard output and nothing else")
    add("--quiet", action="store_true", help="errors only")
    return parser


def run(argv: list[str]) -> None:
    """Parse, predict or simulate, print.

    Raises:
        UsageError, InputError: options that cannot be, a file that does not read, a calibration of another deployment.
    """
    asked = options().parse_args(argv)
    _check(asked)
    known = calibrated.read(asked, None if calibrated.speaks_alone(asked) else plan.one_deployment(asked))
    deployment = plan.one_deployment(asked) if known is None else known.deployment
    predictor = _predictor(deployment, known, asked.seed)
    if asked.simulate:
        from harness.cli.predict_simulated import simulate

        simulate(predictor, _profile(asked, predictor), asked, known)
        return
    loads, shape = _loads(asked, predictor)
    found = [predictor.predict(load) for load in loads]
    slo = parse_slo(asked.slo)
    limits = predictor.limits(shape, slo)
    if asked.json:
        _print_json(document(predictor, shape, found, limits, asked.slo), known)
    elif not asked.quiet:
        _show(predictor, shape, found, limits, known, asked.slo)


def _check(asked: Namespace) -> None:
    alone = {"--duration": asked.duration, "--requests": asked.requests, "--out": asked.out}
    for option, value in alone.items():
        if value is not None and not asked.simulate:
            raise UsageError(f"{option} is given without --simulate", "without it a steady state is predicted")
    if asked.noise and not asked.simulate:
        raise UsageError("--noise is given without --simulate", "without it the mean step is what counts")
    if asked.users is not None and asked.request_rate is not None:
        raise UsageError("--users and --request-rate are both given, expected one of them")
    if asked.profile is not None and (asked.users is not None or asked.request_rate is not None):
        raise UsageError(
            "--profile and --users or --request-rate both say what the levels are", "leave one of them out"
        )
    if not 0 <= asked.noise < 1:
        raise UsageError(f"--noise: expected a standard deviation from 0 to below 1, not {asked.noise:g}")
    if asked.seed < 0:
        raise UsageError(f"--seed: expected 0 or more, not {asked.seed}")


def _predictor(deployment: Deployment, known: calibrated.Known | None, seed: int) -> Predictor:
    from calibration.memory import plan_memory
    from calibration.predict import Predictor, measured_loads
    from calibration.priors import prior_factors
    from calibration.serving import serving

    memory = plan_memory(deployment)
    if not memory.fits:
        raise InputError(f"vLLM would not start: {memory.reason}", "`vllm-harness plan` shows what would fit")
    served = serving(deployment)
    if known is None:
        return Predictor(served, prior_factors(deployment, served.physics), (), seed)
    used = [] if known.transferred else [(s.observation.users, s.observation.shape) for s in known.calibration.used]
    return Predictor(served, known.factors, measured_loads(used), seed)


# --- the load --------------------------------------------------------------------------------------------------------


def _loads(asked: Namespace, predictor: Predictor) -> tuple[list[Load], Shape]:
    """The loads, and the shape that limits are of: the first stage's of a profile."""
    from calibration.predict import Load

    if asked.profile is not None:
        from harness.simulated import load_of_stage, refuse, shared_prefix_of

        profile = _profile(asked, predictor)
        refuse(profile)
        if shared_prefix_of(profile) is not None:
            raise UsageError(
                f"{profile.name}: shared prefixes are found in the cache or not as requests come", "give --simulate"
            )
        loads = [load_of_stage(stage) for stage in profile.stages]
        return loads, loads[0].shape
    shape = _shape(asked)
    if asked.request_rate is not None:
        return [Load(shape=shape, request_rate=r) for r in _numbers("--request-rate", asked.request_rate)], shape
    users = [int(n) for n in _numbers("--users", asked.users, whole=True)] if asked.users else _levels(predictor, shape)
    return [Load(shape=shape, users=n) for n in users], shape


def _shape(asked: Namespace) -> Shape:
    from calibration.queueing import Shape
    from loadprofiles.profile import seconds

    try:
        think_s = seconds(asked.think)
    except ValueError as error:
        raise UsageError(f"--think: {error}") from error
    return Shape(
        prompt_tokens=_PROMPT_TOKENS if asked.prompt_tokens is None else asked.prompt_tokens,
        output_tokens=_OUTPUT_TOKENS if asked.output_tokens is None else asked.output_tokens,
        think_s=think_s,
    )


def _levels(predictor: Predictor, shape: Shape) -> list[int]:
    """1, 2, 4 ... to the first level beyond what the pool and ``max_num_seqs`` hold."""
    wall = predictor.served.wall(shape)
    deployment = predictor.served.deployment
    most = float(deployment.max_num_seqs * deployment.dp)
    most = most if wall is None else min(most, wall[1])
    levels = [1]
    while levels[-1] <= most and len(levels) < _MOST_LEVELS:
        levels.append(levels[-1] * 2)
    return levels


def _numbers(option: str, text: str, *, whole: bool = False) -> list[float]:
    try:
        values = [float(int(part)) if whole else float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        what = "whole numbers above 0" if whole else "numbers above 0"
        raise UsageError(f"{option}: expected {what}, separated by commas, not {text!r}", f"for example {option} 1,2,4")
    return values


def _profile(asked: Namespace, predictor: Predictor) -> Profile:
    """The profile, or levels given on the line, resolved for this deployment."""
    from loadprofiles.profile import ProfileError, load_profile, parse_profile, resolve

    pool = predictor.served.pool
    deployment = predictor.served.deployment
    tokens = None if pool is None else pool.usable_blocks * pool.block_size * deployment.dp
    try:
        profile = parse_profile(_written(asked, predictor), "command line") if asked.profile is None else load_profile(
            asked.profile
        )  # fmt: skip
        return resolve(profile, max_model_len=deployment.max_model_len, pool_tokens=tokens, seed=asked.seed)
    except ProfileError as error:
        raise UsageError(error.message, error.hint) from error


def _written(asked: Namespace, predictor: Predictor) -> dict[str, Any]:
    """Levels as a profile writes them."""
    shape = _shape(asked)
    stage: dict[str, Any] = {"think": shape.think_s}
    if asked.requests is not None:
        stage["requests"] = asked.requests
    if asked.duration is not None or asked.requests is None:
        stage["duration"] = asked.duration or "30s"
    if asked.request_rate is not None:
        stage["request_rate"] = _numbers("--request-rate", asked.request_rate)
    elif asked.users is not None:
        stage["users"] = [int(n) for n in _numbers("--users", asked.users, whole=True)]
    else:
        stage["users"] = _levels(predictor, shape)
    workload = {"prompt_tokens": int(shape.prompt_tokens), "output_tokens": int(shape.output_tokens)}
    return {"name": "levels", "workload": workload, "stages": [stage]}


# --- what is shown ---------------------------------------------------------------------------------------------------


def document(
    predictor: Predictor,
    shape: Shape,
    found: Sequence[Prediction | Overloaded],
    limits: Limits,
    slo: str | None,
) -> dict[str, Any]:
    """The document of ``predict --json``: ``predictions``, one a load, and ``users``, the limits of the shape."""
    from harness.cli.plan_limits import estimate_json, users_json
    from harness.cli.predict_view import prediction_json

    return {
        "deployment": {"model": predictor.served.deployment.architecture.name, **_names(predictor.served.deployment)},
        "prompt_tokens": shape.prompt_tokens,
        "output_tokens": shape.output_tokens,
        "predictions": [prediction_json(one) for one in found],
        "users": users_json(limits),
        "user_limits": {name: estimate_json(getattr(limits, name)) for name in ("tpot", "ttft", "knee")},
        "slo": slo,
        "users_that_fit": estimate_json(predictor.slo_users(limits)),
        "why": _why(predictor, shape, limits),
    }


def _names(deployment: Deployment) -> dict[str, Any]:
    return {
        "gpu": None if deployment.gpu is None else deployment.gpu.name,
        **{name: getattr(deployment, name) for name in ("tp", "pp", "dp", "vllm_version", "max_model_len")},
        "weights": deployment.weights.name,
        "kv": deployment.kv.name,
    }


def _why(predictor: Predictor, shape: Shape, limits: Limits) -> str:
    from calibration.limits import explain

    return explain(predictor.served, shape, limits)


def _print_json(content: dict[str, Any], known: calibrated.Known | None) -> None:
    import orjson

    from harness.cli.display import print_document

    whole = {**content, **(calibrated.document(known) or {"calibration": None})}
    print_document(orjson.dumps(whole, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _show(
    predictor: Predictor,
    shape: Shape,
    found: Sequence[Prediction | Overloaded],
    limits: Limits,
    known: calibrated.Known | None,
    slo: str | None,
) -> None:
    from harness.cli.display import Display
    from harness.cli.predict_view import limits_table, loads_table, notes, slo_sentence

    out = Display(width=None if sys.stdout.isatty() else 150, highlight=False)
    deployment = predictor.served.deployment
    where = deployment.gpu.title if deployment.gpu is not None else deployment.device
    out.print(f"{deployment.architecture.name} on {deployment.gpus} x {where}, vLLM {deployment.vllm_version}")
    out.print("", loads_table(found), "", sep="\n", markup=False)
    out.print(limits_table(limits), "", sep="\n", markup=False)
    out.print(_why(predictor, shape, limits), markup=False, soft_wrap=True)
    if slo is not None:
        out.print(slo_sentence(predictor.slo_users(limits), slo), markup=False, soft_wrap=True)
    for note in notes(found):
        out.print(f"note: {note}", markup=False, soft_wrap=True)
    if known is None:
        out.print("note: from the plan alone, nothing was measured: calibrate narrows this", markup=False)
    else:
        out.print(f"note: {calibrated.sentence(known)}", markup=False, soft_wrap=True)
