"""The definitions that ship, over a run whose figures are known."""

import time

import pytest

from shared.catalogue import SEQUENCE_LENGTH_BUCKETS_TOKENS, STEP_FAMILIES, TRAINER_FAMILIES
from shared.schema import Family
from sidecar.catalogue import catalogue_of
from sidecar.definitions import SHIPPED_FILE, DefinitionSet, Outcome, load
from sidecar.samples import Sample, labels_of
from sidecar.store import Store

GPU_FAMILIES = (Family("dflash_gpu_energy_joules_total", "counter", "Energy drawn.", ("uuid",)),)
START_S = 1_700_000_000.0
END_S = START_S + 300

BLOCKED = {"put": 0.2, "get": 0.6}
PHASES = {
    ("target", "forward"): (0.75, 3.0),
    ("target", "put"): (0.1, 3.0),
    ("drafter", "get"): (0.6, 2.0),
    ("drafter", "forward"): (0.25, 2.0),
    ("drafter", "backward"): (0.5, 2.0),
}
"""Per worker: seconds a second, calls a second."""
BATCHES = {("target", "0"): 4.0, ("target", "1"): 2.0, ("drafter", "0"): 3.0}
LENGTHS = {"64.0": 2.0, "128.0": 8.0, "256.0": 10.0}
"""Sequences a second up to each bound; below and above nothing changes."""


