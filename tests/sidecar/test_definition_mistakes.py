"""Each mistake in a definition is told at its place, with a remedy; what is lawful is let be."""

import re
import time
from pathlib import Path

import pytest

from sidecar.catalogue import CATALOGUE
from sidecar.definition_labels import possible_labels
from sidecar.definition_source import DefinitionsError, Source
from sidecar.definitions import MAX_SELECTED_SERIES, definitions_of
from sidecar.samples import Sample, labels_of
from sidecar.store import Store

HERE = Path("m.toml")


def metric(**keys: str) -> str:
    """One definition with some keys replaced, or left out where empty; it begins in line 1, expr is in line 5."""
    merged = {"name": "dflash_m", "help": "Help.", "type": "gauge", "expr": "dflash_loss"} | keys
    return "[[metric]]\n" + "".join(f"{key} = '''{value}'''\n" for key, value in merged.items() if value)


def problems_of(text: str | bytes) -> list[str]:
    """What is wrong with a text."""
    content = text if isinstance(text, bytes) else text.encode()
    try:
        definitions_of(Source(HERE, content), CATALOGUE)
    except DefinitionsError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        (
            'dflash_tokens_total{roll="x"}',
            "selector names the label roll, which dflash_tokens_total does not have; ",
        ),
        ('dflash_loss{colour="x"}', "the label colour, which dflash_loss does not have; there are: rank, run"),
        ("sum by (roll) (dflash_tokens_total)", "sum by names the label roll, which what it aggregates does not have"),
        ("sum without (le) (dflash_loss)", "sum without names the label le, which what it aggregates does not have"),
        ("dflash_loss * on (role) dflash_step", "* on names the label role, which either side does not have"),
        ("dflash_loss + ignoring (rolle) dflash_batches_total", "+ ignoring names the label rolle, which either side"),
        (
            "dflash_batches_total * on (role) group_left (workr) max by (role, worker) (dflash_batches_total)",
            "group_left names the label workr, which the side it takes them from does not have; did you mean worker?",
        ),
        ("sum by (worker) (sum by (role) (dflash_tokens_total))", "sum by names the label worker"),
        ("rate(dflash_queue_depth[1m])", "rate() of the gauge dflash_queue_depth: it is for counters; use delta()"),
        ('rate({__name__=~"dflash_queue_.*"}[1m])', "rate() of the gauge dflash_queue_"),
        ("delta(dflash_steps_total[1m])", "delta() of the counter dflash_steps_total: it ignores resets; use increase"),
        ("histogram_quantile(0.9, rate(dflash_steps_total[1m]))", "needs _bucket series, dflash_steps_total is none"),
        (
            "histogram_quantile(0.9, sum(rate(dflash_sequence_length_tokens_bucket[1m])))",
            "needs the label le, which is gone; keep it",
        ),
        ("dflash_sequence_length_tokens", "is a histogram; use dflash_sequence_length_tokens_bucket,"),
        (" + ".join(["increase(dflash_steps_total[1h])"] * 7), "ranges of 25200 s in all, more than 21600 s"),
        ("dflash_loss offset 1e30", "the duration 1e30 is too long"),
        ("dflash_loss offset NaN", "the duration NaN is too long"),
        ("avg_over_time(dflash_loss[9223372036854775807])", "the duration 9223372036854775807 is too long"),
        ("avg_over_time(dflash_loss[99999999999w])", "duration"),
        ("dflash_loss[5m:1m]", "subqueries are not supported"),
        ("dflash_loss @ 5", "the @ modifier is not supported"),
        ('dflash_loss{run=~"("}', "regex"),
        ("", "expr must be a string that is not empty"),
    ],
)
def test_expression_mistakes(expr: str, problem: str) -> None:
    """Each mistake in an expression is told with line, metric and remedy."""
    found = problems_of(metric(expr=expr or " "))

    assert len(found) == 1, found
    assert re.match(r"m\.toml:5(:\d+)?: dflash_m: ", found[0])
    assert problem in found[0]


