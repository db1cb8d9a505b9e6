"""llama.cpp's own server tests against this server: a few of most files; all in the slow tier."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
A_FEW = (
    "test_server_slots or test_cors_options or test_incorrect_api_key or test_tokenize_with_pieces "
    "or test_metrics_prometheus_format or test_slot_save_restore or test_anthropic_messages_basic "
    "or test_chat_completion_with_openai_library"
)
LEAST = 150  # of the 175


def run(*arguments: str) -> tuple[int, set[str]]:
    """How many passed, and which did not."""
    command = [sys.executable, str(ROOT / "scripts/peer_suite/run.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    total = re.search(r"^total +(\d+) passed +(\d+) failed$", done.stdout, re.MULTILINE)
    assert total is not None, done.stdout[-2000:] + done.stderr[-2000:]
    failed = set(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE))
    assert len(failed) == int(total[2]), done.stdout[-2000:]
    return int(total[1]), failed


@pytest.mark.model
@pytest.mark.timeout(900)
def test_a_few_pass():
    num_passed, failed = run("-k", A_FEW)
    assert not failed and num_passed >= 8


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_all_pass_but_those_that_the_page_lists_with_the_reason():
    listed = re.findall(r"`(unit/[^`]+)`", (ROOT / "docs/http.md").read_text(encoding="utf-8"))
    num_passed, failed = run()
    assert num_passed >= LEAST
    assert failed == set(listed)
