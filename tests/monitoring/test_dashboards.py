"""The committed dashboards: made by the code beside them, and asking only for what there is."""

import json
from pathlib import Path
from typing import Any

import pytest
from monitoring_queries import DASHBOARDS, committed_queries

from monitoring.dashboards.__main__ import FOLDER, PAGES
from monitoring.dashboards.builder import text_of
from monitoring.dashboards.panels import Page
from sidecar.catalogue import CATALOGUE, RawSeries
from sidecar.definitions import SHIPPED_FILE, load
from sidecar.expression import parse_expression
from sidecar.promql.syntax import Selector, walk

MADE_BY_PROMETHEUS = {"up", "scrape_duration_seconds", "scrape_samples_scraped"}
MADE_BY_SCRAPING = {"instance", "job"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_committed_file_is_what_the_code_makes(page: Page) -> None:
    """Whoever changes a page runs `make dashboards`, and nobody edits the JSON."""
    assert (FOLDER / f"{page.name}.json").read_text() == text_of(page)


def test_each_query_reads_series_and_labels_that_exist() -> None:
    """Every metric is raw, shipped as a definition or Prometheus's own; every label in a matcher is one of its own."""
    series = RawSeries(CATALOGUE).series
    derived = {definition.name for definition in load(SHIPPED_FILE, CATALOGUE).definitions}
    wrong = []
    for query in committed_queries():
        for selector in _selectors(query.expression):
            if selector.name in series:
                labels = {matcher.label for matcher in selector.matchers} - {"__name__"} - MADE_BY_SCRAPING
                wrong += [(query.name, label) for label in labels - series[selector.name].labels]
            elif selector.name not in derived | MADE_BY_PROMETHEUS:
                wrong.append((query.name, str(selector.name)))

    assert wrong == []


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_page_is_complete(file: Path) -> None:
    """Every panel says what it means, has a unit and a data source; every page has variables, links and marks."""
    document = json.loads(file.read_text())

    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    lacking = [p["title"] for p in panels if not (p["description"] and p["fieldConfig"]["defaults"]["unit"])]
    assert lacking == []
    assert {target["datasource"]["uid"] for panel in panels for target in panel["targets"]} == {"${datasource}"}
    assert [variable["name"] for variable in document["templating"]["list"]] == ["datasource", "run", "node"]
    assert document["links"][0]["tags"] == document["tags"] == ["dflash"]
    assert document["links"][0]["includeVars"]
    marks = {mark["name"]: mark["useValueForTime"] for mark in document["annotations"]["list"]}
    assert not marks.pop("Definitions")
    assert marks == dict.fromkeys(["Checkpoints", "Evaluations", "Errors", "Trainer starts", "Sidecar starts"], True)


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_panels_do_not_overlap(file: Path) -> None:
    """No two panels take the same place, and none is wider than the page."""
    taken: dict[tuple[int, int], str] = {}
    for panel in json.loads(file.read_text())["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def _selectors(expression: str) -> list[Selector]:
    return [node for node in walk(parse_expression(expression)) if isinstance(node, Selector)]
