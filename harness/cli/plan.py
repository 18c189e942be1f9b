"""``vllm-harness plan``: what a deployment needs and holds, before it exists."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, BooleanOptionalAction, HelpFormatter
from typing import TYPE_CHECKING, Any, NoReturn

from calibration.errors import InputError
from harness.cli import calibrated, plan_limits, plan_probe, plan_write
from harness.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from calibration.candidates import Build, Candidate, LoadOf
    from calibration.deployment import Deployment
    from calibration.limits import Sizing
    from calibration.plan import Load, Plan

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

#: common setups: name -> (model, gpu, tp, weights)
PRESETS: dict[str, tuple[str, str, int, str]] = {
    "llama-8b-1xl40s": ("llama-3.1-8b", "l40s", 1, "auto"),
    "llama-8b-1xh100": ("llama-3.1-8b", "h100-sxm", 1, "auto"),
    "llama-70b-2xh100": ("llama-3.3-70b", "h100-sxm", 2, "fp8"),
    "llama-70b-4xa100": ("llama-3.3-70b", "a100-80-sxm", 4, "auto"),
    "qwen-72b-4xh100": ("qwen2.5-72b", "h100-sxm", 4, "auto"),
    "mistral-24b-1xh100": ("mistral-small-24b", "h100-sxm", 1, "auto"),
    "gpt-oss-120b-2xh100": ("gpt-oss-120b", "h100-sxm", 2, "auto"),
    "deepseek-v3-8xh200": ("deepseek-v3", "h200-sxm", 8, "auto"),
}

#: options that are fields of the deployment by the same name
_PASSED_ON = (
    "device",
    "vllm_version",
    "expert_parallel",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "block_size",
    "num_gpu_blocks_override",
    "enable_prefix_caching",
    "hybrid_kv_cache_manager",
    "enforce_eager",
    "mamba_ssm_cache_dtype",
)


class _Parser(ArgumentParser):
    """Ends as every command does: one line, and what to do."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"`{self.prog} --help` lists the options")


def options() -> ArgumentParser:
    """The options of ``plan``; those of vLLM also under vLLM's names."""
    parser = _Parser(
        prog="vllm-harness plan",
        allow_abbrev=False,
        description="Analytical sizing: memory, limits on users, what binds.",
        # a stated width: asking the terminal for its own loads shutil, a tenth of the time a plan may take
        formatter_class=lambda prog: HelpFormatter(prog, max_help_position=44, width=118),
    )
    add_served(parser)
    add = parser.add_argument_group("the requests").add_argument
    add("--context", type=int, metavar="TOKENS", help="a request in flight, prompt and output, half of each")
    add("--prompt-tokens", type=int, metavar="TOKENS", help="mean prompt, with --output-tokens")
    add("--output-tokens", type=int, metavar="TOKENS", help="mean output, with --prompt-tokens")
    plan_limits.add_options(parser)
    add_engine(parser)
    plan_probe.add_options(parser)
    calibrated.add_options(parser)
    add = parser.add_argument_group("output").add_argument
    add("--explain", action="store_true", help="which physics decided each number, in plain words")
    add("--json", action="store_true", help="one JSON document on standard output and nothing else")
    plan_write.add_options(parser)
    return parser


def add_served(parser: ArgumentParser) -> None:
    """Model, GPU, parallelism and formats."""
    add = parser.add_argument_group("what is served").add_argument
    add("--model", metavar="NAME|CONFIG.json", help="a catalog name, a Hugging Face id, or a config.json")
    add("--gpu", metavar="NAME[,NAME]", help="the GPU, as `vllm-harness gpus` names it; several are compared")
    add("--preset", metavar="NAME", help=f"a common setup: {', '.join(PRESETS)}")
    add("--tp", "--tensor-parallel-size", metavar="N[,N]", help="tensor parallelism (1); several are compared")
    add("--pp", "--pipeline-parallel-size", metavar="N[,N]", help="pipeline parallelism (1); several are compared")
    add("--dp", "--data-parallel-size", type=int, metavar="N", help="replicas side by side (1)")
    add("--enable-expert-parallel", dest="expert_parallel", action="store_true", help="whole experts on each rank")
    add("--weights", metavar="FORMAT[,FORMAT]", help="bf16, fp16, fp8, int8, int4, mxfp4, nvfp4 (the checkpoint's)")
    add(
        "--kv",
        "--kv-cache-dtype",
        metavar="DTYPE[,DTYPE]",
        help="auto, bf16, fp8, fp8_e5m2, fp8_ds_mla ...",
    )
    add("--dtype", metavar="DTYPE", help="activations: auto, bfloat16, float16, float32 (auto)")


