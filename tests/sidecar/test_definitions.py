"""A file of definitions is accepted whole or refused with everything that is wrong with it, each with its line."""

import math
from pathlib import Path

import pytest

from shared.schema import Family
from sidecar.catalogue import catalogue_of
from sidecar.definitions import Definition, DefinitionsError, DefinitionSet, load
from sidecar.promql.engine import evaluate
from sidecar.promql.syntax import parse
from sidecar.samples import Sample, labels_of
from sidecar.store import Store

START_S = 1_700_000_000.0
CATALOGUE = catalogue_of(
    (
        Family("raw_jobs_total", "counter", "Jobs.", ("role",)),
        Family("raw_depth", "gauge", "Depth.", ("queue",)),
        Family("dflash_given_total", "counter", "Given."),
        Family("dflash_lengths", "histogram", "Given.", (), (1.0, 2.0)),
        Family("raw_length", "histogram", "Lengths.", (), (1.0, 2.0)),
    )
)
GOOD = """
# A comment
[[metric]]
name = "dflash_jobs_per_second"
help = "Jobs."
type = "gauge"
expr = '''
  sum by (role) (
    rate(raw_jobs_total[30s])
  )
'''
wandb = "jobs/{role}/rate"

[[metric]]
name = "dflash_depth_double"
help = "Twice the depth."
type = "gauge"
expr = "raw_depth * 2"
at = "step"
wandb = "queue/{queue}"
"""


def problems_of(text: str | bytes, tmp_path: Path) -> list[str]:
    """Load a file and return what is wrong with it, without the folder."""
    file = tmp_path / "m.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DefinitionsError) as caught:
        load(file, CATALOGUE)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def metric(**keys: str) -> str:
    """One definition with some keys replaced, or left out where empty; it begins in line 1."""
    merged = {"name": "dflash_m", "help": "Help.", "type": "gauge", "expr": "raw_depth"} | keys
    return "[[metric]]\n" + "".join(f"{key} = '''{value}'''\n" for key, value in merged.items() if value)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    """Every key of a definition arrives, and the set knows how much history it needs."""
    file = tmp_path / "m.toml"
    file.write_text(GOOD)
    loaded = load(file, CATALOGUE)

    assert [(d.name, d.kind, d.at, d.wandb) for d in loaded.definitions] == [
        ("dflash_jobs_per_second", "gauge", "tick", "jobs/{role}/rate"),
        ("dflash_depth_double", "gauge", "step", "queue/{queue}"),
    ]
    assert loaded.definitions[0].node == parse("sum by (role) (rate(raw_jobs_total[30s]))")
    assert (loaded.history_s, len(loaded.digest)) == (300, 16)


