"""A profile and what is known of a server -> the stages that will be run, in their order, with numbers in them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from loadprofiles.lengths import mean_of, most_of
from loadprofiles.stage import FillPool, Stage, begun_anew, check_handovers
from loadprofiles.units import ProfileError
from loadprofiles.workload import Conversation, OfContext, Synthetic

if TYPE_CHECKING:
    from loadprofiles.profile import Profile


def resolve(profile: Profile, *, max_model_len: int | None, pool_tokens: int | None, seed: int = 0) -> Profile:
    """The profile with every size that is relative to the server made a number, and its repetitions laid out.

    Args:
        max_model_len: tokens of prompt and output one request may hold; None when unknown.
        pool_tokens: usable tokens of the KV pool; None when unknown.
        seed: of the run; orders the stages of each repetition.

    Raises:
        ProfileError: a relative size meets an unknown, or a request would not fit ``max_model_len``.
    """
    stages = tuple(
        _resolve_stage(stage, profile, index, max_model_len, pool_tokens) for index, stage in enumerate(profile.stages)
    )
    workload = profile.workload
    if isinstance(workload, Synthetic) and isinstance(workload.prompt_tokens, OfContext):
        workload = workload.model_copy(update={"prompt_tokens": stages[0].prompt_tokens})
    stages = tuple(begun_anew(arranged(stages, profile, seed)))
    check_handovers(profile.name, stages)
    return profile.model_copy(update={"stages": stages, "workload": workload})


def arranged(stages: tuple[Stage, ...], profile: Profile, seed: int) -> tuple[Stage, ...]:
    """The stages as often as ``repeat`` says; the first pass too is shuffled where the order is random."""
    repeat = profile.repeat
    if repeat.times == 1:
        return stages
    passes = []
    for number in range(repeat.times):
        order = list(stages)
        if repeat.order == "random":
            random.Random(f"{seed}/repeat/{number}").shuffle(order)
        passes += [stage.model_copy(update={"repetition": number}) for stage in order]
    return tuple(passes)


def _resolve_stage(
    stage: Stage, profile: Profile, index: int, max_model_len: int | None, pool_tokens: int | None
) -> Stage:
    where = f"{profile.name}: stages.{index}"
    stage = _with_lengths(stage, profile, where, max_model_len)
    users = stage.users
    if isinstance(users, FillPool):
        users = _users_that_fill(users, stage, where, pool_tokens)
    if users is not None and profile.limits.max_users is not None and users > profile.limits.max_users:
        raise ProfileError(f"{where}.users: {users} users exceed limits.max_users of {profile.limits.max_users}")
    return stage.model_copy(update={"users": users})


def _with_lengths(stage: Stage, profile: Profile, where: str, max_model_len: int | None) -> Stage:
    """A synthetic stage with its own lengths; other workloads take theirs from what they read, or keep them by turn."""
    workload = profile.workload
    if not isinstance(workload, Synthetic):
        if isinstance(workload, Conversation) and workload.file is None:
            first_turn = workload.system_tokens + most_of(workload.prompt_tokens)
            _check_length(first_turn, most_of(workload.output_tokens), where, max_model_len)
        return stage
    output = stage.output_tokens if stage.output_tokens is not None else workload.output_tokens
    asked = stage.prompt_tokens if stage.prompt_tokens is not None else workload.prompt_tokens
    if isinstance(asked, OfContext):
        if max_model_len is None:
            raise ProfileError(
                f"{where}.prompt_tokens: {asked.of_context:g} of the context was asked, and the server does not say its length",
                "give --prompt-tokens",
            )
        asked = max(1, min(int(asked.of_context * max_model_len), max_model_len - most_of(output)))
    _check_length(most_of(asked), most_of(output), where, max_model_len)
    return stage.model_copy(update={"prompt_tokens": asked, "output_tokens": output})


def _check_length(prompt: int, output: int, where: str, max_model_len: int | None) -> None:
    if max_model_len is not None and prompt + output > max_model_len:
        raise ProfileError(
            f"{where}: {prompt} prompt + {output} output tokens exceed the server's max_model_len of {max_model_len}",
            "vLLM would cut the answers short without saying so; ask for less, or start the server with a longer --max-model-len",
        )


def _users_that_fill(asked: FillPool, stage: Stage, where: str, pool_tokens: int | None) -> int:
    prompt, output = stage.prompt_tokens, stage.output_tokens
    if prompt is None or output is None or isinstance(prompt, OfContext):
        raise ProfileError(f"{where}.users: fill_pool needs a synthetic workload, whose lengths are known beforehand")
    if pool_tokens is None:
        raise ProfileError(
            f"{where}.users: {asked.fill_pool:g} of the KV pool was asked, and the server does not show its pool",
            "give --users, or open /metrics",
        )
    return max(1, round(asked.fill_pool * pool_tokens / (mean_of(prompt) + mean_of(output))))
