"""/prompt-graphs, and the watch behind it."""

import asyncio
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from graphseed.capture import Policy, Selection
from graphseed.capture.cache import GraphCache
from graphseed.capture.errors import CannotCapture, Reason
from graphseed.capture.identity import FirstNode, GraphIdentity, Namespace
from graphseed.capture.tally import Tally
from graphseed.engine import EngineConfig
from graphseed.server.app import create_app
from graphseed.server.ledger import Ledger
from graphseed.server.settings import ServerSettings
from graphseed.server.state import ServerState
from graphseed.server.watch.graph_values import Kind
from graphseed.server.watch.graph_watch import MAX_ROWS, GraphWatch
from graphseed.server.watch.prompt_graphs import GraphsShape, ReleasesShape
from graphseed.testing import ScriptedDriver
from tests.server.conftest import SELECTIONS, load_served

# 70 tokens in chunks of 32: three, of which two are alike.
THREE_CHUNKS = {"prompt": "x" * 70, "n_predict": 4, "cache_prompt": False, "temperature": 0}
ONE_CHUNK = {**THREE_CHUNKS, "prompt": "x" * 20}


def graphs_of(server, after=0, **more):
    response = server.get(f"/prompt-graphs?after={after}", **more)
    assert response.status_code == 200, response.text
    return response.json()


def told(graphs, namespace="prompt"):
    return [one["kind"] for one in graphs["timeline"] if one["namespace"] == namespace]


class Steps:
    """A cache under a scripted driver, whose steps a watch sees as an engine's."""

    def __init__(self, watch, policy, decode=Policy.SEED):
        self.driver = ScriptedDriver()
        self.cache = GraphCache(self.driver, Selection(policy, decode, was_asked=True))
        tally = Tally(self.driver.device)
        self.cache.log.subscribe(tally)
        self.core = SimpleNamespace(
            cache=self.cache, log=self.cache.log, tally=tally, observer=None
        )
        watch.attach(SimpleNamespace(engine=SimpleNamespace(core=self.core)))

    def run(self, tokens=8, namespace=Namespace.PROMPT, error=None):
        first = FirstNode("aten.embedding", (tokens, 4), "float32")
        structure = (("tokens", tokens), ("batch", 1), ("reads", "logits"))
        identity = GraphIdentity(namespace, self.driver.device, first, structure)
        plan = SimpleNamespace(num_tokens=tokens, seq_capacity=1)
        self.core.observer.before(plan)
        self.cache.run(identity, self.driver.work(error=error))
        self.core.observer.after(plan, None)


@pytest.mark.parametrize("policy", ["off", "seed", "resident"])
def test_I10_rows_summary_and_timeline_count_the_same(make_server, policy):
    server = make_server(policy=policy)
    for _ in range(2):
        assert server.post("/completion", THREE_CHUNKS).status_code == 200
    graphs = graphs_of(server)
    GraphsShape.model_validate(graphs, strict=True)
    tally = server.engine.core.tally
    assert graphs["summary"] == [tally.line(namespace) for namespace in Namespace]
    assert graphs["policy"] == policy
    for name, counts in graphs["namespaces"].items():
        rows = [row for row in graphs["identities"] if row["namespace"] == name]
        for field in ("direct", "seeded", "replayed", "bytes"):
            assert sum(row[field] for row in rows) == counts[field], field
        assert sum(row["observations"] for row in rows) == counts["candidates"]
        seen = [one for one in graphs["timeline"] if one["namespace"] == name and one["tokens"]]
        assert sum(one["count"] for one in seen) == counts["candidates"]
        assert sum(one["tokens"] for one in seen) == counts["tokens"]
    assert graphs["namespaces"]["prompt"]["tokens"] == 2 * 70  # without padding


