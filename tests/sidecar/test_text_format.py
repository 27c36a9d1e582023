"""The page is what prometheus_client writes, to the byte."""

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder

from sidecar.samples import ExportedFamily, labels_of
from sidecar.sinks.text_format import write

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.floats() | st.integers(-(10**15), 10**15)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Reference:
    """Families as prometheus_client knows them."""

    def __init__(self, families: Iterable[ExportedFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Yield each."""
        for family in self._families:
            metric = Metric(family.name.removesuffix("_total"), family.help, family.kind)
            for name, labels, value in family.points:
                metric.add_sample(name, dict(labels), value)
            yield metric

    def page(self, accept: str) -> bytes:
        """What prometheus_client writes."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        encode: Callable[[CollectorRegistry], bytes] = choose_encoder(accept)[0]
        return encode(registry)


@pytest.mark.parametrize("escaping", ["", "; escaping=underscores", "; escaping=allow-utf-8"])
@given(text=TEXT, labels=st.dictionaries(st.sampled_from(["le", "uuid", "kind", "Run_1"]), TEXT), value=VALUES)
def test_pages_are_those_of_prometheus_client(escaping: str, text: str, labels: dict[str, str], value: float) -> None:
    """Help, labels and values of all sorts are written the same, in both formats and under the schemes served."""
    own = labels_of(**labels)
    families = (
        ExportedFamily(
            "dflash_a_total", "counter", text, (("dflash_a_total", own, value), ("dflash_a_total", (), 1.0))
        ),
        ExportedFamily("dflash_b", "gauge", text, (("dflash_b", own, value),)),
        ExportedFamily("dflash_c", "histogram", text, (("dflash_c_bucket", own, 3.0), ("dflash_c_sum", (), value))),
        ExportedFamily("dflash_d", "gauge", text, ()),
    )
    reference = Reference(families)

    assert write(families, as_openmetrics=True) == reference.page(OPENMETRICS + escaping)
    assert write(families, as_openmetrics=False) == reference.page("text/plain; version=1.0.0" + escaping)
