"""README's server commands and requests run as they are written, and give what it says."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("\n## Serve\n")[2].partition("\n## ")[0]
ADDRESS = "http://127.0.0.1:8080"  # as README has it
MODEL = "smollm2"
SEED, RESIDENT = re.findall(r"^.*\bgraphseed serve -m smollm2.*$", SECTION, re.MULTILINE)
[SHELL] = re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)
[PYTHON] = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
COMPLETION, CHAT, STREAM, SCHEMA, EMBEDDINGS = SHELL.strip().split("\n\n")


@dataclass(frozen=True)
class Served:
    """A command of README in a process of its own; port and model are the test's."""

    address: str
    model: str

    def answer(self, command: str) -> str:
        """What a shell command of README prints."""
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        done = subprocess.run(
            ["bash", "-c", command.replace(ADDRESS, self.address)],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return done.stdout

    def json(self, command: str) -> Any:
        return json.loads(self.answer(command))

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.address}{path}", timeout=30) as response:
            return str(response.read().decode())


@contextmanager
def started(command: str, model: str, log: Path) -> Iterator[Served]:
    """Run one of README's commands, with a seed: the same answers in each run.

    A random model writes bytes that are no text, and what its grammar takes for one character can
    be four that nobody reads: a text of at most 20 characters then has more.
    """
    words = shlex.split(command)
    given = [word for word in words if re.match(r"[A-Z_]+=", word)]
    flags = words[len(given) + 1 :]
    assert words[len(given)] == "graphseed" and flags.count(MODEL) == 1
    flags[flags.index(MODEL)] = model
    inherited = {name: value for name, value in os.environ.items() if name[:9] != "GGML_CUDA"}
    environ = inherited | dict(word.split("=", 1) for word in given)
    with log.open("w", encoding="utf-8") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "graphseed.cli.main", *flags,
             "--port", "0", "--device", "cpu", "-t", "1", "--seed", "1"],
            stdout=subprocess.DEVNULL, stderr=err,
            env={**environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
    try:
        address = wait_for(process, log, r"listening on (http://\S+)").group(1)
        wait_for(process, log, "the model is loaded: ready")
        yield Served(address, model)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text(encoding="utf-8")
    finally:
        process.kill()
        process.wait()


def wait_for(process: subprocess.Popen[bytes], log: Path, pattern: str) -> re.Match[str]:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        text = log.read_text(encoding="utf-8")
        found = re.search(pattern, text)
        if found:
            return found
        assert process.poll() is None, text
        time.sleep(0.02)
    raise TimeoutError(log.read_text(encoding="utf-8"))


MODELS = ["random:tiny-llama", pytest.param(MODEL, marks=pytest.mark.model)]


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Served]:
    with started(RESIDENT, request.param, tmp_path_factory.mktemp("serve") / "log") as running:
        yield running


def test_the_completion_has_its_text_and_timings_and_the_real_model_knows_paris(served):
    answer = served.json(COMPLETION)
    assert answer["stop"] and 1 <= answer["tokens_predicted"] <= 8
    assert answer["timings"]["prompt_observations"] == 1
    assert {"prompt_seeded", "prompt_replayed", "queue_ms", "prompt_ms"} <= set(answer["timings"])
    if served.model == MODEL:
        assert answer["content"].startswith(" Paris")


def test_the_chat_is_answered_by_the_assistant(served):
    answer = served.json(CHAT)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert 1 <= answer["usage"]["completion_tokens"] <= 32
    if served.model == MODEL:
        assert len(answer["choices"][0]["message"]["content"].split()) > 3


def test_the_stream_ends_with_done_and_each_event_before_it_is_a_chunk(served):
    *events, end = served.answer(STREAM).split("\n\n")[:-1]
    assert end == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_answer_under_a_schema_is_json_of_that_schema(served):
    assert_animal(served.json(SCHEMA)["choices"][0]["message"]["content"])


def test_there_is_an_embedding_for_each_input_of_length_one(served):
    data = served.json(EMBEDDINGS)["data"]
    assert [item["index"] for item in data] == [0, 1]
    for item in data:
        # fp32 or bf16 hidden states, divided in float64: rounding of the written floats is left.
        assert sum(x * x for x in item["embedding"]) == pytest.approx(1.0, abs=1e-4)


def test_openai_s_client_gives_the_same_kinds_of_answers(served):
    printed: list[Any] = []
    names = {"print": lambda *values, **_: printed.extend(values)}
    exec(compile(PYTHON.replace(ADDRESS, served.address), "README.md", "exec"), names)
    france, chat, *chunks, animal, num_embeddings = printed
    assert chat and "".join(chunks)
    assert_animal(animal)
    assert num_embeddings == 2
    if served.model == MODEL:
        assert france.startswith(" Paris")


def test_page_prompt_graphs_props_and_metrics_are_where_the_text_says(served):
    assert "<title>graphseed</title>" in served.get("/")
    assert json.loads(served.get("/prompt-graphs"))["policy"] == "resident"
    assert json.loads(served.get("/props"))["prompt_graphs"]["policy"] == "resident"
    assert "graphseed_replayed_total" in served.get("/metrics")


def test_the_other_command_is_selected_by_its_variable_and_replays_nothing_of_a_short_prompt(
    tmp_path,
):
    [name] = re.findall(r"^([A-Z_]+=1) ", SEED)
    with started(SEED, "random:tiny-llama", tmp_path / "log") as served:
        timings = served.json(COMPLETION)["timings"]
        assert (timings["prompt_seeded"], timings["prompt_replayed"]) == (1, 0)
        told = json.loads(served.get("/prompt-graphs"))
        assert (told["policy"], told["selected_by"]) == ("seed", name)
        [row] = [row for row in told["identities"] if row["namespace"] == "prompt"]
        assert row["state"] == "released" and "decode" in row["last_reason"]


def assert_animal(text: str) -> None:
    animal = json.loads(text)
    assert set(animal) == {"name", "legs"}
    assert len(animal["name"]) <= 20 and 0 <= animal["legs"] <= 99