@pytest.mark.parametrize(
    "expr",
    [
        'sum by (role) (dflash_tokens_total{role="x", run="r", rank="0"})',
        "histogram_quantile(0.9, sum by (le, run) (rate(dflash_sequence_length_tokens_bucket[1m])))",
        "dflash_accuracy_ratio - on (position) group_left () dflash_accuracy_ratio",
        "dflash_gpu_power_watts * on (uuid) group_left (index, name) dflash_gpu_info",
        "dflash_loss * on () group_left (run_id) dflash_run_info",
        "dflash_queue_depth or dflash_gpu_up",
        'sum by (side) ({__name__=~"dflash_queue_.*"})',
        "scalar(dflash_loss) * dflash_queue_depth",
        "-dflash_queue_depth ^ 2",
        "vector(1)",
    ],
)
def test_lawful_expressions(expr: str) -> None:
    """What refers to labels that can be there is accepted, those that the sidecar adds included."""
    assert problems_of(metric(expr=expr)) == []


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"name": "my_loss"}, "the name must begin with dflash_; call it dflash_my_loss"),
        ({"name": "dflash_Loss2"}, "snake_case, without capitals; call it dflash_loss2"),
        ({"name": "loss"}, "the name must begin with dflash_; choose another"),
        ({"name": "dflash_batches_count"}, "_count, _created, _info; choose another"),
        ({"name": "tokensTotal"}, "must begin with dflash_, and the name must be in snake_case"),
        (
            {"name": "dflash_x_ms"},
            "the unit ms is no base unit, write seconds and scale the expression; choose",
        ),
        ({"name": "dflash_fill_percent"}, "the unit percent is no base unit, write ratio"),
        ({"name": "dflash_run_infos_info"}, "must not end in _total, _bucket, _sum, _count, _created, _info; call it"),
        ({"name": "dflash_x_gauge"}, "must not end in its type gauge; call it dflash_x"),
        ({"name": "dflash_steps"}, "that of a raw metric"),
        ({"name": "dflash_sequence_length_tokens_count"}, "that of a raw metric"),
        ({"help": "x" * 2000}, "help has 2000 characters, more than 1000"),
        ({"wandb": "train/loss"}, "rows have the key train/loss already"),
        ({"wandb": "train"}, "rows have the key train/step already"),
        ({"wandb": "train/loss/smooth"}, "rows have the key train/loss already"),
        ({"wandb": "train/accuracy/1"}, "rows have the key train/accuracy/{position} already"),
        ({"wandb": "eval/mine"}, "rows have the key eval/{detail} already"),
        ({"wandb": "time/elapsed_s"}, "rows have the key time/elapsed_s already"),
        ({"wandb": "_step"}, "write a key like group/name"),
        ({"wandb": "_timestamp"}, "write a key like group/name"),
        ({"wandb": "q/{queue}"}, "wandb has {queue}, but the labels the expression keeps are: rank, run"),
    ],
)
def test_name_and_key_mistakes(keys: dict[str, str], problem: str) -> None:
    """Names that Prometheus or W&B would stumble over, or that are taken, are refused; no taken name is proposed."""
    found = problems_of(metric(**keys))

    assert len([line for line in found if problem in line]) == 1, found


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ("a/b", "a/b", True),
        ("a", "a/b", True),
        ("a/b/c", "a/b", True),
        ("a/b", "a/bc", False),
        ("a/{role}", "a/{run}", True),
        ("a/{role}", "a/{role}/b", True),
        ("a/{role}", "a/x/y", True),
        ("a/{role}_x", "a/{role}_y", False),
        ("a/x_{role}", "a/y_{role}", False),
        ("a/{role}_x", "a/b/c", False),
        ("a/{role}", "a/fixed", False),
        ("a/{role}/x", "a/{run}/y", False),
    ],
)
def test_wandb_keys_of_two_metrics(one: str, other: str, clash: bool) -> None:
    """No key is another's key or the folder of another's; what fixed parts tell apart is let be."""
    expr = "sum by (role, run) (dflash_batches_total)"
    text = metric(expr=expr, wandb=one) + metric(name="dflash_n", expr=expr, wandb=other)
    found = problems_of(text)

    assert [f"wandb {other!r} clashes with {one!r} of line 6; rename it" in line for line in found] == [True] * clash


