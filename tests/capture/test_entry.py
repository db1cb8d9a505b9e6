"""The table of edges, over the full product of states."""

import itertools

import pytest

from graphseed.capture import EDGES, Entry, IllegalMove, State

LEGAL = {
    ("unseen", "observed"), ("unseen", "seeded"), ("unseen", "refused"),
    ("observed", "proven"), ("observed", "refused"), ("observed", "released"),
    ("seeded", "proven"), ("seeded", "unseen"), ("seeded", "released"),
    ("proven", "trusted"), ("proven", "quarantined"), ("proven", "refused"),
    ("proven", "released"), ("trusted", "refused"), ("trusted", "released"),
    ("quarantined", "unseen"), ("refused", "unseen"), ("released", "unseen"),
}  # fmt: skip


@pytest.mark.parametrize(("a", "b"), list(itertools.product(State, State)))
def test_a_move_is_legal_exactly_when_the_contract_draws_it(a, b, make_identity):
    entry = Entry(make_identity(), state=a)
    if (a.value, b.value) in LEGAL:
        entry.move(b)
        assert entry.state is b
    else:
        with pytest.raises(IllegalMove, match=f"from {a.value} to {b.value}"):
            entry.move(b)
        assert entry.state is a


def test_every_state_has_a_row_and_a_way_out():
    assert set(EDGES) == set(State)
    assert all(EDGES.values())


def test_a_move_out_of_the_held_states_drops_every_handle(make_identity):
    entry = Entry(make_identity(), state=State.SEEDED)
    entry.executable, entry.pending, entry.direct_done = object(), object(), object()
    entry.move(State.RELEASED)
    assert (entry.executable, entry.pending, entry.direct_done) == (None, None, None)