def test_I2_I5_under_seed_the_first_is_seeded_the_next_replayed_and_all_is_released(make_server):
    server = make_server(policy="seed")
    server.post("/completion", THREE_CHUNKS)
    graphs = graphs_of(server)
    assert told(graphs) == ["seeded", "replayed", "seeded", "released"]
    first, _, _, released = [o for o in graphs["timeline"] if o["namespace"] == "prompt"]
    assert first["capture_ms"] > 0 and first["host_ms"] > 0 and first["tokens"] == 32
    assert released["why"] == "first batch-one decode graph (2 held)"
    rows = [row for row in graphs["identities"] if row["namespace"] == "prompt"]
    assert [(row["state"], row["bytes"]) for row in rows] == [("released", 0)] * 2
    assert {row["last_reason"] for row in rows} == {"released: first batch-one decode graph"}
    assert all(row["nodes"] > 0 and row["capture_ms"] > 0 for row in rows)
    assert told(graphs, "decode")[0] == "seeded"


def test_under_resident_what_is_captured_between_steps_is_told_and_kept(make_server):
    server = make_server(policy="resident")
    server.post("/completion", THREE_CHUNKS)
    until = time.monotonic() + 10
    while server.engine.core.tally.counts[Namespace.PROMPT].seeded < 2:  # captured when idle
        assert time.monotonic() < until
        time.sleep(0.01)
    before = graphs_of(server)
    assert told(before)[:3] == ["direct", "seeded", "replayed"]
    server.post("/completion", THREE_CHUNKS)
    after = graphs_of(server, before["seq"])
    assert told(after) == ["replayed"] * 3
    rows = [row for row in after["identities"] if row["namespace"] == "prompt"]
    assert {row["state"] for row in rows} == {"proven"}
    assert all(row["replay_ms"] > 0 and row["direct_ms"] > 0 for row in rows)
    assert after["namespaces"]["prompt"]["hit_rate"] == 4 / 6
    assert after["namespaces"]["prompt"]["bytes"] > 0


def test_after_a_seq_only_what_changed_is_told(make_server):
    server = make_server(policy="resident")
    server.post("/completion", ONE_CHUNK)
    server.engine.call(lambda: server.engine.core.settle())
    first = graphs_of(server)
    again = graphs_of(server, first["seq"])
    assert again["timeline"] == [] and again["identities"] == [] and again["missed"] == 0
    assert again["seq"] == first["seq"] and again["epoch"] == first["epoch"]
    server.post("/completion", {**ONE_CHUNK, "n_predict": 1})
    changed = graphs_of(server, first["seq"])
    assert told(changed) == ["replayed"] and told(changed, "decode") == []
    assert [row["namespace"] for row in changed["identities"]] == ["prompt"]
    assert changed["seq"] == first["seq"] + 1


@pytest.mark.parametrize("query", ["after=-1", "after=x", f"after={1 << 60}"])
def test_a_seq_that_is_none_is_the_clients_error(server, query):
    response = server.get(f"/prompt-graphs?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("after is")


def test_graphs_are_given_back_on_request_and_seen_to_come_back(make_server):
    server = make_server(policy="resident")
    server.post("/completion", THREE_CHUNKS)
    server.engine.call(lambda: server.engine.core.settle())
    held = graphs_of(server)["namespaces"]
    assert held["prompt"]["bytes"] > 0 and held["decode"]["bytes"] > 0
    answer = server.post("/prompt-graphs/release", {"namespace": "prompt"}).json()
    ReleasesShape.model_validate(answer, strict=True)
    (one,) = answer["released"]
    assert one["namespace"] == "prompt" and one["entries"] == 2
    assert one["bytes_held"] == one["bytes_returned"] == held["prompt"]["bytes"]
    graphs = graphs_of(server)
    assert graphs["namespaces"]["prompt"]["bytes"] == 0
    assert graphs["namespaces"]["decode"]["bytes"] == held["decode"]["bytes"]
    assert told(graphs)[-1] == "released"
    rest = server.http.post("/prompt-graphs/release").json()["released"]  # without a body: both
    assert [(one["namespace"], one["entries"]) for one in rest] == [("prompt", 0), ("decode", 1)]
    content = server.post("/completion", THREE_CHUNKS).json()["content"]
    server.post("/prompt-graphs/release", {})
    assert server.post("/completion", THREE_CHUNKS).json()["content"] == content


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"namespace": "prefill"}', 400), ('{"namespace": 3}', 400), ("[]", 400), ("{", 500),
        ('{"namespace": null}', 200), ('{"other": 1}', 200), (" ", 200),
    ],
)  # fmt: skip
def test_a_release_takes_a_namespace_and_nothing_else(server, body, status):
    response = server.http.post("/prompt-graphs/release", content=body)
    assert response.status_code == status
    if status == 400:
        assert "expected" in response.json()["error"]["message"]


