"""What README and docs show in Python runs as it is written."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, PYTHON = ROOT / "README.md", ROOT / "docs/python.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PYTHON.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_of_the_python_page_runs(code, capsys):
    exec(compile(code, str(PYTHON), "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.model
def test_the_python_example_answers(capsys):
    codes = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    [code] = [code for code in codes if code.startswith("import graphseed")]  # others need a server
    exec(compile(code, str(README), "exec"), {})
    assert len(capsys.readouterr().out.split()) > 3
