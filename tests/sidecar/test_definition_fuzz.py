"""Whatever a file of definitions holds, it is read or refused, and nothing else happens."""

import contextlib
import io
import json
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.app import main
from sidecar.catalogue import CATALOGUE
from sidecar.definition_names import BASE_UNIT_OF
from sidecar.definition_source import DefinitionsError, Source
from sidecar.definitions import SHIPPED_FILE, definitions_of

SHIPPED = SHIPPED_FILE.read_bytes()


def metric(**keys: str) -> str:
    """One definition with some keys replaced."""
    merged = {"name": "dflash_m", "help": "Help.", "type": "gauge", "expr": "dflash_loss"} | keys
    return "[[metric]]\n" + "".join(f"{key} = '''{value}'''\n" for key, value in merged.items())


def is_accepted(text: str) -> bool:
    """Whether nothing is wrong with a text."""
    try:
        definitions_of(Source(Path("m.toml"), text.encode()), CATALOGUE)
    except DefinitionsError:
        return False
    return True


DEEP: dict[str, Callable[[int], str]] = {
    "parentheses": lambda n: "(" * n + "1" + ")" * n,
    "calls": lambda n: "abs(" * n + "dflash_loss" + ")" * n,
    "unclosed": lambda n: "(" * n,
    "minus": lambda n: "-" * n + "1",
    "sum": lambda n: "+".join(["1"] * n),
    "words": lambda n: " or ".join(["dflash_loss"] * n),
    "braces": lambda n: "{" * n,
    "brackets": lambda n: "x" + "[" * n,
    "strings": lambda n: '{a="' + "(" * n + '"}',
    "labels": lambda n: "sum by (" + "a," * n + ") (dflash_loss)",
    "comments": lambda n: "#(\n" * n,
    "by": lambda n: "sum by (a) " * n + "(dflash_loss)",
}


@pytest.mark.parametrize("kind", DEEP)
def test_deep_and_long_expressions_do_not_kill_the_process(kind: str, tmp_path: Path) -> None:
    """The parser dies of deep input, process and all: thousands of levels and a megabyte are refused before it."""
    results = []
    for size in (4_000, 30_000, 1_000_000 // len(DEEP[kind](1)) // 2):
        file = tmp_path / "deep.toml"
        file.write_text(metric(expr=DEEP[kind](size)))
        results.append(
            subprocess.run(
                [sys.executable, "-m", "sidecar", "check", str(file)],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        )

    for result in results:
        assert (result.returncode, "Traceback" in result.stderr, "panicked" in result.stderr) == (1, False, False)
        assert "deep.toml" in result.stderr


def run_check(path: Path, content: bytes, *options: str) -> tuple[int, str, str]:
    """Run `check` in this process, with whatever it writes."""
    path.write_bytes(content)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["check", str(path), "--state-dir", str(path.parent), *options])
    return code, out.getvalue(), err.getvalue()


def assert_lawful(path: Path, content: bytes) -> None:
    """Check the form of what `check` says: exit code 0 or 1, problems with the file, the same as JSON."""
    code, out, err = run_check(path, content)
    json_code, document_text, nothing = run_check(path, content, "--json")
    document = json.loads(document_text)

    assert code in {0, 1}
    assert (json_code, nothing, document["good"]) == (code, "", code == 0)
    assert bool(out) == (code == 0)
    assert bool(err) == (code == 1) == bool(document["problems"])
    num_lines = content.count(b"\n") + 1
    for problem in document["problems"]:
        assert 0 <= problem["line"] <= num_lines, problem
        assert problem["message"]
    if err:
        assert err.startswith(f"{path}:")


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
_FRAGMENTS = st.sampled_from(
    [
        *("dflash_loss", "dflash_tokens_total", "dflash_sequence_length_tokens_bucket", "sum", "rate", "by", "(", ")"),
        *("[5m]", "{", "}", '"', "'", "role", "=", "=~", ",", "on", "ignoring", "group_left", "+", "-", "/", "and"),
        *("or", "unless", "offset", "1m", "NaN", "Inf", "1e999", "@", "start()", ":", "bool", "==", " ", "\n", "\\"),
        *("histogram_quantile", "label_replace", "topk", "scalar", "vector", "time()", "0.5", "#", "é", "\x00", "5q"),
    ]
)
_EXPRESSIONS = st.lists(_FRAGMENTS, max_size=20).map(" ".join) | st.text(max_size=40)
_TOML_TEXT = (st.text(max_size=30) | _EXPRESSIONS).map(json.dumps)
_VALUES: st.SearchStrategy[str] = (
    _TOML_TEXT
    | st.integers().map(str)
    | st.floats().map(str)
    | st.sampled_from(
        ["true", "1979-05-27T07:32:00Z", "07:32:00", "[]", "{}", "[[1]]", '"gauge"', '"counter"', '"step"']
    )
)
_KEYS = st.sampled_from(["name", "help", "type", "expr", "at", "wandb", '"name"', "metric", "nam", '""', "a.b"])
_TABLES = st.dictionaries(_KEYS, _VALUES, max_size=7)
_NAMES = st.text(string.ascii_lowercase + "_", max_size=12).map(lambda name: json.dumps(f"dflash_{name}"))
_SOUND: st.SearchStrategy[dict[str, str]] = st.fixed_dictionaries(
    {"name": _NAMES, "help": st.just('"H."'), "type": st.sampled_from(['"gauge"', '"counter"'])},
    optional={"expr": _EXPRESSIONS.map(json.dumps), "wandb": _TOML_TEXT, "at": st.sampled_from(['"tick"', '"step"'])},
)


def _document(tables: list[dict[str, str]]) -> bytes:
    text = "".join("[[metric]]\n" + "".join(f"{k} = {v}\n" for k, v in table.items()) for table in tables)
    return text.encode(errors="replace")


@FUZZ
@given(st.binary(max_size=300))
def test_random_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Any bytes at all."""
    assert_lawful(tmp_path_factory.getbasetemp() / "bytes.toml", content)


@FUZZ
@given(st.lists(_TABLES | _SOUND, max_size=4))
def test_random_toml(tmp_path_factory: pytest.TempPathFactory, tables: list[dict[str, str]]) -> None:
    """Tables with wrong keys, wrong types and broken expressions, among sound ones."""
    assert_lawful(tmp_path_factory.getbasetemp() / "tables.toml", _document(tables))


@FUZZ
@given(st.data())
def test_shipped_file_with_something_cut_out_or_put_in(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """The shipped definitions, damaged in one place."""
    start = data.draw(st.integers(0, len(SHIPPED)))
    length = data.draw(st.integers(0, 40))
    put_in = data.draw(st.binary(max_size=10) | _FRAGMENTS.map(str.encode))
    assert_lawful(tmp_path_factory.getbasetemp() / "cut.toml", SHIPPED[:start] + put_in + SHIPPED[start + length :])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from([*BASE_UNIT_OF, "loss", "seconds", "total", "info", "ratio", "x"]), min_size=1))
def test_accepted_names_pass_promtool(words: list[str]) -> None:
    """Prometheus's own linter has nothing to say of a name that is accepted."""
    for kind in ("gauge", "counter"):
        name = "dflash_" + "_".join(words)
        if not is_accepted(metric(name=name, type=kind)):
            continue
        page = f"# HELP {name} Help.\n# TYPE {name} {kind}\n{name} 1\n"
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=20, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), page
