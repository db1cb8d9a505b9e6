"""/metrics: llama-server's numbers and graphseed's own, as Prometheus reads them."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from graphseed.capture.identity import Namespace
from graphseed.engine import FinishReason, Request, SamplingParams, Status
from graphseed.server.watch.meters import Meters

COUNTERS = (
    "prompt_tokens_total", "prompt_tokens_cached_total", "prompt_seconds_total",
    "tokens_predicted_total", "tokens_predicted_seconds_total", "n_decode_total", "n_tokens_max",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_drafts_total",
)  # fmt: skip
GAUGES = (
    "prompt_tokens_seconds", "predicted_tokens_seconds", "requests_processing",
    "requests_deferred", "n_busy_slots_per_decode",
)  # fmt: skip
BODY = {"prompt": "x" * 70, "n_predict": 6, "cache_prompt": False, "temperature": 0}


def lines_of(text):
    """Values by name and labels, as a parser of plain lines sees them."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    assert len({name for name, _ in lines}) == len(lines)
    return {name: float(value) for name, value in lines}


def metrics_of(server):
    response = server.get("/metrics")
    assert response.status_code == 200
    return lines_of(response.text)


def test_without_the_flag_there_are_no_metrics(server):
    response = server.get("/metrics")
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"
    assert "--metrics" in response.json()["error"]["message"]


def test_names_and_types_are_llama_servers(make_server):
    server = make_server(has_metrics=True)
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    started = server.state.started_at.timestamp()
    assert abs(int(response.headers["process-start-time-unix"]) - started) <= 1
    for names, kind in ((COUNTERS, "counter"), (GAUGES, "gauge")):
        for name in names:
            assert f"\n# TYPE llamacpp:{name} {kind}\n" in response.text
            assert f"# HELP llamacpp:{name} " in response.text
            assert f"\nllamacpp:{name} 0.0\n" in response.text


def test_prometheus_own_parser_reads_all_of_it_and_finds_no_creation_times(make_server):
    server = make_server(has_metrics=True, policy="seed")
    server.post("/completion", BODY)
    families = list(text_string_to_metric_families(server.get("/metrics").text))
    names = {family.name for family in families}
    assert len(names) == len(families)
    assert {"graphseed_replayed", "graphseed_capture_seconds", "graphseed_bytes_held"} <= names
    assert not [sample for f in families for sample in f.samples if "_created" in sample.name]
    assert {f.type for f in families} == {"counter", "gauge", "histogram"}


def test_sums_are_those_of_the_timings(make_server):
    server = make_server(has_metrics=True)
    bodies = [{**BODY, "n_predict": number, "cache_prompt": True} for number in (1, 4, 16)]
    timings = [server.post("/completion", body).json()["timings"] for body in bodies]
    assert sum(one["cache_n"] for one in timings) > 0
    metrics = metrics_of(server)
    for name, field, unit in (
        ("prompt_tokens_total", "prompt_n", 1), ("prompt_tokens_cached_total", "cache_n", 1),
        ("tokens_predicted_total", "predicted_n", 1), ("prompt_seconds_total", "prompt_ms", 1e3),
        ("tokens_predicted_seconds_total", "predicted_ms", 1e3),
    ):  # fmt: skip
        # The same numbers, added up in seconds rather than milliseconds.
        expected = sum(one[field] for one in timings) / unit
        assert metrics[f"llamacpp:{name}"] == pytest.approx(expected, rel=1e-9)
    assert metrics["llamacpp:n_tokens_max"] == 70 + 16
    assert metrics["llamacpp:requests_processing"] == metrics["llamacpp:requests_deferred"] == 0


def test_rates_are_of_the_time_since_the_last_scrape_and_leave_out_the_first_token(make_server):
    server = make_server(has_metrics=True)
    timings = server.post("/completion", BODY).json()["timings"]
    first, second = metrics_of(server), metrics_of(server)
    for name, field in (
        ("prompt_tokens_seconds", "prompt_per_second"),
        ("predicted_tokens_seconds", "predicted_per_second"),
    ):
        # The same quotient, in seconds rather than milliseconds.
        assert first[f"llamacpp:{name}"] == pytest.approx(timings[field], rel=1e-9)
        assert second[f"llamacpp:{name}"] == 0
    for name in ("prompt_tokens_total", "tokens_predicted_seconds_total"):
        assert first[f"llamacpp:{name}"] == second[f"llamacpp:{name}"] > 0


