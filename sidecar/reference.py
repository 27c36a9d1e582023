"""The metrics reference, made from the tables that the code itself uses; `make docs` writes docs/metrics.md."""

import sys
from collections.abc import Iterator

from shared.catalogue import STEP_FAMILIES, TRAINER_FAMILIES
from shared.schema import Family
from sidecar.catalogue import CATALOGUE
from sidecar.collectors.catalogue import (
    CGROUP_FAMILIES,
    DISK_FAMILIES,
    HOST_FAMILIES,
    PROCESS_FAMILIES,
    PROCESS_MEMORY_FAMILIES,
    RUNNER_FAMILIES,
)
from sidecar.collectors.nvml_catalogue import GPU_FAMILIES
from sidecar.definitions import SHIPPED_FILE, load
from sidecar.exposition import LIVENESS_FAMILIES, SIDECAR_FAMILIES

SECTIONS = (
    ("Training", "Read out of step records and evaluations, each at its own time.", STEP_FAMILIES),
    ("Trainer", "Counted in the trainer; a restart of the sidecar never resets them.", TRAINER_FAMILIES),
    ("Liveness", "Which trainers there are.", LIVENESS_FAMILIES),
    ("GPUs", "Read through NVML where there is a driver; absent where there is none.", GPU_FAMILIES),
    ("Host", "Read through psutil.", (*HOST_FAMILIES, *DISK_FAMILIES)),
    ("Trainer process", "Read through psutil from outside.", (*PROCESS_FAMILIES, *PROCESS_MEMORY_FAMILIES)),
    ("Control groups", "Limits of containers and units on the trainer and the sidecar.", CGROUP_FAMILIES),
    ("Sidecar", "What the sidecar says about itself.", (*SIDECAR_FAMILIES, *RUNNER_FAMILIES)),
)


MAX_EXPRESSION_CHARS = 300
"""What a table can show; a longer one is read where it is written."""


def reference() -> Iterator[str]:
    """Yield the lines of the document."""
    yield "# Metrics reference"
    yield ""
    yield "Made by `make docs` from tables in the code; do not edit. Units are in the names, as Prometheus wants it:"
    yield "`_seconds`, `_bytes`, `_tokens`, `_joules`, `_ratio` (0 to 1); counters end in `_total`."
    for title, text, families in SECTIONS:
        yield from ("", f"## {title}", "", text, "", "| metric | type | labels | what |", "|---|---|---|---|")
        yield from (_row(family) for family in families)
    yield from ("", "## Shipped definitions", "", "Derived in PromQL by `sidecar/metrics.toml`; see")
    yield from ("[adding a metric](adding-a-metric.md).", "", "| metric | W&B key | what | expression |")
    yield "|---|---|---|---|"
    for definition in load(SHIPPED_FILE, CATALOGUE).definitions:
        expression = " ".join(definition.expr.split()).replace("|", "\\|")
        shown = f"`{expression}`" if len(expression) <= MAX_EXPRESSION_CHARS else "see `sidecar/metrics.toml`"
        yield f"| `{definition.name}` | `{definition.wandb}` | {definition.help} | {shown} |"


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.name}` | {family.kind} | {labels} | {family.help} |"


if __name__ == "__main__":
    sys.stdout.writelines(line + "\n" for line in reference())
