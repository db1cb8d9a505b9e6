"""docs/http.md: its endpoints, answers, flags, names and numbers are those of the server."""

import re
from pathlib import Path

import pytest

from graphseed.cli.serve.table import USED
from graphseed.cli.serve.unused import IGNORED, REFUSED
from graphseed.engine import EngineConfig
from graphseed.engine.chunks import plan_chunks
from graphseed.server.settings import ServerSettings
from tests.server.small import DEFAULTS, small_server

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/http.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"`(--?[a-z][\w.-]*)", text))


ANSWERS = section("Answers to try").partition("```\n")[2].partition("```")[0].splitlines()
REFUSALS, ACCEPTED = section("Flags").split("Everything else is accepted")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    settings = ServerSettings(
        num_predict=8, defaults=DEFAULTS, embeds=True, has_metrics=True,
        slot_save_path=tmp_path_factory.mktemp("slots"),
    )  # fmt: skip
    with small_server(settings) as small:
        yield small


def test_every_endpoint_is_named_and_no_other(server):
    paths = server.client.get("/openapi.json").json()["paths"]
    there = {f"{method.upper()} {path}" for path, found in paths.items() for method in found}
    named = re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", section("Endpoints"))
    assert sorted(named) == sorted(there)


@pytest.mark.parametrize("line", ANSWERS)
def test_an_answer_has_the_status_that_the_page_gives_it(server, line):
    status, path, body = line.split(" ", 2)
    reply = server.client.post(path, content=body.encode())
    assert reply.status_code == int(status), reply.text
    if status != "200":
        assert reply.json()["error"]["code"] == int(status)


def test_what_is_not_here_says_so(server):
    after = section("Endpoints").partition("Not here")[2]
    absent, disabled = after.split("Turned off")
    for text, status in ((absent, 501), (disabled, 403)):
        for method, path in re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", text):
            body = {"query": "a", "documents": ["b"]} if method == "POST" else None
            reply = server.client.request(method, path, json=body)
            assert reply.status_code == status, (method, path)


def test_refused_flags_are_refused_and_accepted_ones_mean_nothing_or_are_used():
    refused = {name for other in REFUSED for name in other.names}
    ignored = {name for other in IGNORED for name in other.names}
    used = {name for flag in USED for name in (*flag.names, *flag.off_names)}
    rows = "\n".join(line.split("|")[1] for line in REFUSALS.splitlines() if line.startswith("| `"))
    assert flags_in(rows) <= refused
    # One name of each of them is there, but for presets and what llama-server removed itself.
    for other in REFUSED:
        if not re.search("removed|name the model", other.why):
            assert flags_in(rows) & set(other.names), other.names
    assert flags_in(ACCEPTED) <= ignored
    own = REFUSALS.partition("flag that nobody knows is an error.")[2].partition("Every other")[0]
    for name in flags_in(own):
        assert [flag for flag in USED if name in flag.names and not flag.env], name
    elsewhere = TEXT.replace(section("Flags"), "")
    assert flags_in(elsewhere) <= used | ignored | {"--rerank", "--help"}


def test_fields_and_metrics_that_are_named_are_all_that_graphseed_adds(server):
    theirs = {
        "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second",
        "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
    }  # fmt: skip
    text = section("Prompt graphs on the wire")
    named = set(re.findall(r"`(\w+)`", text))
    timings = server.post("/completion", prompt="a", n_predict=1)["timings"]
    assert set(timings) - theirs <= named
    told = server.client.get("/prompt-graphs").json()
    columns = {"policy", "selected_by", "warnings", "summary", "namespaces", "identities",
               "alarms", "timeline"}  # fmt: skip
    assert columns <= named & set(told)
    props = server.client.get("/props").json()["prompt_graphs"]
    assert columns - {"timeline"} <= set(props) and "timeline" not in props
    families = set(re.findall(r"# TYPE (graphseed_\w+)", server.client.get("/metrics").text))
    assert families == {name for name in named if name.startswith("graphseed_")}


def test_a_prefix_is_cached_in_whole_blocks_of_the_length_that_is_told(server):
    block_len = server.core.config.block_len
    assert set(re.findall(r"blocks of (\d+) tokens", TEXT)) == {str(block_len)}
    for num_tokens, num_cached in ((block_len, 0), (block_len + 1, block_len)):
        ids = [40 + num_tokens] * num_tokens
        server.post("/completion", prompt=ids, n_predict=1)
        again = server.post("/completion", prompt=ids, n_predict=1)
        assert again["timings"]["cache_n"] == num_cached, num_tokens


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_seed_keeps_its_graphs_until_something_decodes_and_short_prompts_raise_an_alarm(
    make_server, max_tokens
):
    server = make_server("seed")
    for number in range(8):
        body = {"prompt": [40 + number] * 20, "n_predict": max_tokens, "ignore_eos": True}
        answer = server.post("/completion", body).json()
        is_kept = max_tokens == 1 and number > 0
        assert answer["timings"]["prompt_replayed"] == is_kept
    told = server.get("/prompt-graphs").json()
    alarms = [alarm for alarm in told["alarms"] if alarm["namespace"] == "prompt"]
    assert len(alarms) == (max_tokens > 1)


def test_the_shortest_prompt_that_seed_helps_is_longer_than_both_pages_say():
    def has_two_of_one_size(num_tokens: int) -> bool:
        sizes = [chunk.capacity for chunk in plan_chunks(num_tokens, EngineConfig().num_ubatch)]
        return len(sizes) > len(set(sizes))

    [told] = {int(n) for n in re.findall(r"up to (\d+) tokens", TEXT + README)}
    assert not any(has_two_of_one_size(num) for num in range(1, told + 1))
    assert has_two_of_one_size(told + 1)


def test_each_of_llama_cpp_s_tests_that_does_not_pass_is_one_that_is_run():
    names = (ROOT / "tests/server/peer_names.txt").read_text(encoding="utf-8").splitlines()
    listed = re.findall(r"`(unit/[^`]+)`", section("llama.cpp's own server tests"))
    assert listed and set(listed) <= set(names)
    assert f"the {len(names)} tests" in TEXT
    assert len(names) - len(set(listed)) >= 150


def test_numbers_of_limits_are_the_settings(server):
    settings, limits = ServerSettings(), section("Limits, and who may ask")
    assert f"`--max-waiting` ({server.core.config.max_waiting})" in limits
    assert f"`--max-body-bytes` ({settings.max_body_bytes >> 20} MiB)" in limits
    assert f"`-to` ({settings.timeout_seconds:.0f} s)" in limits
    assert f"`--sse-ping-interval` ({settings.sse_ping_seconds:.0f} s)" in limits