@pytest.mark.parametrize("policy", ["off", "seed", "resident"])
def test_I10_counters_of_graphs_are_the_tallys(make_server, policy):
    server = make_server(has_metrics=True, policy=policy)
    for _ in range(2):
        server.post("/completion", BODY)
    server.engine.call(lambda: server.engine.core.settle())
    metrics = metrics_of(server)
    num_steps = 0
    for namespace in Namespace:
        counts, label = server.engine.core.tally.counts[namespace], f'namespace="{namespace.value}"'

        def total(family, label=label):
            return sum(
                value
                for name, value in metrics.items()
                if name.split("{")[0] == family and label in name
            )

        assert total("graphseed_replayed_total") == counts.replayed
        assert total("graphseed_direct_total") == counts.direct
        assert total("graphseed_seeded_total") == counts.seeded
        assert total("graphseed_released_total") == counts.released
        assert total("graphseed_bytes_held") == counts.bytes
        assert total("graphseed_capture_seconds_count") == counts.seeded
        assert total("graphseed_instantiate_seconds_count") == counts.seeded
        assert total("graphseed_step_host_seconds_count") == counts.candidates
        num_steps += counts.candidates
    assert metrics["llamacpp:n_decode_total"] == num_steps
    assert metrics["llamacpp:n_busy_slots_per_decode"] == 1


def test_replayed_prompts_have_a_histogram_of_their_own(make_server):
    server = make_server(has_metrics=True, policy="resident")
    server.post("/completion", BODY)
    server.engine.call(lambda: server.engine.core.settle())
    ms = [server.post("/completion", BODY).json()["timings"]["prompt_ms"] for _ in range(2)]
    metrics = metrics_of(server)
    label = 'answered="replayed"'
    assert metrics[f"graphseed_prompt_seconds_count{{{label}}}"] == 2
    seconds = metrics[f"graphseed_prompt_seconds_sum{{{label}}}"]
    assert seconds == pytest.approx(sum(ms) / 1e3, rel=1e-9)  # added up in other units
    assert metrics['graphseed_requests_total{end="limit"}'] == 3
    assert metrics["graphseed_queue_seconds_count"] == 3


def test_an_embedding_counts_its_prompt_and_no_token(make_server):
    server = make_server(has_metrics=True, embeds=True)
    response = server.post("/v1/embeddings", {"input": ["hello world", "goodbye"]})
    assert response.status_code == 200, response.text
    metrics = metrics_of(server)
    assert metrics["llamacpp:prompt_tokens_total"] == response.json()["usage"]["prompt_tokens"]
    assert metrics["llamacpp:n_decode_total"] > 0
    assert metrics["llamacpp:tokens_predicted_total"] == 0
    assert metrics['graphseed_requests_total{end="embedding"}'] == 2


def test_a_request_that_was_given_up_in_its_prompt_is_counted_apart():
    meters = Meters()
    request = Request((1, 2, 3), SamplingParams())
    request.timings.started_ns = request.timings.submitted_ns + 1000
    request.move(Status.PREFILL)
    meters.record(request)
    metrics = lines_of(meters.text(None))
    assert metrics["llamacpp:prompt_tokens_total"] == 0
    assert metrics['graphseed_requests_total{end="given up"}'] == 1


def test_a_request_that_failed_after_tokens_counts_what_it_got():
    meters = Meters()
    request = Request((1, 2, 3), SamplingParams(), output_ids=[5, 6])
    at = request.timings
    at.started_ns = at.submitted_ns + 1000
    at.first_token_ns, at.finished_ns = at.started_ns + 2000, at.started_ns + 5000
    request.status = Status.FAILED
    meters.record(request)
    metrics = lines_of(meters.text(None))
    assert metrics["llamacpp:prompt_tokens_total"] == 3
    assert metrics["llamacpp:tokens_predicted_total"] == 2
    assert metrics['graphseed_requests_total{end="failed"}'] == 1


def test_two_servers_count_for_themselves():
    one, other = Meters(), Meters()
    request = Request((1,), SamplingParams(), output_ids=[5], finish_reason=FinishReason.MAX_TOKENS)
    request.status = Status.FINISHED
    one.record(request)
    assert 'graphseed_requests_total{end="limit"} 1.0' in one.text(None)
    assert "graphseed_requests_total{" not in other.text(None)


@pytest.mark.anyio
async def test_while_the_model_sleeps_what_was_before_is_told_and_nothing_wakes_it(make_server):
    server = make_server(has_metrics=True, policy="resident", sleep_idle_seconds=0.3)
    async with server.client() as http:
        await http.post("/completion", json=BODY)
        async with asyncio.timeout(20):  # what was observed is captured when the engine is idle
            while server.engine.core.tally.counts[Namespace.PROMPT].seeded < 2:
                await asyncio.sleep(0.01)
        await http.get("/metrics")
        awake = (await http.get("/metrics")).text
        task = asyncio.create_task(server.lifecycle.sleep_when_idle())
        async with asyncio.timeout(20):
            while not (server.state.is_sleeping and server.state.served is None):
                await asyncio.sleep(0.01)
        task.cancel()
        assert (await http.get("/metrics")).text == awake
        assert server.state.is_sleeping
        await server.lifecycle.load()
        again = lines_of((await http.get("/metrics")).text)
        assert again["llamacpp:tokens_predicted_total"] == 6  # sums go on
        assert again['graphseed_bytes_held{namespace="prompt"}'] == 0
