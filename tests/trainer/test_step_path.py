"""What the step path must never do for the sake of a metric: wait for a device, or call into ZeroMQ."""

import ast
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from training_run import trainer_arguments

from bench.gpu_check.sync_watch import SyncWatch, on_step_path, step_times_s
from trainer.app import main

ROOT = Path(__file__).parents[2]
STEP_PATH = (
    "shared/cells.py",
    "trainer/anchors.py",
    "trainer/attention.py",
    "trainer/drafter.py",
    "trainer/drafter_worker.py",
    "trainer/flex_masks.py",
    "trainer/hidden_queue.py",
    "trainer/instruments.py",
    "trainer/intake.py",
    "trainer/loss.py",
    "trainer/nonfinite.py",
    "trainer/optimizer.py",
    "trainer/packing.py",
    "trainer/reduce.py",
    "trainer/step_report.py",
    "trainer/target.py",
    "trainer/target_worker.py",
    "trainer/tiled_head.py",
    "trainer/transfers.py",
)
WAITS = {"item", "tolist", "cpu", "numpy", "synchronize", "elapsed_time", "nonzero", "memory_stats"}
ALLOWED = {
    # Before anything is on a device: what was drawn on the host is looked at there.
    ("trainer/anchors.py", "lay_out", "nonzero"),
    ("trainer/anchors.py", "_spans", "tolist"),
    # On the telemetry thread, of events that have happened and of pinned memory that has been filled.
    ("trainer/instruments.py", "collect", "elapsed_time"),
    ("trainer/instruments.py", "collect", "tolist"),
    # No metric: a mask that never was anywhere but on the host, and hidden states for a drafter on the CPU.
    ("trainer/transfers.py", "real_positions", "nonzero"),
    ("trainer/transfers.py", "start", "synchronize"),
}


def waiting_calls(path: Path) -> Iterator[tuple[str, str]]:
    """The calls in a file that would wait for a device, with the function they are in."""
    tree = ast.parse(path.read_text())
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
                yield function.name, node.func.attr


@pytest.mark.parametrize("file", STEP_PATH)
def test_nothing_on_the_step_path_waits_for_a_device(file: str) -> None:
    """No call that copies from or waits for a device, but for those that the telemetry thread makes afterwards."""
    found = {(file, function, call) for function, call in waiting_calls(ROOT / file)}

    assert found - ALLOWED == set()


def test_only_the_telemetry_thread_calls_into_zeromq(
    small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a whole run every send, poll and receive is made by the thread that is named for it."""
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(tmp_path / "runtime"))
    callers: dict[str, set[str]] = {}

    def watched(name: str) -> Any:
        original = getattr(zmq.Socket, name)

        def call(socket: zmq.Socket[bytes], *args: Any, **kwargs: Any) -> Any:
            callers.setdefault(name, set()).add(threading.current_thread().name)
            return original(socket, *args, **kwargs)

        return call

    for name in ("send", "send_multipart", "recv", "recv_multipart", "poll"):
        monkeypatch.setattr(zmq.Socket, name, watched(name))

    status = main([*trainer_arguments(small_target, tmp_path / "run")[2:], "--max-steps", "30"])

    assert status == 0
    assert {"send_multipart", "poll"} <= callers.keys()
    assert set().union(*callers.values()) == {"telemetry"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_metric_synchronises(small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 30 steps the threads of drafters and of telemetry never wait for the GPU, once the first steps are over."""
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(tmp_path / "runtime"))
    audit = tmp_path / "audit"
    devices = {"devices__targets": "[0]", "devices__drafters": "[0]", "telemetry__audit_path": audit}
    arguments = trainer_arguments(small_target, tmp_path / "run", **devices)[2:]

    with SyncWatch(torch.cuda.set_sync_debug_mode) as watch:
        torch.ones(1, device="cuda").item()
        assert main([*arguments, "--max-steps", "30"]) == 0

    assert watch.found[0].thread == threading.current_thread().name
    assert on_step_path(watch.found, step_times_s(audit)) == []
