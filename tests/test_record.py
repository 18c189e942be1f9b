"""A request ends in exactly one terminal state."""

from __future__ import annotations

import pytest

from harness.record import TRANSITIONS, IllegalTransition, Lifecycle, State


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("target", list(State))
def test_only_the_table_decides_what_may_follow(state: State, target: State) -> None:
    life = Lifecycle()
    life.state = state
    if target in TRANSITIONS[state]:
        life.to(target)
        assert life.state is target
    else:
        with pytest.raises(IllegalTransition):
            life.to(target)
        assert life.state is state, "an illegal step changes nothing"


def test_terminal_states_have_no_way_out() -> None:
    terminal = {state for state, after in TRANSITIONS.items() if not after}
    assert terminal == {State.OK, State.FAILED, State.INCOMPLETE}
    for state in terminal:
        life = Lifecycle()
        life.state = state
        assert life.ended