def test_names_of_two_metrics_that_openmetrics_takes_for_one() -> None:
    """A counter is called without `_total` there, so a gauge of that name would take the place of it."""
    text = metric(name="dflash_a_total", type="counter", expr="dflash_steps_total") + metric(name="dflash_a")

    assert problems_of(text) == ["m.toml:7: dflash_a: the name is taken by the metric in line 1; choose another"]


POSITIONS = {
    "expr = 'dflash_loss + dflash_losss'": (5, 23),
    'expr = "dflash_loss + dflash_losss"': (5, 23),
    "expr = '''\n  dflash_loss\n+ dflash_losss'''": (7, 3),
    'expr = """\\\n   dflash_loss{run=\\"\\"} + \\\n  dflash_losss"""': (7, 3),
    'expr = "\\u0064flash_loss{run=\\"\\u00e9\\"} + dflash_losss"': (5, 44),
    "expr = '''\r\n  dflash_loss\r\n+ dflash_losss'''": (7, 3),
    "expr = 'dflash_loss + ) 1'": (5, 23),
    "expr = '''\ndflash_loss\n  +\n\n* 2'''": (9, 1),
    "expr = '''sum by (run (dflash_loss)'''": (5, 23),
    '  "expr"  =   \'dflash_loss{run="a" rank="b"}\'': (5, 36),
    "expr = '''rate(dflash_steps_total[5q])'''": (5, 36),
    "expr = 'nofunction(dflash_loss)'": (5, 9),
}


@pytest.mark.parametrize("line", POSITIONS)
def test_position_inside_the_expression(line: str) -> None:
    """Line and column point at the token at fault, through quotes, escapes, continuations and line ends of any kind."""
    text = f"[[metric]]\nname = 'dflash_m'\nhelp = 'H.'\ntype = 'gauge'\n{line}\n"
    found = problems_of(text)

    row, column = POSITIONS[line]
    assert found
    assert found[0].startswith(f"m.toml:{row}:{column}: dflash_m: "), found


def test_tables_without_headers_have_no_wrong_line() -> None:
    """Inline tables, and a header inside a string, leave the line out instead of naming a wrong one."""
    inline = "metric = [{name = 'dflash_m', help = 'H.', type = 'gauge', expr = 'dflash_losss'}]\n"
    assert problems_of(inline) == ["m.toml: dflash_m: unknown series dflash_losss; did you mean dflash_loss?"]

    hidden = metric(help="\n[[metric]]\n", expr="dflash_losss")
    assert problems_of(hidden)[0].startswith("m.toml: dflash_m: unknown series")


def test_labels_through_constructs_not_supported_yet_are_open() -> None:
    """What the checks cannot follow may have any label: they never refuse what could be right."""
    assert possible_labels(definitions_of(Source(HERE, metric().encode()), CATALOGUE).definitions[0].node, {}) is None


def test_a_definition_over_its_budget_fails_alone() -> None:
    """A selector that finds 50,000 series fails its own definition, and says how many; the rest goes on, and fast."""
    store = Store(window_s=600)
    for number in range(50_000):
        store.append(Sample("dflash_queue_depth", labels_of(queue=str(number)), 1_700_000_000.0, 1.0))
    store.append(Sample("dflash_loss", (), 1_700_000_000.0, 2.0))
    text = metric(expr="sum(dflash_queue_depth)") + metric(name="dflash_n", expr='sum({__name__=~"dflash_.*"})')
    definitions = definitions_of(Source(HERE, (text + metric(name="dflash_o")).encode()), CATALOGUE)
    definitions.evaluate(store, 1_700_000_000.0, "tick")
    started_s = time.monotonic()

    outcome = definitions.evaluate(store, 1_700_000_000.0, "tick")

    assert time.monotonic() - started_s < 0.05
    limit = f"more than {MAX_SELECTED_SERIES}; narrow its selectors"
    assert [(failure.metric, failure.message) for failure in outcome.failures] == [
        ("dflash_m", f"PromqlError: it selects 50000 series, {limit}"),
        ("dflash_n", f"PromqlError: it selects 50001 series, {limit}"),
    ]
    assert [family.points for family in outcome.families] == [(("dflash_o", (), 2.0),)]
