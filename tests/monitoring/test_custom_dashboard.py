"""A dashboard for a user's own definitions."""

import json

from monitoring_queries import queries_of
from sidecar_process import ROOT, Place

from sidecar.expression import parse_expression

OWN = """
[[metric]]
name = "dflash_own_ratio"
help = "What I want to know."
type = "gauge"
expr = "dflash_queue_depth / dflash_queue_capacity"

[[metric]]
name = "dflash_own_wait_seconds_total"
help = "How long all have waited."
type = "counter"
expr = "sum(dflash_queue_blocked_seconds_total)"
"""


def test_dashboard_has_a_panel_for_each_definition_that_is_not_shipped(place: Place) -> None:
    """Each panel has the help, the unit that its name says, and a query that is good PromQL: the rate of a counter."""
    file = place.state_dir.parent / "mine.toml"
    file.write_text((ROOT / "sidecar/metrics.toml").read_text() + OWN)

    done = place.command("dashboard", "--definitions", str(file))

    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    found = {p["title"]: (p["description"], p["fieldConfig"]["defaults"]["unit"]) for p in document["panels"]}
    assert found == {
        "dflash_own_ratio": ("What I want to know.", "percentunit"),
        "dflash_own_wait_seconds_total": ("How long all have waited.", "s"),
    }
    queries = {query.title: query.expression for query in queries_of("custom", document)}
    assert queries["dflash_own_wait_seconds_total"] == 'rate(dflash_own_wait_seconds_total{instance=~".*"}[15s])'
    for expression in queries.values():
        parse_expression(expression)


def test_definitions_can_be_named(place: Place) -> None:
    """Shipped ones are shown when they are named; an unknown name, and nothing to show, are one line each."""
    named = place.command("dashboard", "dflash_tokens_per_second", "dflash_padding_ratio")
    unknown = place.command("dashboard", "dflash_tokens_per_secund")
    nothing = place.command("dashboard")

    titles = [panel["title"] for panel in json.loads(named.stdout)["panels"]]
    assert titles == ["dflash_tokens_per_second", "dflash_padding_ratio"]
    assert unknown.returncode == nothing.returncode == 1
    assert "dflash_tokens_per_second" in unknown.stderr
    assert nothing.stderr.startswith("dflash-sidecar: every definition is a shipped one")