def rates() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Counters of a run with two targets and one drafter, as their increase a second."""
    counters: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {("dflash_steps_total", ()): 3.0}
    for (role, worker), batches in BATCHES.items():
        counters["dflash_batches_total", labels_of(role=role, worker=worker)] = batches
        for kind, tokens in (("real", 900.0), ("padding", 100.0)):
            counters["dflash_tokens_total", labels_of(role=role, worker=worker, kind=kind)] = tokens
        for (phase_role, phase), (seconds, calls) in PHASES.items():
            if phase_role == role:
                labels = labels_of(role=role, worker=worker, phase=phase)
                counters["dflash_phase_seconds_total", labels] = seconds
                counters["dflash_phase_calls_total", labels] = calls
    for side, seconds in BLOCKED.items():
        counters["dflash_queue_blocked_seconds_total", labels_of(queue="hidden", side=side)] = seconds
    for bound in map(str, (*SEQUENCE_LENGTH_BUCKETS_TOKENS, "+Inf")):
        below = max((count for upper, count in LENGTHS.items() if float(upper) <= float(bound)), default=0.0)
        counters["dflash_sequence_length_tokens_bucket", labels_of(le=bound)] = below
    counters["dflash_sequence_length_tokens_sum", ()] = 1200.0
    counters["dflash_sequence_length_tokens_count", ()] = 10.0
    counters["dflash_anchors_total", labels_of(kind="used")] = 32.0
    counters["dflash_anchors_total", labels_of(kind="valid")] = 128.0
    for uuid, watts in (("GPU-1", 200.0), ("GPU-2", 250.0)):
        counters["dflash_gpu_energy_joules_total", labels_of(uuid=uuid)] = watts
    return counters


GAUGES = {
    ("dflash_queue_depth", labels_of(queue="hidden")): 3.0,
    ("dflash_queue_capacity", labels_of(queue="hidden")): 12.0,
    ("dflash_cuda_allocator_inactive_split_bytes", labels_of(device="cuda:0")): 1e9,
    ("dflash_cuda_allocator_reserved_bytes", labels_of(device="cuda:0")): 8e9,
    ("dflash_accuracy_ratio", labels_of(position="1")): 0.75,
    ("dflash_accuracy_ratio", labels_of(position="2")): 0.25,
}


@pytest.fixture(scope="module")
def definitions() -> DefinitionSet:
    """The shipped set, checked against the catalogue."""
    return load(SHIPPED_FILE, catalogue_of(TRAINER_FAMILIES, STEP_FAMILIES, GPU_FAMILIES))


@pytest.fixture(scope="module")
def store() -> Store:
    """Five minutes of that run, one sample a second."""
    store = Store(window_s=600)
    for second in range(301):
        now = START_S + second
        store.append_many(Sample(*key, now, 5e5 + second * rate) for key, rate in rates().items())
        store.append_many(Sample(*key, now, value) for key, value in GAUGES.items())
        store.append(Sample("dflash_loss", (), now, 10 - second * 0.01))
    return store


def test_figures_at_a_tick(definitions: DefinitionSet, store: Store) -> None:
    """Every definition for ticks gives the figure that the run has, under its W&B key."""
    expected = {
        "throughput/target_tokens_per_second": 1800,
        "throughput/drafter_tokens_per_second": 900,
        "throughput/steps_per_second": 3,
        "efficiency/target_padding_ratio": 0.1,
        "efficiency/drafter_padding_ratio": 0.1,
        "efficiency/tokens_per_joule": 2,
        "balance/target_imbalance_ratio": 4 / 3,
        "balance/drafter_imbalance_ratio": 1,
        "queue/hidden_fill_ratio": 0.25,
        "queue/put_blocked_ratio": 0.1,
        "queue/get_blocked_ratio": 0.6,
        "phases/target_forward_time_ratio": 0.75,
        "phases/drafter_forward_time_ratio": 0.25,
        "phases/drafter_backward_time_ratio": 0.5,
        "phases/target_forward_mean_seconds": 0.25,
        "phases/drafter_forward_mean_seconds": 0.125,
        "phases/drafter_backward_mean_seconds": 0.25,
        "data/sequence_length_mean_tokens": 120,
        "data/sequence_length_p95_tokens": 128 + 128 * (9.5 - 8) / 2,
        "data/anchors_used_ratio": 0.25,
        "memory/cuda:0_fragmentation_ratio": 0.125,
        "balance/target_0_utilization_ratio": 1 - 0.1,
        "balance/target_1_utilization_ratio": 1 - 0.1,
        "balance/drafter_0_utilization_ratio": 1 - 0.6,
        "phases/target_forward_step_seconds": 1.5 / 3,
        "phases/target_put_step_seconds": 0.2 / 3,
        "phases/drafter_forward_step_seconds": 0.25 / 3,
        "phases/drafter_backward_step_seconds": 0.5 / 3,
        "phases/drafter_get_step_seconds": 0.6 / 3,
        "phases/target_put_time_ratio": 0.1,
        "phases/drafter_get_time_ratio": 0.6,
        "phases/target_put_mean_seconds": 0.1 / 3,
        "phases/drafter_get_mean_seconds": 0.3,
        "bottleneck/target_ratio": 0.6,
    }
    outcome = definitions.evaluate(store, END_S, "tick")

    assert outcome.failures == ()
    assert outcome.wandb == {key: pytest.approx(value, rel=1e-9) for key, value in expected.items()}


@pytest.mark.parametrize(
    ("put", "get", "phases", "verdict"),
    [
        (0.5, 0.02, {}, {"bottleneck/drafter_ratio": 0.5 * 0.7 / 0.8}),
        (0.02, 0.5, {}, {"bottleneck/target_ratio": 0.5 * 0.6 / 0.8}),
        (0.02, 0.5, {("target", "load"): 2.0}, {"bottleneck/data_ratio": 0.5 * 2.0 / 2.7}),
        (0.02, 0.5, {("target", "d2h"): 2.6}, {"bottleneck/transfer_ratio": 0.5 * 2.0 / 2.7 + 0.02 * 0.1 / 0.8}),
        (0.5, 0.02, {("drafter", "h2d"): 2.1}, {"bottleneck/transfer_ratio": 0.5 * 2.1 / 2.8 + 0.02 * 0.1 / 0.8}),
        (0.01, 0.02, {}, {"bottleneck/none_ratio": 0.05}),
    ],
)
def test_the_verdict_names_what_limits_the_run(
    definitions: DefinitionSet,
    put: float,
    get: float,
    phases: dict[tuple[str, str], float],
    verdict: dict[str, float],
) -> None:
    """Lost time is charged to drafters, targets, data or transfers; with little lost there is no bottleneck."""
    seconds = {("target", "load"): 0.1, ("target", "forward"): 0.5, ("target", "pack"): 0.1, ("target", "d2h"): 0.7}
    seconds |= {("drafter", "h2d"): 0.1, ("drafter", "forward"): 0.2, ("drafter", "backward"): 0.5} | phases
    counters = {("dflash_steps_total", ()): 1.0}
    for (role, phase), rate in seconds.items():
        counters["dflash_phase_seconds_total", labels_of(role=role, worker="0", phase=phase)] = rate
        counters["dflash_batches_total", labels_of(role=role, worker="0")] = 1.0
    for side, rate in (("put", put), ("get", get)):
        counters["dflash_queue_blocked_seconds_total", labels_of(queue="hidden", side=side)] = rate
    store = Store(window_s=600)
    for second in range(61):
        store.append_many(Sample(*key, START_S + second, 5e5 + second * rate) for key, rate in counters.items())
    found = definitions.evaluate(store, START_S + 60, "tick").wandb

    shown = {key: value for key, value in found.items() if key.startswith("bottleneck/")}
    assert shown == {key: pytest.approx(value, rel=1e-6) for key, value in verdict.items()}


def test_figures_at_a_step(definitions: DefinitionSet, store: Store) -> None:
    """The definitions for steps use the samples of the step itself and those before it."""
    outcome = definitions.evaluate(store, START_S + 200, "step")

    assert outcome.failures == ()
    assert outcome.wandb == {
        "quality/accuracy_mean_ratio": pytest.approx(0.5),
        "quality/loss_smoothed": pytest.approx(10 - (200 - 29.5) * 0.01),
    }


def test_every_definition_is_shown(definitions: DefinitionSet, store: Store) -> None:
    """No shipped definition is empty over a run that has everything."""
    shown = {
        family.name
        for outcome in (definitions.evaluate(store, END_S, "tick"), definitions.evaluate(store, END_S, "step"))
        for family in outcome.families
    }

    assert shown == {definition.name for definition in definitions.definitions}


def test_what_is_not_there_is_left_out(definitions: DefinitionSet) -> None:
    """Before the first sample, and without a GPU, nothing is shown and nothing fails."""
    nothing = Outcome(families=(), wandb={}, failures=())

    assert definitions.evaluate(Store(window_s=600), END_S, "tick") == nothing
    assert definitions.evaluate(Store(window_s=600), END_S, "step") == nothing


def test_an_evaluation_of_500_series_is_fast(definitions: DefinitionSet) -> None:
    """Five minutes of 500 series at one sample a second: an evaluation takes well under 20 ms."""
    store = Store(window_s=600)
    counters = {
        (name, tuple(sorted((*labels, ("replica", str(replica)))))): rate
        for (name, labels), rate in rates().items()
        for replica in range(500 // len(rates()) + 1)
    }
    for second in range(301):
        store.append_many(Sample(*key, START_S + second, 1.0 + second * rate) for key, rate in counters.items())
    durations_s = []
    for _ in range(10):
        begin_s = time.perf_counter()
        definitions.evaluate(store, END_S, "tick")
        durations_s.append(time.perf_counter() - begin_s)

    assert len(counters) >= 500
    assert min(durations_s) < 0.020
