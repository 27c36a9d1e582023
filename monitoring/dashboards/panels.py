"""What a panel shows, as plain data, and the shorthand of its queries."""

from dataclasses import dataclass
from typing import Literal

Threshold = tuple[float | None, str]
"""From this value on (None: from the bottom) the colour is this."""

GOOD_IS_LOW: tuple[Threshold, ...] = ((None, "green"), (1.0, "red"))
GOOD_IS_HIGH: tuple[Threshold, ...] = ((None, "red"), (1.0, "green"))

_SHORTHAND = (
    ("{NODE", '{instance=~"$node"'),
    ("[RATE]", "[$__rate_interval]"),
    # A trainer's series bear `run` only when there are several runs; its info always says it as `run_id`.
    ("OF_RUN", 'and on (instance, run) dflash_run_info{instance=~"$node", run_id=~"$run"}'),
)


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: what is shown.
        help: what it means, and what to do about it.
        unit: Grafana's id of the unit.
        queries: pairs of legend and expression. In an expression {NODE selects the chosen nodes, OF_RUN keeps what
            belongs to the chosen runs, and [RATE] is the range that suits the scrape interval.
        kind: how it is drawn.
        thresholds: colours by value.
        width: in 24ths of the page.
        stacked: whether series are drawn on top of each other.
        top: the highest value there can be.
    """

    title: str
    help: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: Literal["graph", "stat", "heatmap"] = "graph"
    thresholds: tuple[Threshold, ...] = ()
    width: int = 8
    stacked: bool = False
    top: float | None = None


@dataclass(frozen=True)
class Page:
    """One dashboard: rows of panels under their titles."""

    name: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def in_full(expression: str) -> str:
    """The expression without shorthand."""
    for short, text in _SHORTHAND:
        expression = expression.replace(short, text)
    return expression