def test_a_release_needs_the_key_where_one_is_set(make_server):
    server = make_server(api_keys=("secret",))
    refused = server.post("/prompt-graphs/release", {})
    assert refused.status_code == 401 and server.get("/prompt-graphs").status_code == 401
    key = {"Authorization": "Bearer secret"}
    assert server.post("/prompt-graphs/release", {}, headers=key).status_code == 200
    assert graphs_of(server, headers=key)["policy"] == "off"


def test_asking_does_not_wait_for_a_running_step(make_server):
    server = make_server(policy="seed")
    engine, gate, entered = server.engine, threading.Event(), threading.Event()

    def block():
        entered.set()
        gate.wait(10)

    thread = threading.Thread(target=engine.call, args=(block,))
    thread.start()
    try:
        assert entered.wait(10)
        start = time.monotonic()
        graphs_of(server)
        assert server.get("/props").status_code == 200
        assert time.monotonic() - start < 5 and not gate.is_set()
    finally:
        gate.set()
        thread.join()


def test_props_have_the_rows_and_the_summary(make_server):
    server = make_server(policy="seed")
    server.post("/completion", ONE_CHUNK)
    graphs, props = graphs_of(server), server.get("/props").json()["prompt_graphs"]
    assert props["identities"] == graphs["identities"] != []
    for name in ("policy", "selected_by", "decode_graphs", "warnings", "summary", "namespaces"):
        assert props[name] == graphs[name]


def test_I10_an_alarm_is_told_until_a_replay_answers_it(make_server):
    server = make_server(policy="seed")
    for _ in range(8):
        server.post("/completion", {**ONE_CHUNK, "n_predict": 2})
    (alarm,) = graphs_of(server)["alarms"]
    assert alarm["namespace"] == "prompt" and alarm["is_active"] is True
    assert "released before it was seen again" in alarm["message"]
    server.post("/completion", {**THREE_CHUNKS, "n_predict": 1})
    (alarm,) = graphs_of(server)["alarms"]
    assert alarm["is_active"] is False


def test_the_observer_that_was_there_before_still_sees_every_step():
    made = []
    seen = SimpleNamespace(before=made.append, after=lambda plan, logits: made.append(plan))
    served = load_served(Ledger(), "off", "tiny-llama", EngineConfig(context_len=64))
    try:
        served.engine.core.observer = seen
        state = ServerState(ServerSettings(), SELECTIONS["off"], "b0-test", "tiny", served=served)
        http = TestClient(create_app(state))
        http.post("/completion", json=ONE_CHUNK)
        counts = http.get("/prompt-graphs").json()["namespaces"]
    finally:
        served.engine.close()
    assert len(made) == 2 * sum(one["candidates"] for one in counts.values()) > 2


@pytest.mark.anyio
async def test_a_sleeping_engine_is_not_kept_and_its_rows_are_told(make_server):
    server = make_server(policy="resident", sleep_idle_seconds=0.2)
    async with server.client() as http:
        await http.post("/completion", json=ONE_CHUNK)
        core = weakref.ref(server.engine.core)
        epoch = (await http.get("/prompt-graphs")).json()["epoch"]
        task = asyncio.create_task(server.lifecycle.sleep_when_idle())
        async with asyncio.timeout(20):
            while core() is not None:  # nothing of ours keeps it
                await asyncio.sleep(0.01)
                gc.collect()
        task.cancel()
        graphs = (await http.get("/prompt-graphs")).json()
        assert graphs["is_sleeping"] and graphs["epoch"] == epoch
        assert {row["state"] for row in graphs["identities"]} == {"released"}
        answer = (await http.post("/prompt-graphs/release", json={})).json()
        assert [one["entries"] for one in answer["released"]] == [0, 0]
        assert server.state.is_sleeping  # none of these woke it
        await server.lifecycle.load()
        awake = (await http.get("/prompt-graphs")).json()
        assert awake["epoch"] == epoch + 1 and awake["identities"] == []
        assert told(awake)[-1] == "released"  # the timeline goes on


