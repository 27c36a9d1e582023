"""Definitions as a file of recording rules, so that a Prometheus can compute them too, and over its own past.

The file is JSON, which is YAML: strings are quoted by a library, and both machines and people can read it.
"""

import json
from collections.abc import Mapping, Sequence

from sidecar.definitions import Definition


def recording_rules(definitions: Sequence[Definition], interval_s: float, labels: Mapping[str, str]) -> str:
    """The text of a rule file.

    Args:
        definitions: one rule each.
        interval_s: time between evaluations.
        labels: put on every series that a rule records.
    """
    rules = [
        {"record": definition.name, "expr": definition.expr.strip()} | ({"labels": dict(labels)} if labels else {})
        for definition in definitions
    ]
    group = {"name": "dflash", "interval": f"{round(interval_s * 1000)}ms", "rules": rules}
    return json.dumps({"groups": [group]}, indent=2) + "\n"
