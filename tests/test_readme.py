"""What README shows in Python runs as it is written."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.model
def test_the_python_example_answers(capsys):
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(README), "exec"), {})
    assert len(capsys.readouterr().out.split()) > 3
