"""What every request goes through: errors as objects, limits, CORS, the log line, the document."""

import json
import logging
import re
import socket
import time

import httpx
import pytest

from graphseed.server.middleware import JSON_TYPE
from tests.server.small import listening

PROMPT = {"prompt": "a secret prompt", "n_predict": 4}


def error_of(response):
    assert response.headers["content-type"] == JSON_TYPE
    body = response.json()
    assert set(body) == {"error"} and body["error"]["code"] == response.status_code
    return body["error"]


@pytest.mark.parametrize("path", ["/nothing", "/health/", "/v1", "/slots/0/x", "/%2e%2e/etc"])
def test_what_is_not_there_is_a_404_error_object(server, path):
    error = error_of(server.get(path))
    assert error == {"code": 404, "message": "File Not Found", "type": "not_found_error"}


def test_a_method_that_is_not_there_is_a_405_error_object_that_says_which_are(server):
    response = server.http.delete("/health")
    assert response.status_code == 405 and response.headers["allow"] == "GET"
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"{", b"", b"{'prompt': 1}", b"\xff\xfe"])
def test_a_body_that_is_no_json_is_a_500_server_error_as_llama_server_has_it(server, body):
    error = error_of(server.http.post("/completion", content=body))
    assert error["code"] == 500 and error["type"] == "server_error"
    assert "Traceback" not in error["message"]


def test_the_content_type_of_a_body_does_not_matter(server):
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = server.http.post(
            "/completion", content=json.dumps(PROMPT), headers={"content-type": kind}
        )
        assert response.status_code == 200


def test_a_body_above_the_limit_is_a_413_error_object_and_is_not_read(make_server):
    server = make_server(max_body_bytes=1000)
    response = server.http.post("/completion", content=b"x" * 1001)
    assert response.status_code == 413
    assert "larger than 1000 bytes" in error_of(response)["message"]
    assert server.post("/completion", PROMPT).status_code == 200


def test_a_body_without_a_length_is_cut_off_at_the_limit(make_server):
    server = make_server(max_body_bytes=1000)
    num_read = 0

    def endless():
        nonlocal num_read
        while num_read < 100:
            num_read += 1
            yield b"x" * 100

    response = server.http.post("/completion", content=endless())
    assert response.status_code == 413
    assert error_of(response)["type"] == "invalid_request_error"


def test_a_fault_of_ours_tells_the_client_nothing_and_the_log_everything(server, caplog):
    @server.app.fastapi.get("/fault")
    async def fault() -> None:
        raise ZeroDivisionError("the secret reason")

    response = server.get("/fault")
    error = error_of(response)
    assert response.status_code == 500 and error["type"] == "server_error"
    assert "secret" not in response.text and "ZeroDivision" not in response.text
    assert response.headers["x-request-id"] in caplog.text
    assert "ZeroDivisionError: the secret reason" in caplog.text


def test_a_fault_on_the_short_way_is_told_alike(server, caplog, monkeypatch):
    def fault(*_: object) -> None:
        raise ZeroDivisionError("the secret reason")

    monkeypatch.setattr("graphseed.server.text.completions.parse", fault)
    response = server.post("/completion", {"prompt": "a"})
    assert response.status_code == 500 and error_of(response)["type"] == "server_error"
    assert "secret" not in response.text and "ZeroDivision" not in response.text
    assert "ZeroDivisionError: the secret reason" in caplog.text


@pytest.mark.parametrize("path", ["/completion", "/prompt-graphs/release"])
def test_a_client_that_leaves_within_its_body_is_no_fault_of_ours(server, caplog, path):
    caplog.set_level(logging.INFO)
    with listening(server.app) as address:
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: left\r\n"
            client.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            time.sleep(0.1)
        until = time.monotonic() + 5
        while "id=left" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert f"id=left method=POST path={path} status=none" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_headers_are_written_as_llama_server_writes_them(make_server, loop):
    server = make_server(has_metrics=True)
    origin = {"Origin": "web.mydomain.fr"}
    with listening(server.app, loop=loop) as address:
        answers = [
            httpx.options(f"{address}/completion", headers=origin),
            httpx.get(f"{address}/metrics"),
            httpx.post(f"{address}/completion", json=PROMPT),
            httpx.post(f"{address}/completion", json={**PROMPT, "stream": True}),
        ]
    preflight, metrics, answer, stream = (dict(one.headers.raw) for one in answers)
    assert preflight[b"Access-Control-Allow-Origin"] == b"web.mydomain.fr"
    assert preflight[b"Access-Control-Allow-Headers"] == b"*"
    assert int(metrics[b"Process-Start-Time-Unix"]) > 0
    for headers in (answer, stream):
        assert len(headers[b"X-Request-Id"]) == 16 and b"Content-Type" in headers


