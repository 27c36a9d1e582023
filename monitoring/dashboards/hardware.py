"""The hardware under a run, on one page."""

from monitoring.dashboards.gpus import FAULTS, MEMORY, NOW, POWER, THERMAL, USE
from monitoring.dashboards.host import GROUPS, HOST, PROCESS
from monitoring.dashboards.panels import Page

HARDWARE = Page(
    "hardware",
    "DFlash: hardware",
    "GPUs, host, trainer process and limits under a run.",
    (
        ("Now", NOW),
        ("Power and energy", POWER),
        ("Temperature, clocks, throttling", THERMAL),
        ("Use of GPUs", USE),
        ("Memory", MEMORY),
        ("Faults", FAULTS),
        ("Host", HOST),
        ("Trainer process", PROCESS),
        ("Control groups", GROUPS),
    ),
)
