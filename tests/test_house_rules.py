"""Rules of the house that no linter holds."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import graphseed

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def code_lines(path: Path) -> int:
    """Lines that hold code: no blanks, comments or docstrings."""
    text = path.read_text(encoding="utf-8")
    docs = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            docs |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip and token.type != tokenize.ENDMARKER:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_at_most_400_lines_and_opens_with_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "a module says what it is, owns and does not know"


def test_the_core_is_small():
    assert sum(code_lines(path) for path in (ROOT / "src/graphseed/capture").glob("*.py")) <= 950


def test_only_the_cuda_driver_says_torch_cuda():
    said = [p.name for p in SOURCES if re.search(r"\btorch\.cuda\b", p.read_text("utf-8"))]
    assert said == ["cuda.py"]


def test_importing_graphseed_and_its_core_imports_no_torch():
    names = "graphseed, graphseed.capture, graphseed.cli.main"
    code = f"import sys, {names}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_public_name_resolves():
    assert sorted(graphseed.__all__) == sorted({"__version__", *graphseed.__all__})
    for name in graphseed.__all__:
        assert getattr(graphseed, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = graphseed.nothing


def test_no_exception_is_swallowed_without_a_word():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler) and len(node.body) == 1:
                broad = node.type is None or getattr(node.type, "id", "") in (
                    "Exception", "BaseException",
                )  # fmt: skip
                assert not (broad and isinstance(node.body[0], ast.Pass)), path


def test_what_is_generated_from_results_is_up_to_date():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/figures.py"), "--check"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