def test_an_origin_is_echoed_and_a_preflight_answered_for_any_path_without_a_key(make_server):
    server = make_server(api_keys=("k",))
    response = server.http.options("/completions", headers={"Origin": "web.mydomain.fr"})
    assert response.status_code == 200 and not response.content
    assert response.headers["access-control-allow-origin"] == "web.mydomain.fr"
    assert response.headers["access-control-allow-credentials"] == "true"
    assert response.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert response.headers["access-control-allow-headers"] == "*"
    refused = server.get("/props", headers={"Origin": "http://x"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://x"
    assert "access-control-allow-origin" not in server.get("/health").headers


def test_every_answer_has_an_id_and_a_client_may_choose_it(server):
    chosen = server.get("/health", headers={"X-Request-Id": "mine-1"})
    assert chosen.headers["x-request-id"] == "mine-1"
    ids = {server.get("/health", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"]}
    ids |= {server.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 4 and all(re.fullmatch(r"[0-9a-f]{16}", number) for number in ids)


def test_one_line_tells_of_a_request_and_never_of_its_prompt(server, caplog):
    caplog.set_level(logging.INFO, logger="graphseed.server")
    response = server.post("/completion", PROMPT)
    number = response.headers["x-request-id"]
    lines = [line for line in caplog.messages if f"id={number}" in line]
    assert len(lines) == 1
    assert re.fullmatch(
        rf"request id={number} method=POST path=/completion status=200 ms=[\d.]+ "
        r"prompt_tokens=\d+ cached_tokens=0 new_tokens=4 slot=0 queue_ms=[\d.]+",
        lines[0],
    )
    assert "secret" not in caplog.text
    server.get("/health")
    assert "/health" not in caplog.text


def test_a_prompt_is_logged_where_it_was_asked_for(make_server, caplog):
    caplog.set_level(logging.INFO, logger="graphseed.server")
    make_server(logs_prompts=True).post("/completion", PROMPT)
    assert 'prompt="a secret prompt"' in caplog.text


def test_a_path_cannot_forge_log_lines(server, caplog):
    caplog.set_level(logging.INFO, logger="graphseed.server")
    server.get("/x%0Arequest%20id=forged")
    assert "\n" not in [line for line in caplog.messages if "path=/x" in line][0]


def test_a_prefix_stands_before_every_path(make_server):
    from starlette.testclient import TestClient

    from graphseed.server.app import create_app

    server = make_server()
    http = TestClient(create_app(server.state, prefix="/llm"))
    assert http.get("/llm/health").status_code == 200
    assert http.get("/health").status_code == 404
    assert http.get("/llmhealth").status_code == 404


def test_the_document_declares_what_can_happen_and_no_422(server):
    document = server.get("/openapi.json").json()
    assert {"/health", "/v1/models", "/props", "/slots", "/completion"} <= set(document["paths"])
    for path, operations in document["paths"].items():
        for operation in operations.values():
            statuses = set(operation["responses"])
            assert "422" not in statuses
            assert {"200", "401", "413", "500", "503"} <= statuses, path


def test_what_llama_server_has_and_this_server_has_not_says_so(server):
    for path in ("/v1/audio/transcriptions", "/models/load", "/v1/streams/lookup"):
        error = error_of(server.post(path, {}))
        assert error["code"] == 501 and f"{path} is not here: " in error["message"]
    assert error_of(server.get("/lora-adapters"))["type"] == "not_supported_error"
    for path in ("/tools", "/cors-proxy?url=http://127.0.0.1"):
        assert error_of(server.get(path))["type"] == "permission_error"
