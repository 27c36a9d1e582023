"""Waits for a GPU are put down to the right thread and place; here a warning in torch's words stands for each."""

import threading
import warnings
from pathlib import Path

import msgspec
import pytest

from bench.gpu_check.sync_watch import WARNING, Synchronisation, SyncWatch, on_step_path, step_times_s
from shared.wire import Event, Step
from trainer.stopping import Stop
from trainer.supervisor import Supervisor


def wait_for_gpu() -> None:
    """What torch does in sync-debug mode when a thread waits."""
    warnings.warn(f"{WARNING} (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:187.)", stacklevel=1)


def test_each_wait_has_its_thread_and_its_place_in_our_code() -> None:
    """Two workers wait, one of them twice at the same line: three waits, and the mode is as before in the end."""
    modes: list[str] = []
    workers = {"drafter-0": lambda: [wait_for_gpu() for _ in range(2)], "target-0": wait_for_gpu}

    with SyncWatch(modes.append) as watch:
        Supervisor(Stop(), lambda: None).run(workers, lambda: None)  # type: ignore[arg-type]  # what they return is lost

    assert sorted(one.thread for one in watch.found) == ["drafter-0", "drafter-0", "target-0"]
    assert {one.place.split(":")[0] for one in watch.found} == {"trainer/supervisor.py"}
    assert all(one.place.endswith(" in _guard") for one in watch.found)
    assert modes == ["warn", "default"]


def test_other_warnings_pass_and_all_is_as_before_at_the_end() -> None:
    """A warning of another kind is still an error here; after the watch so is that of a wait."""
    with SyncWatch(lambda _mode: None) as watch, pytest.raises(UserWarning, match="another"):
        warnings.warn("another", stacklevel=1)

    assert watch.found == []
    with pytest.raises(UserWarning, match=WARNING):
        wait_for_gpu()


def test_a_wait_outside_of_our_code_has_the_place_of_whoever_waits() -> None:
    """A thread that never came through the trainer shows the line that waited."""
    with SyncWatch(lambda _mode: None) as watch:
        thread = threading.Thread(target=wait_for_gpu, name="control")
        thread.start()
        thread.join()

    assert [one.thread for one in watch.found] == ["control"]
    assert watch.found[0].place.startswith("tests/bench/gpu_check/test_sync_watch.py:")
    assert watch.found[0].place.endswith(" in wait_for_gpu")


def test_only_drafters_and_telemetry_after_the_warm_up_count(tmp_path: Path) -> None:
    """Targets may wait, and so may a drafter in its first five steps and after its last, when it saves."""
    step = Step(
        session="s",
        seq=1,
        time_s=0.0,
        step=1,
        loss=1.0,
        accuracy_ratio=(),
        accept_length_simulated=1.0,
        learning_rate=0.1,
        grad_norm=1.0,
        tokens_real=1,
        tokens_padding=0,
        sequence_lengths_tokens=(1,),
        queue_wait_s=0.0,
    )
    records = [msgspec.structs.replace(step, time_s=float(second)) for second in range(1, 9)]
    lines = [*map(msgspec.json.encode, records), msgspec.json.encode(Event("s", 9, 9.5, "goodbye", {"exit_code": 0}))]
    (tmp_path / "audit").write_bytes(b"\n".join(lines) + b"\n")
    times_s = step_times_s(tmp_path / "audit")
    found = [
        Synchronisation(thread=thread, place="somewhere", time_s=time_s)
        for thread in ("drafter-0", "target-0", "telemetry", "MainThread")
        for time_s in (4.5, 6.5, 9.0)
    ]

    assert times_s == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert [(one.thread, one.time_s) for one in on_step_path(found, times_s)] == [
        ("drafter-0", 6.5),
        ("telemetry", 6.5),
    ]
