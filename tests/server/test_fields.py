"""Reading a body's fields: whatever a client sends has an answer."""

import pytest

from graphseed.server.errors import ApiError
from graphseed.server.wire.fields import shown
from graphseed.server.wire.params import parse
from tests.server.small import small_server


def test_a_value_of_many_levels_can_be_named_in_an_error() -> None:
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a list of many levels"


@pytest.mark.parametrize("field", ["stop", "logit_bias", "temperature"])
def test_a_body_of_many_levels_is_the_clients_error(field: str) -> None:
    deep: object = []
    for _ in range(950):
        deep = [deep]
    with small_server() as server, pytest.raises(ApiError) as caught:
        parse(server.state, {field: deep})
    assert caught.value.status == 400