def add_engine(parser: ArgumentParser) -> None:
    """vLLM's own flags; a default in words is the version's and the device's."""
    add = parser.add_argument_group("vLLM's flags").add_argument
    add("--max-model-len", type=int, metavar="TOKENS", help="longest request (the model's context)")
    add("--gpu-memory-utilization", type=float, metavar="SHARE", help="share of the GPU vLLM may use")
    add("--max-num-seqs", type=int, metavar="N", help="sequences at once")
    add("--max-num-batched-tokens", type=int, metavar="TOKENS", help="tokens of one step")
    add("--block-size", type=int, metavar="TOKENS", help="tokens of a KV block")
    add("--num-gpu-blocks-override", type=int, metavar="BLOCKS", help="the pool given in blocks")
    add("--kv-cache-memory", metavar="BYTES", help="the pool of one GPU given, as 40GB or 1.5GiB: needs no GPU")
    add("--kv-cache-memory-bytes", metavar="BYTES", help="the same under vLLM's name; on CPU of any size")
    add("--device", metavar="cuda|cpu", help="whose defaults (cuda)")
    add("--vllm-version", metavar="VERSION", help="whose defaults (0.32.0)")
    add("--enable-prefix-caching", action=BooleanOptionalAction, default=None, help="on, as in vLLM")
    add(
        "--disable-hybrid-kv-cache-manager",
        dest="hybrid_kv_cache_manager",
        action="store_false",
        help="windows are allocated like full attention",
    )
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--mamba-ssm-cache-dtype", metavar="DTYPE", help="recurrent states: auto, float32, bfloat16, float16 (auto)")


