"""The ends of series, as Prometheus marks them when a series goes: written to both sides at chosen times."""

import random
from collections.abc import Iterator

import pytest
from prometheus_server import PrometheusServer, major_version, prometheus_that_receives
from promql_comparison import assert_same, ours
from remote_write import write

from sidecar.samples import Labels, Sample, labels_of
from sidecar.store import Store

pytestmark = pytest.mark.skipif(major_version() < 3, reason="Prometheus 3 is not installed")

START_S = 1_750_000_000
LENGTH_S = 400
EXPRESSIONS = [
    *("lives", "lives offset 20s", "timestamp(lives)", "count(lives)", "sum by (id) (lives)", "absent(lives)"),
    *("lives or on () vector(1)", "lives > 5", "scalar(lives{id='0'})", "topk(2, lives)", "lives unless lives > 3"),
    'absent(lives{id="1"})',
] + [
    f"{function}(lives[{range_}])"
    for function in (
        *("rate", "increase", "delta", "irate", "idelta", "deriv", "resets", "changes"),
        *(f"{name}_over_time" for name in ("count", "last", "present", "absent", "avg", "min", "max", "sum", "stddev")),
    )
    for range_ in ("10s", "1m", "4m")
]

End = tuple[str, Labels, float]


def lives(rng: random.Random) -> tuple[list[Sample], list[End]]:
    """Counters that live and end again and again; the ends lie between samples."""
    samples: list[Sample] = []
    ends: list[End] = []
    for number in range(6):
        labels = labels_of(id=str(number))
        second, value = float(rng.randrange(20)), 0.0
        while second < LENGTH_S:
            for _ in range(rng.randint(1, 60)):
                value += rng.randint(0, 5)
                samples.append(Sample("lives", labels, START_S + second, value))
                second += rng.choice((1.0, 1.0, 1.0, 2.5))
            ends.append(("lives", labels, START_S + second))
            second += rng.choice((0.5, 3.0, 45.0))
            value = value if rng.random() < 0.5 else 0.0
    return samples, ends


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, PrometheusServer]]:
    """Both sides with the same samples and ends."""
    samples, ends = lives(random.Random(5))
    store = Store(window_s=3600)
    store.append_many(samples)
    for name, labels, time_s in ends:
        store.mark_stale([(name, labels)], time_s)
    with prometheus_that_receives(tmp_path_factory.mktemp("prometheus")) as server:
        write(server.port, samples, ends)
        yield store, server


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_ends_mean_the_same(expression: str, both: tuple[Store, PrometheusServer]) -> None:
    """At every second an expression sees the same series as in Prometheus, with the same values."""
    store, server = both
    for second in range(0, LENGTH_S + 330, 7):
        time_s = START_S + second
        assert_same(ours(expression, store, time_s), server.query(expression, time_s))


def test_ends_are_seen(both: tuple[Store, PrometheusServer]) -> None:
    """The ends matter: without them an instant look-up would find every series all the time."""
    _, server = both
    counts = [server.query("count(lives) or vector(0)", START_S + second) for second in range(30, LENGTH_S, 7)]

    assert len({answer[0][1] for answer in counts if isinstance(answer, list)}) >= 4
