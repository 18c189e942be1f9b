"""The flags a plan means: what was asked for and nothing else, in words that the named vLLM version takes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from calibration.artifacts import Nodes, checkpoint_of, place, plan_launch, served_model, since, vllm_flags
from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, resolve_deployment
from calibration.errors import InputError, Unsupported
from calibration.vllm_defaults import Version, parse_version

PARSERS = json.loads((Path(__file__).resolve().parents[1] / "data" / "vllm_parser_flags.json").read_text())
RELEASES: dict[str, dict[str, Any]] = PARSERS["releases"]
GIB = 1 << 30


def on(model: str = "llama-3.1-8b", gpu: str = "h100-sxm", **changes: Any) -> Deployment:
    return resolve_deployment(find_model(model), gpu=find_gpu(gpu), **changes)


def on_cpu(model: str = "llama-3.1-8b", pool: int = GIB, **changes: Any) -> Deployment:
    return resolve_deployment(find_model(model), device="cpu", kv_cache_memory_bytes=pool, **changes)


def pairs(flags: list[str]) -> dict[str, str | None]:
    """Flag -> its value, None for a switch; a flag may stand once."""
    found: dict[str, str | None] = {}
    name = ""
    for item in flags:
        if item.startswith("--"):
            name = item
            assert name not in found
            found[name] = None
        else:
            assert found[name] is None
            found[name] = item
    return found


def assert_taken(flags: list[str], release: str) -> None:
    """Every flag is in the parser of that release, every choice among its choices."""
    parser = RELEASES[release]
    for flag, value in pairs(flags).items():
        name = flag.replace("--no-", "--")
        assert name in PARSERS["looked_for"], f"{name} was not looked for"
        assert name not in parser["lacks"], f"vLLM {release} has no {name}"
        for choice in ("kv_cache_dtype", "mamba_ssm_cache_dtype", "quantization", "block_size"):
            if name == "--" + choice.replace("_", "-") and parser[choice] is not None:
                assert value in [str(known) for known in parser[choice]], f"vLLM {release} refuses {name} {value}"


def test_a_plan_of_defaults_needs_no_flag() -> None:
    assert vllm_flags(on()) == []
    assert vllm_flags(on("gpt-oss-120b")) == []
    assert vllm_flags(on("deepseek-v3", "h200-sxm", tp=8)) == ["--tensor-parallel-size", "8"]


def test_what_was_asked_for_is_said_even_where_it_is_the_default() -> None:
    asked = on(max_num_seqs=1024, gpu_memory_utilization=0.92, enable_prefix_caching=True, dtype="bfloat16")
    assert pairs(vllm_flags(asked)) == {
        "--dtype": "bfloat16",
        "--max-num-seqs": "1024",
        "--gpu-memory-utilization": "0.92",
        "--enable-prefix-caching": None,
    }


def test_every_field_of_a_deployment_has_its_flag() -> None:
    asked = on(
        "qwen3-next-80b-a3b",
        "h200-sxm",
        tp=2,
        pp=2,
        dp=2,
        expert_parallel=True,
        dtype="bf16",
        kv="fp8",
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.875,
        block_size=32,
        num_gpu_blocks_override=1000,
        enable_prefix_caching=False,
        hybrid_kv_cache_manager=False,
        enforce_eager=True,
        mamba_ssm_cache_dtype="float32",
    )
    assert pairs(vllm_flags(asked)) == {
        "--tensor-parallel-size": "2",
        "--pipeline-parallel-size": "2",
        "--data-parallel-size": "2",
        "--enable-expert-parallel": None,
        "--dtype": "bfloat16",
        "--kv-cache-dtype": "fp8",
        "--block-size": "32",
        "--num-gpu-blocks-override": "1000",
        "--max-model-len": "8192",
        "--max-num-seqs": "64",
        "--max-num-batched-tokens": "4096",
        "--gpu-memory-utilization": "0.875",
        "--no-enable-prefix-caching": None,
        "--disable-hybrid-kv-cache-manager": None,
        "--enforce-eager": None,
        "--mamba-ssm-cache-dtype": "float32",
    }


@pytest.mark.parametrize("release", RELEASES)
def test_requests_go_unlogged_without_a_flag_that_the_release_refuses(release: str) -> None:
    flags = vllm_flags(on(vllm_version=release))
    # 0.10.1 turned request logging off by default; 0.17 refuses the flag
    old = release in ("0.8.5", "0.9.0", "0.9.1", "0.9.2", "0.10.0")
    assert flags == (["--disable-log-requests"] if old else [])
    assert_taken(flags, release)


@st.composite
def deployments(draw: st.DrawFn) -> dict[str, Any]:
    maybe = st.none()
    models = ["llama-3.1-8b", "deepseek-v3", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "gpt-oss-20b"]
    model = draw(st.sampled_from(models))
    return {
        "model": model,
        "tp": draw(st.sampled_from([1, 2, 4, 16])),
        "pp": draw(st.sampled_from([1, 2, 3])),
        "dp": draw(st.sampled_from([1, 2, 3, 16])),
        "expert_parallel": model != "llama-3.1-8b" and draw(st.booleans()),
        "weights": draw(st.sampled_from(["auto", "bf16", "fp16", "fp8", "fp8-block", "int4", "mxfp4"])),
        "kv": draw(
            st.sampled_from(["auto", "bf16", "fp16", "fp8", "fp8_e5m2", "fp8_ds_mla", "nvfp4", "int4_per_token_head"])
        ),
        "dtype": draw(maybe | st.sampled_from(["bfloat16", "float16"])),
        "block_size": draw(maybe | st.sampled_from([1, 16, 64, 256, 512])),
        "kv_cache_memory_bytes": draw(maybe | st.just(20 * GIB + 1)),
        "enable_prefix_caching": draw(maybe | st.booleans()),
        "hybrid_kv_cache_manager": draw(st.booleans()),
        "mamba_ssm_cache_dtype": draw(maybe | st.sampled_from(["float32", "float16", "bfloat16"])),
        "vllm_version": draw(st.sampled_from([*RELEASES])),
    }


@given(deployments())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_release_is_never_given_a_flag_it_does_not_take(asked: dict[str, Any]) -> None:
    try:
        deployment = on(gpu="h200-sxm", **asked)
    except InputError:
        reject()
    with suppress(InputError):
        assert_taken(vllm_flags(deployment), asked["vllm_version"])


def first(has: dict[str, bool]) -> Version:
    """The first release that has something, which none after it lacks."""
    releases = [release for release, present in has.items() if present]
    assert releases == [*RELEASES][-len(releases) :]
    return parse_version(releases[0])


def test_a_flag_counts_from_the_first_release_whose_parser_has_it() -> None:
    for flag, version in since.FLAGS.items():
        assert first({r: flag not in p["lacks"] for r, p in RELEASES.items()}) == version, flag
    for name, version in since.KV_DTYPES.items():
        assert first({r: name in p["kv_cache_dtype"] for r, p in RELEASES.items()}) == version, name
    for name, version in since.STATE_DTYPES.items():
        assert first({r: name in (p["mamba_ssm_cache_dtype"] or []) for r, p in RELEASES.items()}) == version, name
    assert first({r: p["block_size"] is None for r, p in RELEASES.items()}) == since.ANY_BLOCK_SIZE
    assert first({r: 256 in (p["block_size"] or [256]) for r, p in RELEASES.items()}) == since.BLOCK_SIZE_256
    assert first({r: "fp8_per_tensor" in p["quantization"] for r, p in RELEASES.items()}) == since.ONLINE_NAMES


@pytest.mark.parametrize(
    ("asked", "kv"),
    [
        ({"kv": "bf16"}, None),
        ({"kv": "bf16", "vllm_version": "0.8.5"}, None),
        ({"kv": "fp16"}, "float16"),
        ({"kv": "fp8"}, "fp8"),
        ({"kv": "fp8_e4m3"}, "fp8"),
        ({"kv": "fp8_e5m2"}, "fp8_e5m2"),
        ({"kv": "nvfp4"}, "nvfp4"),
        ({"kv": "fp32", "dtype": "float32"}, None),
    ],
)
def test_the_cache_dtype_is_said_where_it_is_not_what_auto_means(asked: dict[str, str], kv: str | None) -> None:
    assert pairs(vllm_flags(on(**asked))).get("--kv-cache-dtype") == kv


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kv": "nvfp4", "vllm_version": "0.15.0"}, "kv = 'nvfp4' with vLLM 0.15.0, expected vLLM 0.20.0 or later"),
        (
            {"kv_cache_memory_bytes": GIB, "vllm_version": "0.10.1"},
            "--kv-cache-memory-bytes with vLLM 0.10.1, expected",
        ),
        ({"kv": "fp32"}, "kv = 'float32' with dtype = 'bfloat16'"),
    ],
)
def test_what_the_release_does_not_know_is_refused_by_name(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        vllm_flags(on(**asked))


def test_a_block_size_the_release_refuses_is_refused() -> None:
    assert "256" in vllm_flags(on(block_size=256, vllm_version="0.12.0"))
    with pytest.raises(InputError, match=r"block_size = 256 with vLLM 0.10.0, expected one of 1, 8, 16, 32, 64, 128"):
        vllm_flags(on(block_size=256, vllm_version="0.10.0"))


def test_e5m2_is_refused_with_fp8_weights_and_warned_of_without() -> None:
    with pytest.raises(InputError, match="vLLM refuses e5m2 with FP8 checkpoints"):
        on(weights="fp8", kv="fp8_e5m2")
    launch = plan_launch(on(kv="fp8_e5m2"), "m")
    assert [note for note in launch.notes if "FlashAttention" in note]
    assert plan_launch(on(kv="fp8"), "m").notes == ()


@pytest.mark.parametrize(
    ("release", "name"), [("0.32.0", "fp8_per_tensor"), ("0.20.0", "fp8_per_tensor"), ("0.19.0", "fp8")]
)
def test_vllm_makes_fp8_weights_of_a_16_bit_checkpoint(release: str, name: str) -> None:
    deployment = on(weights="fp8", vllm_version=release)
    assert vllm_flags(deployment) == ["--quantization", name]
    assert checkpoint_of(deployment, "meta-llama/Llama-3.1-8B-Instruct").model == "meta-llama/Llama-3.1-8B-Instruct"
    assert "makes the FP8 weights" in plan_launch(deployment, "m").notes[0]


@pytest.mark.parametrize(
    ("model", "weights"),
    [("llama-3.1-8b", "int4"), ("llama-3.1-8b", "nvfp4"), ("deepseek-v3", "bf16"), ("gpt-oss-20b", "fp8")],
)
def test_a_format_vllm_does_not_make_needs_a_checkpoint_the_operator_names(model: str, weights: str) -> None:
    deployment = on(model, "h200-sxm", weights=weights)
    checkpoint = checkpoint_of(deployment, served_model(model))
    assert (checkpoint.model, checkpoint.quantization) == (None, None)
    assert checkpoint.wanted == f"a checkpoint of {model} with {weights} weights"
    assert vllm_flags(deployment) == []


def test_sixteen_bit_weights_are_the_dtype() -> None:
    assert vllm_flags(on(weights="fp16")) == ["--dtype", "float16"]
    assert vllm_flags(on(weights="bf16")) == []
    with pytest.raises(InputError, match="weights = 'fp16' with dtype = 'bfloat16', expected the same of both"):
        vllm_flags(on(weights="fp16", dtype="bfloat16"))


def test_a_pool_on_cpu_is_set_as_the_release_takes_it() -> None:
    whole = plan_launch(on_cpu(pool=4 * GIB, vllm_version="0.10.0"), "m")
    assert whole.environment == {"VLLM_CPU_KVCACHE_SPACE": "4"}
    assert "--kv-cache-memory-bytes" not in whole.flags
    odd = plan_launch(on_cpu(pool=GIB + 1), "m")
    assert (odd.environment, odd.flags) == ({}, ("--kv-cache-memory-bytes", str(GIB + 1)))
    with pytest.raises(InputError, match=r"kv_cache_memory = 1073741825 with vLLM 0.15.0, expected whole GiB"):
        vllm_flags(on_cpu(pool=GIB + 1, vllm_version="0.15.0"))


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "per_node", "nodes"),
    [
        (8, 1, 1, 8, Nodes(1, 8, 1, False)),
        (2, 1, 4, 8, Nodes(1, 8, 4, False)),
        (4, 2, 3, 8, Nodes(3, 8, 1, False)),
        (2, 1, 6, 8, Nodes(2, 6, 3, False)),
        (2, 1, 5, 8, Nodes(5, 2, 1, False)),
        (8, 2, 1, 8, Nodes(2, 8, 1, True)),
        (4, 3, 1, 8, Nodes(2, 8, 1, True)),
        (2, 2, 1, 3, Nodes(2, 2, 1, True)),
        (16, 1, 1, 8, Nodes(2, 8, 1, True)),
        (8, 1, 1, 4, Nodes(2, 4, 1, True)),
    ],
)
def test_replicas_lie_whole_on_nodes_where_they_fit(tp: int, pp: int, dp: int, per_node: int, nodes: Nodes) -> None:
    deployment = on("deepseek-v3", "h200-sxm", tp=tp, pp=pp, dp=dp)
    assert place(deployment, per_node) == nodes
    assert nodes.count * nodes.gpus >= deployment.gpus
    flags = pairs(vllm_flags(deployment, per_node))
    assert flags.get("--distributed-executor-backend") == ("ray" if nodes.spans else None)
    over_nodes = nodes.count > 1 and not nodes.spans
    assert flags.get("--data-parallel-backend") == ("ray" if over_nodes else None)
    assert flags.get("--data-parallel-size-local") == (str(nodes.replicas) if over_nodes else None)


def test_replicas_that_each_span_nodes_are_refused() -> None:
    with pytest.raises(Unsupported, match="dp = 2 replicas of 16 GPUs on nodes of 8: each spans nodes"):
        place(on("deepseek-v3", tp=8, pp=2, dp=2))
    with pytest.raises(InputError, match="gpus_per_node = 0, expected at least 1"):
        place(on(), 0)


def test_tensor_parallelism_over_nodes_is_warned_of() -> None:
    notes = plan_launch(on("deepseek-v3", tp=16), "m").notes
    assert any("TP 8 inside a node and PP over nodes" in note for note in notes)
    assert any("without Ray since 0.18" in note for note in notes)
    assert plan_launch(on("deepseek-v3", tp=8, pp=2, vllm_version="0.12.0"), "m").notes == ()


def test_the_model_is_the_id_that_was_asked_for(tmp_path: Path) -> None:
    assert served_model("llama-3.1-8b") == "meta-llama/Llama-3.1-8B-Instruct"
    assert served_model("meta-llama/llama-3.1-8b") == "meta-llama/Llama-3.1-8B"
    (tmp_path / "config.json").write_text("{}")
    assert served_model(str(tmp_path)) == str(tmp_path)
    assert served_model(str(tmp_path / "config.json")) == str(tmp_path)
    assert served_model(str(tmp_path / "other.json")) is None
    with pytest.raises(InputError, match="is not in the catalog"):
        served_model("no-such-model")


@pytest.mark.parametrize("name", ["", "--swap-space", "a\nb", "a\0b", "a\u2028b", "a\udce9"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"model = .*, expected a Hugging Face id or a folder"):
        plan_launch(on(), name)


def test_the_wait_grows_with_the_checkpoint() -> None:
    small, large = plan_launch(on(), "m"), plan_launch(on("deepseek-v3", "h200-sxm", tp=8), "m")
    # 16 GB and 671 GB at 0.5 GB/s, on 10 minutes
    assert (small.start_timeout_s, large.start_timeout_s) == (660, 1980)
    # loaded in 16 bits before it is FP8
    assert plan_launch(on(weights="fp8"), "m").start_timeout_s == small.start_timeout_s