def test_an_empty_file_is_a_set_of_nothing(tmp_path: Path) -> None:
    """No definitions is a valid choice."""
    file = tmp_path / "m.toml"
    file.write_text("# none yet\n")

    assert load(file, CATALOGUE).definitions == ()


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    """Three bad definitions and a clash give all their problems in the order of their lines."""
    text = GOOD.replace("rate(raw_jobs_total", "rate(raw_jobs_totl").replace('at = "step"', 'at = "stp"\nwandbb = "x"')
    text += "\n" + metric(name="dflash_depth_double", help="", expr="mad_over_time(raw_depth[1m])")

    assert problems_of(text, tmp_path) == [
        "m.toml:9:10: dflash_jobs_per_second: unknown series raw_jobs_totl; did you mean raw_jobs_total?",
        "m.toml:19: dflash_depth_double: at is 'stp'; it must be tick or step",
        "m.toml:20: dflash_depth_double: unknown key 'wandbb'; did you mean wandb?",
        "m.toml:23: dflash_depth_double: help is missing; add it",
        "m.toml:24: dflash_depth_double: the name is taken by the metric in line 14; choose another",
        "m.toml:26:11: dflash_depth_double: expr: the function mad_over_time() is not supported here",
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": ""}, "1: name is missing; add it"),
        ({"name": "9x"}, "2: 9x: the name '9x' is not a metric name"),
        ({"name": "x" * 200}, "the name has 200 characters, more than 128"),
        ({"name": "dflash_given_total", "type": "counter"}, "the name is that of a raw metric"),
        ({"name": "dflash_lengths_bucket"}, "the name is that of a raw metric"),
        ({"type": "counter"}, "the name of a counter ends in _total; call it dflash_m_total"),
        ({"name": "m_total"}, "the name of a gauge must not end in _total"),
        ({"type": "histogram"}, "4: dflash_m: type is 'histogram'; it must be gauge or counter"),
        ({"help": " "}, "help must be a string that is not empty"),
        (
            {"expr": "rate(raw_depth[1m])"},
            "5:11: dflash_m: rate() of the gauge raw_depth: it is for counters; use delta()",
        ),
        (
            {"expr": "delta(raw_jobs_total[1m])"},
            "delta() of the counter raw_jobs_total: it ignores resets",
        ),
        (
            {"expr": "raw_length"},
            "raw_length is a histogram; use raw_length_bucket, raw_length_sum or raw_length_count",
        ),
        (
            {"expr": "histogram_quantile(0.5, rate(raw_length_sum[1m]))"},
            "needs _bucket series, raw_length_sum is none",
        ),
        (
            {"expr": "rate(rawlength_bucket[1m])"},
            "unknown series rawlength_bucket; did you mean raw_length_bucket?",
        ),
        ({"expr": '{__name__=~"nope.*"}'}, "no known series has a name that the selector accepts"),
        ({"expr": "dflash_m * 2"}, "dflash_m is itself defined in this file; definitions read raw series only"),
        ({"expr": "raw_depth[5m]"}, "it must give a number or a vector"),
        (
            {"expr": "max_over_time(raw_depth[2h] offset 1h)"},
            "expr looks back 10800 s, more than 3600 s; shorten",
        ),
        ({"expr": "raw_depth +"}, "5:22: dflash_m: expr: the expression ends too early"),
        (
            {"expr": "raw_depth\n  + max_over_time(raw_depth[5m:1m])"},
            "6:31: dflash_m: expr: subqueries are not supported",
        ),
        ({"expr": "abs(" * 120 + "raw_depth" + ")" * 120}, "nested more than 100 levels deep"),
        ({"expr": "(" * 30_000 + "1" + ")" * 30_000}, "30000 operators and brackets"),
        ({"wandb": "bad key"}, "6: dflash_m: wandb is 'bad key'; write a key like group/name"),
        ({"wandb": "_hidden"}, "wandb is '_hidden'; write a key"),
        ({"wandb": "a/{queue"}, "wandb is 'a/{queue'; write a key"),
        ({"wandb": "train/step"}, "but rows have the key train/step already"),
        (
            {"wandb": "q/{role}", "expr": "sum by (queue) (raw_depth) / 2"},
            "the labels the expression keeps are: queue",
        ),
        ({"wandb": "q/{role}", "expr": "sum(raw_depth)"}, "the labels the expression keeps are: none"),
    ],
)
def test_one_problem(keys: dict[str, str], message: str, tmp_path: Path) -> None:
    """Each mistake gives one line that says what is wrong and what to do."""
    (problem,) = problems_of(metric(**keys), tmp_path)

    assert message in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[metric]]\nname = "x\n', "m.toml:2:10: the file is not TOML: "),
        ('[[metric]]\nname = "x"\nname = "x"', "m.toml:3: the file is not TOML: Cannot overwrite a value"),
        ("x = " + "[" * 100_000, "nested too deeply"),
        ("[metric]\nname = 'x'\n", "m.toml:1: metric must be a list of tables; write [[metric]]"),
        ("[[metrics]]\nname = 'x'\n", "m.toml:1: unknown keys metrics; a file holds [[metric]] tables"),
        (b"# \xff\n", "m.toml:1: the file is not UTF-8"),
        ("#" * 2_000_000, "more than 1048576 bytes"),
        ("[[metric]]\n" * 1_001, "1001 metrics, more than 1000"),
        (
            metric(wandb="a/b") + metric(name="dflash_n", wandb="a/b/c"),
            "m.toml:12: dflash_n: wandb 'a/b/c' clashes with 'a/b' of line 6",
        ),
        ("[[metric]]\nname = 5\nhelp = 'h'\ntype = 'gauge'\nexpr = '1'", "m.toml:2: 5: name must be a string"),
    ],
)
def test_one_problem_of_the_file(text: str | bytes, message: str, tmp_path: Path) -> None:
    """A file that is no file of definitions gives one line with its position."""
    (problem,) = problems_of(text, tmp_path)

    assert message in problem


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    """A missing file and a directory are refused with their path."""
    with pytest.raises(DefinitionsError, match=r"none\.toml: cannot be read: No such file"):
        load(tmp_path / "none.toml", CATALOGUE)
    with pytest.raises(DefinitionsError, match="cannot be read: Is a directory"):
        load(tmp_path, CATALOGUE)


