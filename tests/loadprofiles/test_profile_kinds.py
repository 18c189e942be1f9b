"""What a profile may hold: levels by shape, lengths by distribution, workloads by kind, searches, repeats, --set, schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from loadprofiles.arrivals import ramped_times_s
from loadprofiles.lengths import Lengths, mean_of, most_of, quantile_of
from loadprofiles.profile import Profile, ProfileError, RateRamp, builtin_names, load_profile, parse_profile, resolve
from loadprofiles.schema import SCHEMA_FILE, profile_schema, schema_text

LENGTHS: TypeAdapter[Any] = TypeAdapter(Lengths)


def profile(*stages: dict[str, Any], **more: Any) -> Profile:
    return parse_profile({"name": "x", "stages": list(stages), **more}, "f.yaml")


def refused(*stages: dict[str, Any], **more: Any) -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        profile(*stages, **more)
    return caught.value


@pytest.mark.parametrize(
    ("users", "levels"),
    [
        ({"linear": {"start": 2, "end": 10, "step": 4}}, [2, 6, 10]),
        ({"linear": {"start": 5, "end": 1, "step": 2}}, [5, 3, 1]),
        ({"geometric": {"start": 1, "end": 16}}, [1, 2, 4, 8, 16]),
        ({"geometric": {"start": 1, "end": 4, "factor": 1.3}}, [1, 2, 3, 4]),
        ({"geometric": {"start": 8, "end": 2}}, [8, 4, 2]),
        ({"spike": {"base": 4, "peak": 64}}, [4, 64, 4]),
        (7, [7]),
    ],
)
def test_users_by_shape(users: object, levels: list[int]) -> None:
    assert [stage.users for stage in profile({"users": users, "duration": "5s"}).stages] == levels


def test_a_spikes_peak_may_last_shorter() -> None:
    spike = {"spike": {"base": 4, "peak": 64, "peak_duration": "2s"}}
    assert [stage.duration for stage in profile({"users": spike, "duration": "9s"}).stages] == [9.0, 2.0, 9.0]


def test_a_rate_may_be_levels_or_a_ramp() -> None:
    rates = profile({"request_rate": {"geometric": {"start": 0.5, "end": 2}}, "duration": 3}).stages
    assert [stage.request_rate for stage in rates] == [0.5, 1.0, 2.0]
    (ramp,) = profile({"request_rate": {"ramp": {"start": 1, "end": 3}}, "duration": 3}).stages
    assert isinstance(ramp.request_rate, RateRamp)
    assert ramp.request_rate.mean == 2.0


@pytest.mark.parametrize(
    ("stage", "message", "hint"),
    [
        (
            {"users": {"linaer": {}}, "duration": 1},
            "f.yaml: stages.0.users: expected users, a list of them, or one of",
            "",
        ),
        (
            {"users": {"geometric": {"start": 1, "stop": 4}}, "duration": 1},
            "f.yaml: stages.0.users.geometric.end: field required",
            "",
        ),
        (
            {"users": [1, 0], "duration": 1},
            "f.yaml: stages.0.users.1: input should be greater than or equal to 1, not 0",
            "",
        ),
        ({"users": 2, "duration": 1, "warm_up": 1}, "f.yaml: stages.0: warm_up leaves nothing of the duration", ""),
        (
            {"request_rate": {"ramp": {"start": 1, "end": 2}}, "requests": 4},
            "f.yaml: stages.0: a ramp of the rate needs a duration",
            "",
        ),
        ({"replay": True}, "f.yaml: stages.0: replay needs a workload of kind trace", ""),
        ({"replay": True, "request_rate": 1.0}, "f.yaml: stages.0: replay and request_rate both say", ""),
        (
            {"users": [1, 2], "request_rate": 2.0, "duration": 1},
            "f.yaml: stages.0: users caps the requests in flight where there is a request_rate",
            "",
        ),
    ],
)
def test_a_stage_that_cannot_be_is_refused_by_its_key(stage: dict[str, Any], message: str, hint: str) -> None:
    error = refused(stage)
    assert error.message.startswith(message), error.message
    assert error.hint == hint


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"kind": "dataste", "file": "x"}, "f.yaml: workload: input tag 'dataste'"),
        ({"kind": "dataset"}, "f.yaml: workload.file: field required"),
        (
            {"prompt_tokens": {"distribution": "uniform", "low": 9, "high": 3}},
            "f.yaml: workload.prompt_tokens: low (9) is",
        ),
        (
            {"prompt_tokens": {"distribution": "normal", "mean_tokens": 5}},
            "f.yaml: workload.prompt_tokens.std_tokens: field",
        ),
        (
            {"prompt_tokens": 64, "shared_prefix": {"tokens": 64}},
            "f.yaml: workload: shared_prefix.tokens (64) leaves nothing",
        ),
        (
            {"output_tokens": {"distribution": "empirical", "values": [1, 2], "weights": [1]}},
            "f.yaml: workload.output_tokens: 1 weights for 2 values",
        ),
    ],
)
def test_a_workload_that_cannot_be_is_refused_by_its_key(workload: dict[str, Any], message: str) -> None:
    error = refused({"users": 1, "duration": 1}, workload=workload)
    assert error.message.startswith(message), error.message


def test_a_misspelt_key_of_a_kind_hints_at_that_kinds_keys() -> None:
    error = refused({"users": 1, "duration": 1}, workload={"kind": "trace", "file": "t", "sped": 2.0})
    assert (error.message, error.hint) == ("f.yaml: unknown key 'workload.sped'", "did you mean 'speed'?")


def test_lengths_of_a_stage_belong_to_synthetic_workloads() -> None:
    error = refused({"users": 1, "duration": 1, "output_tokens": 5}, workload={"kind": "trace", "file": "t"})
    assert "lengths belong to the workload where its kind is trace" in error.message


@pytest.mark.parametrize(
    "lengths",
    [
        {"distribution": "fixed", "tokens": 100},
        {"distribution": "uniform", "low": 10, "high": 500},
        {"distribution": "normal", "mean_tokens": 100, "std_tokens": 40, "low": 20, "high": 180},
        {"distribution": "normal", "mean_tokens": 10, "std_tokens": 40, "low": 1, "high": 50},
        {"distribution": "lognormal", "mean_tokens": 200, "std_tokens": 300, "low": 5, "high": 600},
        {"distribution": "empirical", "values": [10, 20, 400], "weights": [1, 2, 1]},
    ],
)
def test_the_stated_mean_is_that_of_what_is_drawn(lengths: dict[str, Any]) -> None:
    spec = LENGTHS.validate_python(lengths)
    drawn = [quantile_of(spec, (n + 0.5) / 20_000) for n in range(20_000)]
    assert np.mean(drawn) == pytest.approx(mean_of(spec), rel=0.01)
    assert max(drawn) <= most_of(spec)
    assert min(drawn) >= 1


def test_a_lognormal_has_the_mean_and_deviation_given() -> None:
    spec = LENGTHS.validate_python(
        {"distribution": "lognormal", "mean_tokens": 300, "std_tokens": 150, "high": 10_000_000}
    )
    drawn = [quantile_of(spec, (n + 0.5) / 50_000) for n in range(50_000)]
    assert (np.mean(drawn), np.std(drawn)) == (pytest.approx(300, rel=0.01), pytest.approx(150, rel=0.02))


def test_the_longest_request_has_to_fit_the_context() -> None:
    uniform = {"distribution": "uniform", "low": 10, "high": 400}
    with pytest.raises(ProfileError, match="400 prompt \\+ 128 output tokens exceed"):
        resolve(
            profile({"users": 1, "duration": 1}, workload={"prompt_tokens": uniform}),
            max_model_len=500,
            pool_tokens=None,
        )


def test_a_pool_is_filled_by_requests_of_mean_length() -> None:
    uniform = {"distribution": "uniform", "low": 100, "high": 300}
    stages = profile(
        {"users": {"fill_pool": 1.0}, "duration": 1}, workload={"prompt_tokens": uniform, "output_tokens": 50}
    )
    assert resolve(stages, max_model_len=None, pool_tokens=2500).stages[0].users == 10


def test_repetitions_are_shuffled_by_the_seed() -> None:
    wanted = profile({"users": [1, 2, 3, 4, 5, 6], "duration": 1}, repeat={"times": 3})
    first = resolve(wanted, max_model_len=None, pool_tokens=None, seed=1).stages
    again = resolve(wanted, max_model_len=None, pool_tokens=None, seed=1).stages
    other = resolve(wanted, max_model_len=None, pool_tokens=None, seed=2).stages
    assert first == again != other
    assert [stage.repetition for stage in first] == [0] * 6 + [1] * 6 + [2] * 6
    passes = [[stage.users for stage in first[at : at + 6]] for at in (0, 6, 12)]
    assert all(sorted(one) == [1, 2, 3, 4, 5, 6] for one in passes)
    assert len({tuple(one) for one in passes}) > 1


def test_repetitions_as_written_keep_their_order() -> None:
    wanted = profile({"users": [1, 2], "duration": 1}, repeat={"times": 2, "order": "as_written"})
    assert [s.users for s in resolve(wanted, max_model_len=None, pool_tokens=None).stages] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": [{"users": [1, 2], "duration": 1}]}, "a search has one stage with a number of users"),
        ({"stages": [{"users": 1, "requests": 9}]}, "a search's stage has a duration"),
        ({"repeat": {"times": 2}}, "a search repeats by itself"),
        ({"search": {"kind": "kne"}}, "input tag 'kne'"),
    ],
)
def test_a_search_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    data = {"name": "x", "stages": [{"users": 1, "duration": 9}], "search": {"kind": "knee"}, **changes}
    with pytest.raises(ProfileError, match=message):
        parse_profile(data, "f.yaml")


def test_set_changes_what_the_file_says_and_is_checked_like_it() -> None:
    changed = load_profile("smoke", ["stages.0.users=64", "stages.0.duration=2m", "workload.output_tokens=5"])
    assert [(stage.users, stage.duration) for stage in changed.stages] == [(64, 120.0)]
    assert changed.workload.output_tokens == 5  # type: ignore[union-attr]
    assert {stage.duration for stage in load_profile("burst", ["stages.*.duration=3"]).stages} == {3.0}
    assert load_profile("soak", ["limits=null"]).limits.error_rate == 0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.0.users=many", "stages.0.users: input should be a valid integer, not 'many'"),
        ("stages.0.user=3", "unknown key 'stages.0.user'"),
        ("stages.7.users=3", "--set stages.7.users: there is no 7: 1 stand there, counted from 0"),
        ("stages.first.users=3", "--set stages.first.users: expected a number from 0 to 0, or *, not 'first'"),
        ("name.x=3", "--set name.x: 'x' leads nowhere"),
        ("stages.0.users", "--set: expected KEY=VALUE, not 'stages.0.users'"),
        ("=3", "--set: expected KEY=VALUE, not '=3'"),
        ("stages.0.users={", "--set stages.0.users: '{' is not YAML"),
    ],
)
def test_a_set_that_cannot_be_names_its_key(override: str, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        load_profile("smoke", [override])
    assert message in caught.value.message


def test_a_workloads_file_is_meant_from_the_profiles_folder(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\nworkload: {kind: dataset, file: rows.jsonl}\nstages: [{users: 1, requests: 3}]\n", encoding="utf-8"
    )
    assert load_profile(str(file)).workload.file == str(tmp_path / "rows.jsonl")  # type: ignore[union-attr]


def test_a_profile_as_it_was_run_reads_again() -> None:
    for name in builtin_names():
        read = load_profile(name)
        assert parse_profile(read.model_dump(mode="json", exclude_none=True), name) == read


def test_the_schema_file_is_that_of_the_code() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "run: vllm-harness profiles --schema > the file"


def test_the_schema_describes_every_key_of_the_shipped_profiles() -> None:
    schema = profile_schema()
    assert schema["additionalProperties"] is False
    assert {"name", "stages", "workload", "limits", "repeat", "search"} <= set(schema["properties"])
    assert "discriminator" not in json.dumps(schema)


def test_arrivals_of_a_ramp_follow_its_rate() -> None:
    for shape, middle in (("linear", 0.5 * (1 + 3) / 2 * 100 * 0.75), ("exponential", None)):
        times = ramped_times_s(
            1.0,
            3.0,
            duration_s=100.0,
            shape=shape,
            rng=np.random.default_rng(1),
            arrival="constant",  # type: ignore[arg-type]
        )
        assert np.all(np.diff(times) > 0)
        assert times[-1] < 100.0
        # gaps are the reciprocals of the rate there
        assert np.diff(times)[0] == pytest.approx(1.0, rel=0.05)
        assert np.diff(times)[-1] == pytest.approx(1 / 3, rel=0.05)
        if middle is not None:
            assert len(times) == pytest.approx(200, abs=1)
            assert (times < 50).sum() == pytest.approx(middle, abs=1)


def test_poisson_arrivals_of_a_ramp_have_its_count() -> None:
    counts = [
        len(ramped_times_s(2.0, 6.0, duration_s=50.0, shape="linear", rng=np.random.default_rng(n))) for n in range(200)
    ]
    assert np.mean(counts) == pytest.approx(200, rel=0.02)
    assert np.var(counts) == pytest.approx(200, rel=0.3)
