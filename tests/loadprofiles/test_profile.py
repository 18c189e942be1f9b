"""Profiles are read strictly: what cannot be run is refused with file, key and what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadprofiles.profile import (
    OfContext,
    Profile,
    ProfileError,
    Stage,
    builtin_names,
    load_profile,
    parse_profile,
    resolve,
    seconds,
)

MINIMAL: dict[str, Any] = {"name": "x", "stages": [{"users": 2, "duration": "5s"}]}


def with_stage(**stage: Any) -> dict[str, Any]:
    return {"name": "x", "stages": [stage]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30s", 30.0),
        ("500ms", 0.5),
        ("5m", 300.0),
        ("2min", 120.0),
        ("1h", 3600.0),
        ("1.5s", 1.5),
        (7, 7.0),
        ("8", 8.0),
    ],
)
def test_a_duration_is_read_with_its_unit(text: object, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["5 parsec", "", "-3s", True, None, float("inf"), -1, float("nan")])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        seconds(text)


def test_a_list_of_levels_is_one_stage_each() -> None:
    profile = parse_profile(with_stage(users=[1, 2, 4], duration="5s"), "f")
    assert [stage.users for stage in profile.stages] == [1, 2, 4]
    rates = parse_profile(with_stage(request_rate=[0.5, 2.0], duration="5s", users=8), "f")
    assert [(stage.request_rate, stage.users) for stage in rates.stages] == [(0.5, 8), (2.0, 8)]


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        (with_stage(user=3, duration="5s"), "f.yaml: unknown key 'stages.0.user'", "did you mean 'users'?"),
        ({**MINIMAL, "worklod": {}}, "f.yaml: unknown key 'worklod'", "did you mean 'workload'?"),
        (
            {**MINIMAL, "workload": {"promt_tokens": 3}},
            "f.yaml: unknown key 'workload.promt_tokens'",
            "did you mean 'prompt_tokens'?",
        ),
        (
            {**MINIMAL, "limits": {"zzz": 3}},
            "f.yaml: unknown key 'limits.zzz'",
            "known keys here: error_rate, max_users, ttft, total_time, saturation",
        ),
        (
            with_stage(users=0, duration="5s"),
            "f.yaml: stages.0.users: input should be greater than or equal to 1, not 0",
            "",
        ),
        (
            with_stage(users="many", duration="5s"),
            "f.yaml: stages.0.users: input should be a valid integer, not 'many'",
            "",
        ),
        (
            with_stage(users=2, duration="5 parsec"),
            "f.yaml: stages.0.duration: expected a duration such as 30s, 5m or 500ms, not '5 parsec'",
            "",
        ),
        (with_stage(users=2), "f.yaml: stages.0: a stage needs duration or requests, or it would never end", ""),
        (with_stage(duration=3), "f.yaml: stages.0: a stage needs users (closed loop) or request_rate (open loop)", ""),
        (with_stage(users=2, duration=0), "f.yaml: stages.0: duration must be longer than 0", ""),
        (
            with_stage(request_rate=2.0, duration=3, think="1s"),
            "f.yaml: stages.0: think belongs to users; with request_rate the arrivals decide",
            "",
        ),
        ({"name": "x"}, "f.yaml: stages: field required", ""),
        ([1], "f.yaml: expected a mapping with name, workload and stages, not list", ""),
        (
            with_stage(users=2, duration=3, arrival="poison"),
            "f.yaml: stages.0.arrival: input should be 'constant', 'poisson' or 'gamma', not 'poison'",
            "",
        ),
    ],
)
def test_bad_input_names_file_key_and_what_was_expected(data: Any, message: str, hint: str) -> None:
    with pytest.raises(ProfileError) as caught:
        parse_profile(data, "f.yaml")
    assert caught.value.message == message
    assert caught.value.hint == hint


def test_no_stages_is_refused() -> None:
    with pytest.raises(ProfileError, match="stages"):
        parse_profile({"name": "x", "stages": []}, "f")
    with pytest.raises(ProfileError, match="stages"):
        parse_profile({"name": "x", "stages": 5}, "f")


def test_every_shipped_profile_reads_and_says_what_it_is_for() -> None:
    assert {"smoke", "ramp", "burst", "soak"} <= set(builtin_names())
    for name in builtin_names():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.about


def test_a_profile_is_found_by_name_or_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nstages: [{users: 3, requests: 9}]\n")
    assert load_profile(str(file)).stages[0].users == 3
    assert load_profile("smoke").name == "smoke"


def test_an_unknown_profile_hints_at_the_near_one() -> None:
    with pytest.raises(ProfileError, match="no profile named 'smok'") as caught:
        load_profile("smok")
    assert caught.value.hint == "did you mean 'smoke'?"
    with pytest.raises(ProfileError) as caught:
        load_profile("zzzzzz")
    assert "there are: burst" in caught.value.hint


def test_a_file_that_is_no_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("name: x\nstages: [\n  - users: 3\n")
    with pytest.raises(ProfileError, match=r"bad\.yaml:\d+: not YAML"):
        load_profile(str(file))
    file.write_bytes(b"\xff\xfe\xfa name")
    with pytest.raises(ProfileError, match=r"bad\.yaml"):
        load_profile(str(file))


def burst() -> Profile:
    return parse_profile(
        {
            "name": "b",
            "workload": {"prompt_tokens": {"of_context": 0.25}, "output_tokens": 64},
            "stages": [
                {"users": 2, "duration": 5},
                {"users": {"fill_pool": 1.5}, "prompt_tokens": {"of_context": 0.5}, "duration": 5},
            ],
        },
        "b.yaml",
    )


def test_sizes_relative_to_the_server_become_numbers() -> None:
    profile = resolve(burst(), max_model_len=2048, pool_tokens=46_464)
    calm, sudden = profile.stages
    assert (calm.users, calm.prompt_tokens, calm.output_tokens) == (2, 512, 64)
    assert (sudden.prompt_tokens, sudden.users) == (1024, round(1.5 * 46_464 / 1088))
    assert profile.workload.prompt_tokens == 512


def test_a_share_of_the_context_leaves_room_for_the_answer() -> None:
    profile = parse_profile(
        {
            "name": "x",
            "workload": {"output_tokens": 100},
            "stages": [{"users": 1, "duration": 1, "prompt_tokens": {"of_context": 0.9}}],
        },
        "f",
    )
    assert resolve(profile, max_model_len=200, pool_tokens=None).stages[0].prompt_tokens == 100


def test_a_relative_size_without_the_servers_number_is_refused() -> None:
    with pytest.raises(ProfileError, match="the server does not say its length") as caught:
        resolve(burst(), max_model_len=None, pool_tokens=9)
    assert caught.value.hint == "give --prompt-tokens"
    with pytest.raises(ProfileError, match="does not show its pool"):
        resolve(burst(), max_model_len=2048, pool_tokens=None)


def test_a_request_longer_than_the_model_is_refused_before_it_is_sent() -> None:
    profile = parse_profile({**MINIMAL, "workload": {"prompt_tokens": 500, "output_tokens": 13}}, "f")
    with pytest.raises(ProfileError, match="500 prompt \\+ 13 output tokens exceed the server's max_model_len of 512"):
        resolve(profile, max_model_len=512, pool_tokens=None)
    assert resolve(profile, max_model_len=513, pool_tokens=None).stages[0].prompt_tokens == 500


def test_more_users_than_the_limit_are_refused() -> None:
    profile = parse_profile({**MINIMAL, "limits": {"max_users": 1}}, "f")
    with pytest.raises(ProfileError, match=r"2 users exceed limits\.max_users of 1"):
        resolve(profile, max_model_len=None, pool_tokens=None)


def test_a_profile_is_frozen() -> None:
    stage = Stage(users=1, duration=1.0)
    with pytest.raises(ValueError, match="frozen"):
        stage.users = 2  # type: ignore[misc]
    assert OfContext(of_context=0.5).of_context == 0.5