class TestEvaluate:
    """What a set gives."""

    @pytest.fixture
    def store(self) -> Store:
        """Two roles with one and two jobs a second, and two queues, one of them with no sensible depth."""
        store = Store(window_s=600)
        for second in range(61):
            for role, speed in (("drafter", 1.0), ("target", 2.0)):
                sample = Sample("raw_jobs_total", labels_of(role=role), START_S + second, 1000 + second * speed)
                store.append(sample)
        store.append(Sample("raw_depth", labels_of(queue="a"), START_S + 60, 3.0))
        store.append(Sample("raw_depth", labels_of(queue="b"), START_S + 60, math.nan))
        return store

    def set_of(self, *texts: str, tmp_path: Path) -> DefinitionSet:
        """Load definitions."""
        file = tmp_path / "m.toml"
        file.write_text("".join(texts))
        return load(file, CATALOGUE)

    def test_families_and_wandb_keys(self, store: Store, tmp_path: Path) -> None:
        """Ticks give what is defined for ticks: a family with a point per series, and a W&B key filled in for each."""
        outcome = self.set_of(GOOD, tmp_path=tmp_path).evaluate(store, START_S + 60, "tick")
        (family,) = outcome.families

        assert (family.name, family.kind, family.help) == ("dflash_jobs_per_second", "gauge", "Jobs.")
        assert {(name, dict(labels)["role"]): value for name, labels, value in family.points} == {
            ("dflash_jobs_per_second", "drafter"): pytest.approx(1),
            ("dflash_jobs_per_second", "target"): pytest.approx(2),
        }
        assert outcome.wandb == {"jobs/drafter/rate": pytest.approx(1), "jobs/target/rate": pytest.approx(2)}
        assert outcome.failures == ()

    def test_values_that_are_not_finite_reach_prometheus_alone(self, store: Store, tmp_path: Path) -> None:
        """NaN is shown on the metrics page and left out of the row."""
        outcome = self.set_of(GOOD, tmp_path=tmp_path).evaluate(store, START_S + 60, "step")

        assert [math.isnan(value) for _, _, value in outcome.families[0].points] == [False, True]
        assert outcome.wandb == {"queue/a": 6.0}

    def test_a_number_is_a_family_without_labels(self, store: Store, tmp_path: Path) -> None:
        """A scalar expression gives one point, an empty vector no family."""
        texts = (
            metric(expr="scalar(sum(raw_depth{queue='a'}))", wandb="m"),
            metric(name="dflash_n", expr="raw_depth > 100"),
        )
        outcome = self.set_of(*texts, tmp_path=tmp_path).evaluate(store, START_S + 60, "tick")

        assert [family.points for family in outcome.families] == [(("dflash_m", (), 3.0),)]
        assert outcome.wandb == {"m": 3.0}

    def test_a_failing_definition_hurts_no_other(self, store: Store, tmp_path: Path) -> None:
        """Ambiguous pairs, missing labels and colliding keys are reported by metric; the rest is evaluated."""
        texts = (
            metric(name="dflash_ambiguous", expr="sum(raw_depth) * on () raw_depth"),
            metric(name="dflash_colliding", expr="raw_jobs_total", wandb="same"),
            metric(name="dflash_unlabelled", expr="raw_depth", wandb="d/{run}"),
            metric(name="dflash_fine", expr="sum(raw_depth{queue='a'})", wandb="fine"),
        )
        outcome = self.set_of(*texts, tmp_path=tmp_path).evaluate(store, START_S + 60, "tick")

        assert [failure.metric for failure in outcome.failures] == [
            "dflash_ambiguous",
            "dflash_colliding",
            "dflash_unlabelled",
        ]
        assert "several series fall on the W&B key same" in outcome.failures[1].message
        assert "no label run" in outcome.failures[2].message
        assert [family.name for family in outcome.families] == ["dflash_colliding", "dflash_unlabelled", "dflash_fine"]
        assert outcome.wandb == {"fine": 3.0}

    def test_what_lacks_its_series_gives_the_same_as_if_it_were_evaluated(self, tmp_path: Path) -> None:
        """In an empty store a definition is evaluated only where something can come of nothing."""
        needing = ("rate(raw_jobs_total[30s])", "1 - sum by (queue) (raw_depth) / 2", "raw_depth > 1 or raw_jobs_total")
        making = ("absent(raw_depth)", "vector(1) or raw_depth", "scalar(raw_depth)")
        texts = [metric(name=f"dflash_m{index}", expr=expr) for index, expr in enumerate((*needing, *making))]
        definitions = self.set_of(*texts, tmp_path=tmp_path)
        outcome = definitions.evaluate(Store(60.0), START_S, "tick")

        assert [d.needs_series for d in definitions.definitions] == [True] * len(needing) + [False] * len(making)
        shown = {family.name for family in outcome.families}
        for definition in definitions.definitions:
            value = evaluate(definition.node, Store(60.0), START_S)
            assert (definition.name in shown) == (value != []), definition.expr
            assert definition.needs_series <= (value == [])

    def test_a_row_has_the_series_of_its_own_run(self, tmp_path: Path) -> None:
        """A second run beside the first clashes with none of its keys, and gets its own values, or those of no run."""
        store = Store(60.0)
        for run, depth in (("", 1.0), ("side", 2.0)):
            store.append(Sample("raw_depth", labels_of(queue="a", run=run), START_S, depth))
        store.append(Sample("raw_jobs_total", labels_of(role="x"), START_S, 7.0))
        texts = (
            metric(name="dflash_own", expr="raw_depth", wandb="own"),
            metric(name="dflash_both", expr="sum(raw_depth)", wandb="sum"),
            metric(name="dflash_machine", expr="raw_jobs_total", wandb="machine"),
            metric(name="dflash_apart", expr='label_replace(raw_depth, "run", "main", "run", "")', wandb="d/{run}"),
        )
        loaded = self.set_of(*texts, tmp_path=tmp_path)
        first, side = (loaded.evaluate(store, START_S, "tick", run) for run in ("", "side"))

        shared = {"sum": 3.0, "machine": 7.0, "d/main": 1.0, "d/side": 2.0}
        assert (first.failures, first.wandb) == ((), {"own": 1.0, **shared})
        assert (side.failures, side.wandb) == ((), {"own": 2.0, **shared})

    def test_a_defect_of_the_engine_is_contained(self, store: Store) -> None:
        """Even an error nobody foresaw stays inside its definition."""
        node = parse("sum(raw_depth) + rate(raw_jobs_total[30s])")
        object.__setattr__(node, "left", "not a node")
        broken = Definition(name="broken", help="-", kind="gauge", expr="-", at="tick", wandb=None, node=node)
        whole = DefinitionSet(file=Path("-"), digest="-", definitions=(broken,), history_s=1)

        assert [failure.metric for failure in whole.evaluate(store, START_S + 60, "tick").failures] == ["broken"]


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    """Two files differ in their digest as soon as one byte differs."""
    digests = set()
    for text in (GOOD, GOOD, GOOD + "# changed\n"):
        (tmp_path / "m.toml").write_text(text)
        digests.add(load(tmp_path / "m.toml", CATALOGUE).digest)

    assert len(digests) == 2
