"""I6 and I7: identities are structure, bindings are addresses, both explain a difference."""

import pytest

from graphseed.capture import Bindings, Namespace


def test_I6_equal_structure_is_one_identity(make_identity):
    assert make_identity() == make_identity()
    assert hash(make_identity()) == hash(make_identity())


def test_I6_a_difference_names_its_fields(make_identity):
    a, b = make_identity(window=1), make_identity(Namespace.DECODE, tokens=16, cap=2)
    assert a.differs_from(b) == ("namespace", "first_node", "tokens", "window", "cap")
    assert a.differs_from(a) == ()


def test_I6_a_value_that_is_not_plain_is_refused(make_identity):
    with pytest.raises(TypeError, match="'buffer' is a object"):
        make_identity(buffer=object())
    with pytest.raises(TypeError, match="'nested' is a list"):
        make_identity(nested=(1, [2]))


def test_a_missing_field_is_not_the_same_as_none(make_identity):
    assert make_identity(window=None).differs_from(make_identity()) == ("window",)


def test_I7_bindings_name_what_moved_went_and_came():
    old = Bindings((("kv", 1), ("staging", 2), ("gone", 3)))
    new = Bindings((("kv", 9), ("staging", 2), ("new", 4)))
    assert old.stale(new) == ("kv", "gone", "new")
    assert old.stale(old) == ()
