"""What the check makes of a run on a GPU, with facts as such a run leaves them."""

from collections.abc import Callable, Mapping

import msgspec
import pytest

from bench.gpu_check.guarded_trainer import CONTROL_THREAD, GuardReport
from bench.gpu_check.outcome import Check, Outcome, attempt
from bench.gpu_check.sync_watch import Synchronisation
from bench.gpu_check.watched_run import Page, RunFacts, WatchedRun
from sidecar.samples import labels_of

UUID = "GPU-1"
CUDA_0 = labels_of(device="cuda:0")
PAGE: Page = {
    ("dflash_gpu_info", labels_of(uuid=UUID, role="drafter+target", worker="0")): 1.0,
    ("dflash_gpu_info", labels_of(uuid="GPU-2", role="", worker="")): 1.0,
    ("dflash_cuda_allocator_allocated_bytes", CUDA_0): 100.0,
    ("dflash_cuda_allocator_allocated_peak_bytes", CUDA_0): 300.0,
    ("dflash_cuda_allocator_reserved_bytes", CUDA_0): 400.0,
}


def wait(thread: str, time_s: float) -> Synchronisation:
    """A wait for the GPU."""
    return Synchronisation(thread=thread, place="trainer/somewhere.py:1 in f", time_s=time_s)


REPORT = GuardReport(
    synchronisations=(wait(CONTROL_THREAD, 0.0), wait("target-0", 8.5), wait("drafter-0", 2.5)),
    is_guarded=True,
    reserved_bytes=400,
    expandable_bytes=400,
)


def outcome(
    check: Callable[[WatchedRun], Check],
    page: Page = PAGE,
    report: GuardReport = REPORT,
    uuids: tuple[str, ...] = (UUID,),
) -> Outcome:
    """One check of a run of ten steps, a second each."""
    run = WatchedRun(((0,), (0,)), (), uuids, 0.0)
    run._facts = RunFacts(page, {}, 143, report, [float(second) for second in range(1, 11)])
    return attempt("check", check(run))


def changed(values: Mapping[str, float]) -> Page:
    """The page with other figures of the allocator."""
    return PAGE | {(f"dflash_cuda_allocator_{name}_bytes", CUDA_0): value for name, value in values.items()}


def test_only_waits_of_the_step_path_after_the_warm_up_fail() -> None:
    """A target that waits and a drafter in its second step pass; a drafter in its eighth step fails with the place."""
    good = outcome(lambda run: run.check_synchronisations)
    late = msgspec.structs.replace(REPORT, synchronisations=(*REPORT.synchronisations, wait("drafter-0", 8.0)))
    bad = outcome(lambda run: run.check_synchronisations, report=late)

    assert (good.outcome, good.figures["guarded_steps"], good.figures["waits_allowed"]) == ("passed", 5, 3)
    assert bad.outcome == "failed"
    assert bad.figures["places"] == ["drafter-0: trainer/somewhere.py:1 in f"]


def test_a_watch_that_notices_nothing_proves_nothing() -> None:
    """Without the wait that was made on purpose the check fails; a run without a GPU is skipped."""
    blind = outcome(lambda run: run.check_synchronisations, report=GuardReport(synchronisations=(), is_guarded=True))
    cpu = outcome(lambda run: run.check_synchronisations, report=GuardReport(synchronisations=(), is_guarded=False))

    assert (blind.outcome, cpu.outcome) == ("failed", "skipped")
    assert "on purpose" in blind.detail


def test_the_roles_must_be_on_the_gpus_of_the_run() -> None:
    """The right GPU passes; another one, or a run whose UUID the driver does not give, fails."""
    assert outcome(lambda run: run.check_owners).outcome == "passed"
    assert outcome(lambda run: run.check_owners, uuids=("GPU-2",)).outcome == "failed"
    assert outcome(lambda run: run.check_owners, page={}).detail == "the run is on ('GPU-1',), the page says nothing"


@pytest.mark.parametrize(
    "values", [{"allocated": 0.0}, {"allocated": 301.0}, {"allocated": 500.0, "allocated_peak": 600.0}]
)
def test_figures_of_the_allocator_must_hang_together(values: dict[str, float]) -> None:
    """Nothing allocated, more than the peak, or more than is reserved: each fails, and as they are they pass."""
    assert outcome(lambda run: run.check_allocator).outcome == "passed"
    assert outcome(lambda run: run.check_allocator, page=changed(values)).outcome == "failed"


def test_an_allocator_that_cannot_grow_is_a_failure_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without growing segments it fails; where the user chose the allocator's settings that is what they get."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    fixed = msgspec.structs.replace(REPORT, expandable_bytes=0)
    by_itself = outcome(lambda run: run.check_allocator, report=fixed)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")

    assert by_itself.outcome == "failed"
    assert outcome(lambda run: run.check_allocator, report=fixed).outcome == "passed"


def test_without_a_run_each_check_of_it_says_so() -> None:
    """They fail, and name the check that has the reason."""
    run = WatchedRun(((0,), (0,)), (), (UUID,), 0.0)
    found = [attempt("check", check) for check in (run.check_synchronisations, run.check_allocator, run.check_owners)]

    assert {(one.outcome, one.detail) for one in found} == {
        ("failed", "there was no training run to look at; see the check before")
    }