def _size(text: str) -> int:
    """'1073741824', '40GB', '1.5GiB' -> bytes.

    Raises:
        InputError: no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?", text.strip().upper())
    if match is None:
        raise InputError(f"kv_cache_memory = {text!r}, expected bytes, or a size such as 40GB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def _pool_bytes(device: str | None, memory: str | None, memory_bytes: str | None) -> int | None:
    """Bytes of the pool of one GPU, under either name. On CPU ``--kv-cache-memory`` stands for VLLM_CPU_KVCACHE_SPACE,
    which takes whole GiB (``CpuPlatform.check_and_update_config``); vLLM's flag ``--kv-cache-memory-bytes`` takes any size.

    Raises:
        InputError: both names, no size, or a size that vLLM refuses.
    """
    if memory is not None and memory_bytes is not None:
        raise InputError("--kv-cache-memory and --kv-cache-memory-bytes, expected one of them")
    if memory is None:
        return None if memory_bytes is None else _size(memory_bytes)
    size = _size(memory)
    if device == "cpu" and size % (1 << 30):
        raise InputError(
            f"kv_cache_memory = {size}: on CPU this is VLLM_CPU_KVCACHE_SPACE, which takes whole GiB; vLLM refuses to start "
            f"with {size / (1 << 30):g}",
            "a pool that vLLM is given by its flag --kv-cache-memory-bytes may have any size: use that name here too",
        )
    return size


def run(argv: list[str]) -> None:
    """Parse, plan, print.

    Raises:
        InputError: a value that cannot be, or that vLLM refuses at start.
        Unsupported: a model, format or combination that is not known.
    """
    from calibration.plan import make_plan

    asked = options().parse_args(argv)
    server = plan_probe.ask(asked)
    if server is not None and asked.model is None:
        asked.model = plan_probe.model_of(server)
    if calibrated.speaks_alone(asked):
        _run_calibrated(asked)
        return
    model, gpus, tps, weights = _with_preset(asked.preset, asked.model, asked.gpu, asked.tp, asked.weights)
    build, load_of = _builders(asked, model)
    pps, kvs = plan_limits.several_numbers("pp", asked.pp), plan_limits.several(asked.kv, "auto")
    slo = plan_limits.parse_slo(asked.slo)
    corrected = None
    if asked.fit:
        from calibration.candidates import smallest_fit

        calibrated.refuse_several(asked)
        plan = smallest_fit(gpus[0], weights[0], kvs[0], build, load_of)
    elif len(gpus) * len(tps) * len(pps) * len(weights) * len(kvs) > 1:
        from calibration.candidates import choices, compare

        plan_write.refuse_several(asked)
        plan_probe.refuse_several(asked)
        calibrated.refuse_several(asked)
        _print_comparison(compare(choices(gpus, tps, pps, weights, kvs), build, load_of, slo), asked.json)
        return
    else:
        deployment = build(gpus[0], tps[0], pps[0], weights[0], kvs[0])
        if server is not None:
            corrected = plan_probe.correct(server, deployment)
            deployment = corrected.correction.deployment
        plan = make_plan(deployment, load_of(deployment))
    known = calibrated.read(asked, plan.deployment)
    sizing = plan_limits.sizing_of(plan, asked) if known is None else calibrated.sizing_of(plan, asked, known)
    _say(plan, sizing, asked, corrected, known)
    plan_write.write(asked, model, plan)


def _run_calibrated(asked: Namespace) -> None:
    """The plan of the deployment that a calibration is of."""
    from calibration.plan import make_plan, resolve_load

    if asked.write is not None or asked.fit:
        option = "--fit" if asked.fit else "--write"
        raise InputError(
            f"{option} with --calibration, expected the deployment's own options", "give --model and --gpu"
        )
    known = calibrated.read(asked, None)
    assert known is not None
    load = resolve_load(known.deployment.max_model_len, asked.context, asked.prompt_tokens, asked.output_tokens)
    plan = make_plan(known.deployment, load)
    _say(plan, calibrated.sizing_of(plan, asked, known), asked, None, known)


def _say(
    plan: Plan,
    sizing: Sizing | None,
    asked: Namespace,
    corrected: plan_probe.Corrected | None,
    known: calibrated.Known | None,
) -> None:
    if asked.json:
        _print_json({**_document(plan, sizing), **plan_probe.document(corrected), **calibrated.document(known)})
        return
    _print(plan, sizing, asked.explain, corrected)
    if known is not None:
        calibrated.show(known)


def one_deployment(asked: Namespace) -> Deployment:
    """The one deployment that the options of :func:`add_served` and :func:`add_engine` name.

    Raises:
        InputError: they name several, or a value that cannot be.
    """
    model, gpus, tps, weights = _with_preset(asked.preset, asked.model, asked.gpu, asked.tp, asked.weights)
    build, _ = _builders(asked, model)
    pps, kvs = plan_limits.several_numbers("pp", asked.pp), plan_limits.several(asked.kv, "auto")
    for name, values in (("gpu", gpus), ("tp", tps), ("pp", pps), ("weights", weights), ("kv", kvs)):
        if len(values) > 1:
            raise InputError(f"{name} = {', '.join(map(str, values))}, expected one of them", "`plan` compares several")
    return build(gpus[0], tps[0], pps[0], weights[0], kvs[0])


def _builders(asked: Namespace, model: str) -> tuple[Build, LoadOf]:
    """What makes a deployment of a choice, and a load for it."""
    from calibration.catalog import find_gpu, find_model
    from calibration.deployment import resolve_deployment
    from calibration.plan import resolve_load

    architecture = find_model(model)
    memory = _pool_bytes(asked.device, asked.kv_cache_memory, asked.kv_cache_memory_bytes)

    def build(gpu: str | None, tp: int, pp: int, weights: str, kv: str) -> Deployment:
        return resolve_deployment(
            architecture,
            gpu=None if gpu is None else find_gpu(gpu),
            tp=tp,
            pp=pp,
            weights=weights,
            kv=kv,
            kv_cache_memory_bytes=memory,
            dp=1 if asked.dp is None else asked.dp,
            **{name: getattr(asked, name) for name in _PASSED_ON},
        )

    def load_of(deployment: Deployment) -> Load:
        return resolve_load(deployment.max_model_len, asked.context, asked.prompt_tokens, asked.output_tokens)

    return build, load_of


def _with_preset(
    preset: str | None, model: str | None, gpu: str | None, tp: str | None, weights: str | None
) -> tuple[str, list[str | None], list[int], list[str]]:
    """Model, and GPUs, TPs and weights to choose from: what was asked, else the preset's, else the defaults.

    Raises:
        InputError: no such preset, no model, or a TP that is no number.
    """
    chosen: tuple[str | None, str | None, int, str] = (None, None, 1, "auto")
    if preset is not None:
        if preset not in PRESETS:
            raise InputError(f"preset = {preset!r}, expected one of {', '.join(PRESETS)}")
        chosen = PRESETS[preset]
    name = model or chosen[0]
    if name is None:
        raise InputError(
            "model = None, expected --model NAME or CONFIG.json, or --preset", "`vllm-harness models` lists them"
        )
    found = gpu or chosen[1]
    gpus: list[str | None] = [None] if found is None else [*plan_limits.several(found, "")]
    tps = plan_limits.several_numbers("tp", tp or str(chosen[2]))
    return name, gpus, tps, plan_limits.several(weights, chosen[3])


def _document(plan: Plan, sizing: Sizing | None) -> dict[str, Any]:
    from harness.cli.plan_view import document

    return document(plan, sizing)


def _print_json(document: dict[str, Any]) -> None:
    from json import dumps

    sys.stdout.write(dumps(document, indent=2, allow_nan=False) + "\n")


def _print_comparison(candidates: list[Candidate], as_json: bool) -> None:
    if as_json:
        _print_json(plan_limits.comparison_json(candidates))
        return
    from harness.cli.columns import line_width

    _write([plan_limits.comparison_table(candidates, line_width())])


def _write(parts: list[str]) -> None:
    sys.stdout.write("\n".join(parts) + "\n")


def _print(plan: Plan, sizing: Sizing | None, explain: bool, corrected: plan_probe.Corrected | None) -> None:
    from harness.cli.columns import filled, line_width
    from harness.cli.plan_view import bar, headline, sentence, tables

    width = line_width()
    vram, users = tables(plan, sizing, width)
    parts = [filled(headline(plan), width), "", vram, bar(plan), "", users, ""]
    if sizing is not None:
        parts += plan_limits.points(sizing, width)
    said = [sentence(plan, sizing)]
    if corrected is not None:
        said.append(plan_probe.sentence(corrected.correction))
    # the sentence has said why it does not fit
    warnings = plan.warnings if plan.memory.fits else plan.warnings[len(plan.deployment.warnings) + 1 :]
    said += [f"note: {warning}" for warning in warnings]
    if explain:
        from harness.cli.plan_explain import paragraphs

        said += [part for paragraph in paragraphs(plan) for part in ("", paragraph)]
    _write([*parts, *(filled(text, width) for text in said)])
