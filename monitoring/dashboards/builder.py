"""Turns a page into Grafana's JSON: data source, variables, links and annotations are the same on every page."""

import json
from collections.abc import Iterable
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from monitoring.dashboards.panels import Page, Panel, Threshold, in_full
from sidecar.dashboard import NODES_QUERY, RUNS_QUERY

DATA_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = 8
STAT_HEIGHT = 4
ALWAYS_GREEN: tuple[Threshold, ...] = ((None, "green"),)
"""Where a number says nothing about good and bad; left to itself, Grafana shows all above 80 in red."""
TAG = "dflash"
UID = "dflash-{}"

ANNOTATIONS = (
    ("Checkpoints", "blue", 'dflash_event_timestamp_seconds{NODE, kind="checkpoint"} OF_RUN', "checkpoint"),
    ("Evaluations", "green", 'dflash_event_timestamp_seconds{NODE, kind="evaluation"} OF_RUN', "evaluation"),
    ("Errors", "red", 'dflash_event_timestamp_seconds{NODE, kind="error"} OF_RUN', "error of the trainer"),
    ("Trainer starts", "orange", "dflash_trainer_start_time_seconds{NODE} OF_RUN", "trainer started"),
    ("Sidecar starts", "purple", "dflash_sidecar_start_time_seconds{NODE}", "sidecar started"),
)
"""Name, colour, a series whose value is the time of what is marked, and the text of the mark."""

DEFINITION_CHANGES = "dflash_definitions_info{NODE} unless last_over_time(dflash_definitions_info{NODE}[1d] offset 1m)"
"""Definitions that were not live a minute before, nor in the day before that."""


class _Annotation(models.AnnotationQuery):
    """An annotation of the Prometheus data source, which knows more keys than the SDK."""

    def __init__(self, name: str, color: str, expression: str, title: str, *, value_is_time: bool) -> None:
        super().__init__(name=name, icon_color=color, expr=in_full(expression), datasource=DATA_SOURCE)
        self._own = {"titleFormat": title, "textFormat": "{{instance}}", "step": "15s"}
        self._own_time = {"useValueForTime": value_is_time}

    def to_json(self) -> dict[str, object]:
        """All keys."""
        keys: dict[str, object] = super().to_json()
        return keys | self._own | self._own_time


def text_of(page: Page) -> str:
    """The JSON file of a page."""
    built = (
        dashboard.Dashboard(page.title)
        .uid(UID.format(page.name))
        .description(page.description)
        .tags([TAG])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("run", "Run", RUNS_QUERY))
        .with_variable(_variable("node", "Node", NODES_QUERY))
        .link(_link())
        .annotations(list(_annotations()))
    )
    for title, panels in page.rows:
        built = built.with_row(dashboard.Row(title))
        for panel in panels:
            built = built.with_panel(_panel(panel))
    return json.dumps(_tidied(json.loads(JSONEncoder().encode(built.build()))), indent=1, sort_keys=True) + "\n"


def _tidied(document: dict[str, Any]) -> dict[str, Any]:
    """With an id for each panel, which Grafana would otherwise give by itself and show as a change.

    Without the keys of interval variables, which the SDK writes into every variable.
    """
    for number, panel in enumerate(document["panels"], start=1):
        panel["id"] = number
    for variable in document["templating"]["list"]:
        for key in ("auto", "auto_count", "auto_min"):
            variable.pop(key, None)
    return document


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATA_SOURCE)
        .query({"query": query, "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _link() -> dashboard.DashboardLink:
    """Links to all pages with our tag, which keep time and variables."""
    link = dashboard.DashboardLink("DFlash").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.include_vars(True).keep_time(True)


def _annotations() -> Iterable[dashboard.AnnotationQuery]:
    for name, color, expression, title in ANNOTATIONS:
        # Grafana counts in milliseconds.
        yield _built(_Annotation(name, color, f"1000 * ({expression})", title, value_is_time=True))
    changed = _Annotation("Definitions", "yellow", DEFINITION_CHANGES, "definitions {{digest}}", value_is_time=False)
    yield _built(changed)


def _built(model: _Annotation) -> dashboard.AnnotationQuery:
    builder = dashboard.AnnotationQuery()
    builder._internal = model  # noqa: SLF001 - the builder offers no way to give it a model
    return builder


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel | heatmap.Panel:
    builder = _drawn(panel)
    height = STAT_HEIGHT if panel.kind == "stat" else HEIGHT
    builder = builder.title(panel.title).description(panel.help).unit(panel.unit).datasource(DATA_SOURCE)
    builder = builder.span(panel.width).height(height)
    if panel.thresholds or panel.kind == "stat":
        builder = builder.thresholds(_thresholds(panel.thresholds or ALWAYS_GREEN))
    if panel.top is not None:
        builder = builder.min(0).max(panel.top)
    for number, (legend, expression) in enumerate(panel.queries):
        query = prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(in_full(expression)).legend_format(legend)
        query = query.instant() if panel.kind == "stat" else query.range()
        if panel.kind == "heatmap":
            query = query.format(prometheus_models.PromQueryFormat.HEATMAP)
        builder = builder.with_target(query.datasource(DATA_SOURCE))
    return builder


def _drawn(panel: Panel) -> timeseries.Panel | stat.Panel | heatmap.Panel:
    if panel.kind == "graph":
        return _graph(panel)
    return _stat(panel) if panel.kind == "stat" else heatmap.Panel()


def _graph(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).placement(shapes.LegendPlacement.BOTTOM)
    legend = legend.display_mode(shapes.LegendDisplayMode.LIST).calcs([])
    tooltip = common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING)
    builder = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1)
    # A gap is a trainer or a sidecar that was away: no line is drawn over it.
    builder = builder.show_points(shapes.VisibilityMode.AUTO).fill_opacity(60 if panel.stacked else 5)
    if panel.stacked:
        builder = builder.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
    if panel.thresholds:
        lines = common.GraphThresholdsStyleConfig().mode(shapes.GraphThresholdsStyleMode.DASHED)
        builder = builder.thresholds_style(lines)
    return builder


def _stat(panel: Panel) -> stat.Panel:
    names_are_the_answer = panel.unit == "none"
    mode = shapes.BigValueTextMode.NAME if names_are_the_answer else shapes.BigValueTextMode.AUTO
    return stat.Panel().text_mode(mode).reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _thresholds(steps: Iterable[Threshold]) -> dashboard.ThresholdsConfig:
    found = [models.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(found)