def test_I8_a_refusal_is_told_with_its_reason():
    watch = GraphWatch()
    steps = Steps(watch, Policy.SEED)
    steps.driver.refusals = [CannotCapture(Reason.HOST_SYNC, ".item() in layer 3")]
    steps.run()
    steps.run()
    seen = watch.seen()
    assert [one.kind for one in seen.observations] == [Kind.REFUSED, Kind.REFUSED]
    assert seen.observations[0].why == "host synchronisation: .item() in layer 3"
    (row,) = seen.rows
    assert row.state.value == "refused" and row.num_direct == 2 and row.num_seeded == 0


def test_I8_a_refusal_between_steps_is_told_too():
    watch = GraphWatch()
    steps = Steps(watch, Policy.RESIDENT)
    steps.driver.refusals = [CannotCapture(Reason.OUT_OF_MEMORY, "2 GiB asked for")]
    steps.run()
    steps.driver.synchronize()
    steps.cache.settle()
    assert [one.kind for one in watch.seen().observations] == [Kind.DIRECT, Kind.REFUSED]
    (row,) = watch.seen().rows
    assert row.state.value == "refused" and row.last_reason == "out of memory: 2 GiB asked for"


def test_a_step_that_raised_is_no_observation_and_the_next_is_told_right():
    watch = GraphWatch()
    steps = Steps(watch, Policy.SEED)
    with pytest.raises(ValueError, match="no"):
        steps.run(error=ValueError("no"))
    assert [one.kind for one in watch.seen().observations] == [Kind.RELEASED]
    steps.run()
    steps.run()
    kinds = [one.kind for one in watch.seen().observations]
    assert kinds == [Kind.RELEASED, Kind.SEEDED, Kind.REPLAYED]


def test_the_timeline_is_bounded_and_says_what_was_missed():
    watch = GraphWatch(max_observations=4)
    steps = Steps(watch, Policy.SEED)
    for _ in range(3):
        steps.run()
    seq = watch.seen().seq
    assert seq == 3 and watch.seen().num_missed == 0
    for _ in range(6):
        steps.run()
    seen = watch.seen(seq)
    assert [one.seq for one in seen.observations] == [6, 7, 8, 9] and seen.num_missed == 2


def test_decode_steps_that_are_alike_are_told_together_and_none_is_lost():
    watch = GraphWatch()
    steps = Steps(watch, Policy.SEED)
    for _ in range(50):
        steps.run(1, Namespace.DECODE)
    seen = watch.seen()
    assert sum(one.count for one in seen.observations) == 50
    assert len(seen.observations) < 50  # 50 scripted steps take far less than 50 quarter seconds
    assert seen.rows[0].seq <= seen.seq
    steps.run(1, Namespace.DECODE)
    more = watch.seen(seen.seq)
    assert [one.count for one in more.observations] == [1] and len(more.rows) == 1


def test_rows_are_bounded():
    watch = GraphWatch()
    steps = Steps(watch, Policy.OFF)
    for tokens in range(1, MAX_ROWS + 10):
        steps.run(tokens)
    rows = watch.seen().rows
    assert len(rows) == MAX_ROWS and rows[-1].identity.get("tokens") == MAX_ROWS + 9


def test_readers_on_other_threads_miss_nothing_and_see_nothing_twice():
    watch = GraphWatch()
    steps = Steps(watch, Policy.SEED)
    seen, is_done = [], threading.Event()

    def read():
        seq = 0
        while True:
            was_done = is_done.is_set()
            got = watch.seen(seq)
            seq = got.seq
            seen.extend(got.observations)
            if was_done:
                return

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(500):
        steps.run()
        steps.run(1, Namespace.DECODE)
    is_done.set()
    thread.join()
    assert [one.seq for one in seen] == list(range(1, len(seen) + 1))
    assert sum(one.count for one in seen if one.tokens) == 1000
