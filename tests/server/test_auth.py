"""Keys and origins."""

import pytest

from graphseed.server.auth import ApiKeys, Cors

KEYS = ("first-key", "zweiter Schlüssel")


@pytest.mark.parametrize(
    ("headers", "is_admitted"),
    [
        ({b"authorization": b"Bearer first-key"}, True),
        ({b"authorization": b"first-key"}, True),
        ({b"x-api-key": b"first-key"}, True),
        ({b"x-api-key": "zweiter Schlüssel".encode()}, True),
        ({b"authorization": b"Bearer wrong", b"x-api-key": b"first-key"}, False),
        ({b"authorization": b"bearer first-key"}, False),
        ({b"authorization": b"Bearer first-ke"}, False),
        ({b"authorization": b"Bearer first-key "}, False),
        ({b"authorization": b"Bearer "}, False),
        ({b"authorization": b""}, False),
        ({}, False),
    ],
)
def test_a_key_is_one_of_those_in_one_of_two_headers(headers, is_admitted):
    assert ApiKeys(KEYS).admits(headers) is is_admitted


def test_without_keys_everybody_may():
    assert ApiKeys(()).admits({})


@pytest.mark.parametrize(
    ("origins", "origin", "is_allowed"),
    [
        ((), "http://evil.com", True),
        (("*",), "http://evil.com", True),
        (("localhost",), "http://localhost", True),
        (("localhost",), "http://127.0.0.1:3000", True),
        (("localhost",), "http://[::1]:3000", True),
        (("localhost",), "http://localhost.evil.com", False),
        (("localhost",), "http://notlocalhost", False),
        (("localhost",), "http://[", False),
        (("localhost",), "null", False),
        (("https://a.example", "localhost"), "https://a.example", True),
        (("https://a.example/",), "https://a.example", True),
        (("https://a.example",), "http://a.example", False),
        ((), None, False),
    ],
)
def test_an_origin_is_allowed_by_name_or_as_this_machine(origins, origin, is_allowed):
    headers = Cors(origins).headers(origin)
    expected = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"} if is_allowed else {}
    assert headers == expected


@pytest.mark.parametrize("path", ["/props", "/models", "/v1/models", "/slots", "/openapi.json"])
def test_everything_but_health_needs_a_key_where_there_is_one(make_server, path):
    server = make_server(api_keys=("k",))
    response = server.get(path)
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"] == {
        "code": 401, "message": "Invalid API Key", "type": "authentication_error",
    }  # fmt: skip
    assert server.get(path, headers={"X-Api-Key": "k"}).status_code == 200


def test_health_is_public_and_what_is_not_there_is_not_told(make_server):
    server = make_server(api_keys=("k",))
    assert server.get("/health").status_code == server.get("/v1/health").status_code == 200
    assert server.get("/nothing").status_code == 401
    assert server.post("/completion", {"prompt": "x"}).status_code == 401
