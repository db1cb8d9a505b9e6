"""A pytest plugin for llama.cpp's server tests: only the named ones run, and a count is told.

Also keeps the suite from starting each of its presets once, which is how it downloads models.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

NAMES = Path(os.environ["PEER_NAMES"]).read_text(encoding="utf-8").split("\n")
OUTCOMES = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = {}
    config.pluginmanager.register(_Outcomes(config.stash[OUTCOMES]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import utils

    utils.ServerPreset.load_all = staticmethod(lambda: None)
    wanted = set(NAMES)
    kept = [item for item in items if item.nodeid in wanted]
    dropped = [item for item in items if item.nodeid not in wanted]
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


class _Outcomes:
    """Keeps the worst that was seen of each test."""

    def __init__(self, outcomes: dict[str, str]) -> None:
        self._outcomes = outcomes

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._outcomes.get(report.nodeid, "passed")
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome if before == "passed" else before


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    outcomes = config.stash[OUTCOMES]
    files = sorted({name.partition("::")[0] for name in outcomes})
    terminalreporter.section("llama.cpp's server tests")
    for file in files:
        counts = Counter(
            outcome for name, outcome in outcomes.items() if name.startswith(f"{file}::")
        )
        terminalreporter.line(f"{file:<36} {_told(counts)}")
    terminalreporter.line(f"{'total':<36} {_told(Counter(outcomes.values()))}")


def _told(counts: Counter[str]) -> str:
    told = f"{counts['passed']:>4} passed {counts['failed']:>4} failed"
    return f"{told} {counts['skipped']:>4} skipped" if counts["skipped"] else told
