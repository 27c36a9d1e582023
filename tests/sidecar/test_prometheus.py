"""The /metrics page: exact text in both formats, and families that would spoil it are left out."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from shared.catalogue import STEP_FAMILIES, TRAINER_FAMILIES
from shared.schema import Family
from sidecar.collectors.catalogue import COLLECTOR_FAMILIES
from sidecar.exposition import merged
from sidecar.samples import ExportedFamily, Result, labels_of
from sidecar.sinks.prometheus import PrometheusSink

GOLDEN = Path(__file__).parent / "golden"
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
TOKENS = ExportedFamily(
    "dflash_tokens_total",
    "counter",
    "Tokens processed, real or padding.",
    (
        ("dflash_tokens_total", labels_of(role="drafter", worker="0", kind="real"), 123456789.0),
        ("dflash_tokens_total", labels_of(role="drafter", worker="0", kind="padding"), 12.0),
    ),
)
LOSS = ExportedFamily("dflash_loss", "gauge", 'Loss,\n"quoted" with a \\.', (("dflash_loss", (), 0.1 + 0.2),))
RUN = ExportedFamily(
    "dflash_run_info", "gauge", "Always 1.", (("dflash_run_info", labels_of(run_id='a"b\\c\nd', host="grüße"), 1.0),)
)
LENGTHS = ExportedFamily(
    "dflash_sequence_length_tokens",
    "histogram",
    "Lengths of the sequences trained on.",
    (
        ("dflash_sequence_length_tokens_bucket", labels_of(le="32.0"), 3.0),
        ("dflash_sequence_length_tokens_bucket", labels_of(le="+Inf"), 5.0),
        ("dflash_sequence_length_tokens_count", (), 5.0),
        ("dflash_sequence_length_tokens_sum", (), 170.0),
    ),
)
NOT_FINITE = ExportedFamily(
    "dflash_grad_norm",
    "gauge",
    "Gradient norm.",
    (
        ("dflash_grad_norm", labels_of(worker="0"), float("nan")),
        ("dflash_grad_norm", labels_of(worker="1"), float("inf")),
    ),
)
GOOD = (TOKENS, LOSS, RUN, LENGTHS, NOT_FINITE)


def page(*families: ExportedFamily, accept: str = "") -> str:
    """What one result looks like."""
    sink = PrometheusSink()
    sink.publish(Result(time_s=1.0, families=families))
    return sink.render(accept)[0].decode()


def gauge(name: str, value: Any = 1.0, **labels: Any) -> ExportedFamily:
    """A family of one point, however wrong."""
    return ExportedFamily(name, "gauge", "Help.", ((name, labels_of(**labels), value),))


@pytest.mark.parametrize(
    ("accept", "golden", "content_type"),
    [
        ("", "metrics.txt", "text/plain; version=0.0.4; charset=utf-8"),
        (OPENMETRICS, "metrics.openmetrics.txt", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    ],
)
def test_page_is_exactly_this(accept: str, golden: str, content_type: str) -> None:
    """Counters, gauges, histograms, escapes and non-finite values are written as the golden page shows."""
    sink = PrometheusSink()
    sink.publish(Result(time_s=1.0, families=GOOD))
    body, served_type = sink.render(accept)

    assert body.decode() == (GOLDEN / golden).read_text()
    assert served_type.startswith(content_type)


@pytest.mark.parametrize("accept", ["text/plain;version=latest", "application/openmetrics-text; version=x.y", ";;,,="])
def test_unusable_accept_header_gets_plain_text(accept: str) -> None:
    """An Accept header that makes no sense is answered with the plain text format."""
    assert page(*GOOD, accept=accept) == (GOLDEN / "metrics.txt").read_text()


@pytest.mark.parametrize("scheme", ["dots", "values"])
def test_other_escaping_schemes_get_names_as_they_are(scheme: str) -> None:
    """Names that need no escaping are served under the scheme that says so."""
    sink = PrometheusSink()
    sink.publish(Result(time_s=1.0, families=GOOD))
    body, content_type = sink.render(f"application/openmetrics-text; version=1.0.0; escaping={scheme}")

    assert body.decode() == (GOLDEN / "metrics.openmetrics.txt").read_text()
    assert content_type.endswith("escaping=underscores")


@pytest.mark.parametrize(
    "bad",
    [
        LOSS,
        gauge("dflash_tokens"),
        gauge("dflash_sequence_length_tokens_count"),
        gauge("dflash-dash"),
        gauge("dflash_none", None),
        gauge("dflash_text", "1.0"),
        gauge("dflash_label", **{"a-b": "x"}),
        gauge("dflash_label", a=7),
        gauge("dflash_surrogate", a="\ud800"),
        ExportedFamily("dflash_plain", "counter", "No suffix.", (("dflash_plain", (), 1.0),)),
        ExportedFamily("dflash_x", "gauge", "Foreign sample.", (("dflash_y", (), 1.0),)),
        ExportedFamily("dflash_x", "gauge", "Twice.", (("dflash_x", (), 1.0), ("dflash_x", (), 2.0))),
        ExportedFamily("dflash_x", "gauge", "One label twice.", (("dflash_x", (("a", "1"), ("a", "2")), 1.0),)),
        ExportedFamily("dflash_x", "histogram", "No le.", (("dflash_x_bucket", (), 1.0),)),
        ExportedFamily("dflash_x", "summary", "Unknown kind.", (("dflash_x", (), 1.0),)),  # type: ignore[arg-type]
        ExportedFamily("dflash_x", "gauge", "\ud800", (("dflash_x", (), 1.0),)),
    ],
    ids=lambda f: f"{f.name}-{f.help[:12]!a}",
)
def test_bad_family_is_left_out_and_counted(bad: ExportedFamily) -> None:
    """A duplicate, colliding or unwritable family is dropped with its reason; all others are served in both formats."""
    sink = PrometheusSink()
    sink.publish(Result(time_s=1.0, families=(*GOOD, bad)))

    assert sink.render("")[0].decode() == (GOLDEN / "metrics.txt").read_text()
    assert sink.render(OPENMETRICS)[0].decode() == (GOLDEN / "metrics.openmetrics.txt").read_text()
    assert sink.num_dropped == 1
    assert [problem.split(":")[0] for problem in sink.problems] == [bad.name]


TEXT = st.text(st.characters(codec=None), max_size=6)
POINTS = st.tuples(
    st.sampled_from(["dflash_a", "dflash_a_total", "dflash_a_bucket", "dflash_a_sum", "b c"]),
    st.lists(st.tuples(st.sampled_from(["a", "le", "9"]) | TEXT, TEXT), max_size=2).map(tuple),
    st.floats() | st.integers() | st.none() | TEXT,
)
FAMILIES = st.builds(
    ExportedFamily,
    st.sampled_from(["dflash_a", "dflash_a_total", "dflash_a_sum", "", "b c"]),
    st.sampled_from(["counter", "gauge", "histogram", "info"]),
    TEXT,
    st.lists(POINTS, max_size=3).map(tuple),
)


@given(st.lists(FAMILIES, max_size=4))
def test_no_family_ever_fails_a_scrape(families: list[ExportedFamily]) -> None:
    """Whatever the families hold, both formats are rendered, parse again, and still show a good family."""
    good = gauge("dflash_good")
    text = page(good, *families)
    openmetrics = page(good, *families, accept=OPENMETRICS)

    assert "dflash_good 1.0\n" in text
    assert "dflash_good 1.0\n" in openmetrics
    assert len(list(parse_text(text))) >= 1


def test_openmetrics_page_is_accepted_by_a_strict_parser() -> None:
    """The OpenMetrics page passes the reference parser."""
    names = [family.name for family in parse_openmetrics(page(*GOOD, accept=OPENMETRICS))]

    assert names == [
        "dflash_tokens",
        "dflash_loss",
        "dflash_run_info",
        "dflash_sequence_length_tokens",
        "dflash_grad_norm",
    ]


def test_series_that_leave_the_result_leave_the_page() -> None:
    """Only the newest result is shown."""
    sink = PrometheusSink()
    sink.publish(Result(time_s=1.0, families=(TOKENS, LOSS)))
    sink.render("")
    sink.publish(Result(time_s=2.0, families=(LOSS,)))

    assert b"dflash_tokens_total" not in sink.render("")[0]


def one_point(family: Family) -> ExportedFamily:
    """A family with one plausible series."""
    labels = labels_of(**dict.fromkeys(family.labels, "x"))
    if family.kind != "histogram":
        return ExportedFamily(family.name, family.kind, family.help, ((family.name, labels, 1.0),))
    bounds = [*map(str, family.buckets), "+Inf"]
    points = [(f"{family.name}_bucket", tuple(sorted((*labels, ("le", bound)))), 1.0) for bound in bounds]
    points += [(f"{family.name}_sum", labels, 1.0), (f"{family.name}_count", labels, 1.0)]
    return ExportedFamily(family.name, family.kind, family.help, tuple(points))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say_about_our_families() -> None:
    """Every raw family passes `promtool check metrics`: names, units, suffixes and help texts."""
    families = [one_point(family) for family in (*TRAINER_FAMILIES, *STEP_FAMILIES, *COLLECTOR_FAMILIES)]
    lint = subprocess.run(
        ["promtool", "check", "metrics"], input=page(*families), capture_output=True, text=True, check=False
    )

    assert (lint.stdout, lint.stderr, lint.returncode) == ("", "", 0)


@pytest.mark.parametrize("broken", [float("nan"), -1.0, float("-inf")])
def test_a_total_that_is_none_costs_its_series_alone(broken: float) -> None:
    """OpenMetrics knows no such total: the series is left out and counted, its family and the page are served."""
    points = (("dflash_x_total", labels_of(worker="0"), broken), ("dflash_x_total", labels_of(worker="1"), 7.0))
    sink = PrometheusSink()
    sink.publish(Result(time_s=1.0, families=(ExportedFamily("dflash_x_total", "counter", "X.", points),)))

    for accept, parse in (("", parse_text), (OPENMETRICS, parse_openmetrics)):
        [family] = parse(sink.render(accept)[0].decode())
        assert [(sample.labels, sample.value) for sample in family.samples] == [({"worker": "1"}, 7.0)]
    assert sink.num_dropped == 1


@pytest.mark.parametrize("counts", [(2.0, 1.0), (0.5, 1.5), (float("nan"), 1.0), (1.0, float("inf")), (-1.0, 1.0)])
def test_buckets_that_are_no_counts_cost_their_series(counts: tuple[float, float]) -> None:
    """Counts that fall from bucket to bucket or are not whole numbers would make readers refuse the page."""
    buckets = tuple(("dflash_x_bucket", labels_of(le=le), n) for le, n in zip(("1.0", "+Inf"), counts, strict=True))
    points = (*buckets, ("dflash_x_sum", (), 1.0), ("dflash_x_count", (), counts[1]))
    sink = PrometheusSink()
    sink.publish(Result(time_s=1.0, families=(ExportedFamily("dflash_x", "histogram", "X.", points), LOSS)))

    found = [family.name for family in parse_openmetrics(sink.render(OPENMETRICS)[0].decode()) if family.samples]
    assert (found, sink.num_dropped) == (["dflash_loss"], 1)


def test_one_source_cannot_take_a_name_from_another() -> None:
    """Of families with one name the first gives the kind and has each of its points; what fits is added."""
    other = ExportedFamily(
        "dflash_loss", "gauge", "Other.", (("dflash_loss", (), 9.0), ("dflash_loss", (("a", "b"),), 1.0))
    )
    foreign = ExportedFamily("dflash_loss", "histogram", "X.", (("dflash_loss_sum", (), 1.0),))

    [family] = merged((LOSS, other, foreign))

    assert family.points == (*LOSS.points, ("dflash_loss", (("a", "b"),), 1.0))
    assert (family.kind, family.help) == ("gauge", LOSS.help)
