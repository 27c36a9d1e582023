"""House rules that no linter checks: how long a file and a function may be."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(p for folder in ("shared", "trainer", "sidecar", "bench") for p in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_and_function_sizes(path: Path) -> None:
    """No source file exceeds 300 lines (tests: 400) and no function 50."""
    text = path.read_text()
    limit = 400 if path in TESTS else 300
    too_long = [
        f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= 50
    ]

    assert too_long == []
    assert text.count("\n") <= limit


def test_no_drawers() -> None:
    """Modules are named by what they do."""
    drawers = {"utils.py", "common.py", "helpers.py", "misc.py", "manager.py"}

    assert set() == drawers & {p.name for p in SOURCES}


@pytest.mark.parametrize(
    ("module", "strangers"),
    [
        ("sidecar.daemon", {"torch", "transformers", "trainer"}),
        # torch and transformers load pynvml and psutil by themselves where they find them.
        ("trainer.run", {"wandb", "prometheus_client", "sidecar"}),
    ],
)
def test_what_a_program_never_loads(module: str, strangers: set[str]) -> None:
    """Not even through somebody else's package does one program load what belongs to the other."""
    script = f"import sys, {module}; print(*({strangers!r} & set(sys.modules)))"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)

    assert done.stdout.split() == []
