"""Definitions as a Grafana dashboard of their own: one panel each, with the variables and links of the shipped ones.

It is written as plain JSON: the library that makes the shipped dashboards is nothing that a sidecar should need.
"""

import json
from collections.abc import Sequence

from sidecar.definitions import Definition

DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = (
    ("_bytes_per_second", "Bps"),
    ("_seconds", "s"),
    ("_bytes", "bytes"),
    ("_ratio", "percentunit"),
    ("_watts", "watt"),
    ("_joules", "joule"),
    ("_celsius", "celsius"),
    ("_hertz", "hertz"),
)
"""Ends of names, and Grafana's id of the unit; the first that fits."""
RUNS_QUERY = "label_values(dflash_run_info, run_id)"
NODES_QUERY = 'label_values(dflash_run_info{run_id=~"$run"}, instance)'
"""What the variables of every dashboard choose from."""
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


def custom_dashboard(definitions: Sequence[Definition]) -> str:
    """The JSON of a dashboard with a panel for each definition."""
    source = {"name": "datasource", "type": "datasource", "label": "Data source", "query": "prometheus"}
    document = {
        "uid": "dflash-custom",
        "title": "DFlash: custom metrics",
        "description": "Metrics of your own; made by `dflash-sidecar dashboard`.",
        "tags": ["dflash"],
        "schemaVersion": 41,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, _variable("run", "Run", RUNS_QUERY), _variable("node", "Node", NODES_QUERY)]},
        "annotations": {"list": []},
        "links": [_link()],
        "panels": [_panel(number, definition) for number, definition in enumerate(definitions)],
    }
    return json.dumps(document, indent=1) + "\n"


def _variable(name: str, label: str, query: str) -> dict[str, object]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
    }


def _link() -> dict[str, object]:
    return {
        "title": "DFlash",
        "type": "dashboards",
        "tags": ["dflash"],
        "icon": "",
        "tooltip": "",
        "asDropdown": False,
        "targetBlank": False,
        "includeVars": True,
        "keepTime": True,
    }


def _panel(number: int, definition: Definition) -> dict[str, object]:
    series = f'{definition.name}{{instance=~"$node"}}'
    expression = f"rate({series}[$__rate_interval])" if definition.kind == "counter" else series
    bare = definition.name.removesuffix("_total")
    unit = next((unit for end, unit in UNITS if bare.endswith(end)), "short")
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": definition.name,
        "description": definition.help,
        "datasource": DATA_SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [{"refId": "A", "datasource": DATA_SOURCE, "expr": expression, "legendFormat": "__auto"}],
    }
