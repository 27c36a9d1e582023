"""Every query of the committed dashboards, as Prometheus gets it from Grafana."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MONITORING = Path(__file__).parent.parent / "monitoring"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
VARIABLES = {"$__rate_interval": "15s", "$__interval": "15s", "$node": ".*", "$run": ".*"}
"""What Grafana puts in place of its variables, when all runs and nodes are chosen."""


class Query(NamedTuple):
    """One query of one panel or annotation."""

    dashboard: str
    title: str
    legend: str
    expression: str

    @property
    def name(self) -> str:
        """How a test calls it."""
        return f"{self.dashboard}: {self.title}: {self.legend}"


def queries_of(name: str, document: dict[str, Any]) -> Iterator[Query]:
    """All queries of one dashboard."""
    for panel in document["panels"]:
        for target in panel.get("targets", []):
            yield Query(name, panel["title"], target["legendFormat"], _filled_in(target["expr"]))
    for annotation in document["annotations"]["list"]:
        yield Query(name, "annotation", annotation["name"], _filled_in(annotation["expr"]))


def committed_queries() -> list[Query]:
    """All queries of all committed dashboards."""
    return [query for file in DASHBOARDS for query in queries_of(file.stem, json.loads(file.read_text()))]


def _filled_in(expression: str) -> str:
    for variable, text in VARIABLES.items():
        expression = expression.replace(variable, text)
    return expression
