"""Counts XID errors per GPU and code, as the driver tells of them; those before the sidecar started are not known.

One thread makes every call about events, so one that hangs costs no GPU its values. It waits in the driver, never
longer than WAIT_MS, so that it can be stopped. The counts outlive a lost GPU: an XID is often the last that is heard of
one. A series begins at 0 one reading before its first count, because a counter that begins at 1 has no increase. A GPU
is listened to at the latest WAIT_MS after it was found.
"""

import ctypes
import logging
import queue
import threading
import time
from typing import NamedTuple

import pynvml

from sidecar.collectors.nvml_catalogue import EVENT_FAMILIES
from sidecar.collectors.nvml_device import Device, Handle
from sidecar.collectors.nvml_gate import CallGate, GateClosedError
from sidecar.collectors.reading import Reading, export
from sidecar.collectors.runner import FailureLog
from sidecar.samples import Point, labels_of

WAIT_MS = 500
LATE_S = 5.0
"""The thread goes around at least so often, unless a call hangs."""
QUIET_S = 60.0
"""Time between two lines in the log about the same XID of the same GPU."""
NAME = "nvml_events"
_log = logging.getLogger(__name__)

_Key = tuple[str, int]
"""UUID and XID."""


class _Events(NamedTuple):
    """The driver's set of events, and whom the handles in it stand for, from one initialisation to the next."""

    generation: int
    handle: object
    uuids: dict[int | None, str]


class XidWatch:
    """Start its thread once; `register` may be called by any thread inside the gate, `latest` by one.

    Args:
        gate: closed while the driver must not be called.
        interval_s: time between two readings of the counts.
    """

    def __init__(self, gate: CallGate, interval_s: float) -> None:
        self._interval_s = interval_s
        self._reading: Reading | None = None
        self._gate = gate
        self._arrivals: queue.SimpleQueue[tuple[int, Device]] = queue.SimpleQueue()
        self._is_used = False
        self._events: _Events | None = None
        self._counts: dict[_Key, int] = {}
        self._shown: set[_Key] = set()
        self._told_s: dict[_Key, float] = {}
        self._without: set[str] = set()
        self._failure = ""
        self._failures = FailureLog(NAME)
        self._turned_s = time.monotonic()
        self._stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="collect-nvml-events", daemon=True)

    def stop(self) -> None:
        """End after the wait in progress."""
        self._stopping.set()

    def register(self, device: Device) -> None:
        """Have a GPU listened to from now on; one that has no events is left alone."""
        self._is_used = True
        self._arrivals.put((self._gate.generation, device))

    def latest(self) -> list[Reading]:
        """All counts, once there is somebody to listen to."""
        if not self._is_used:
            return []
        if self._reading is not None and 0.0 <= time.time() - self._reading.time_s < self._interval_s:
            return [self._reading]
        late_s = time.monotonic() - self._turned_s
        failure = f"no answer within {LATE_S:g} s" if late_s > LATE_S else self._failure
        values: list[Point] = []
        for key, count in self._counts.copy().items():
            labels = labels_of(uuid=key[0], code=str(key[1]))
            values.append(("dflash_gpu_xid_errors_total", labels, float(count if key in self._shown else 0)))
            self._shown.add(key)
        self._reading = Reading(
            collector=NAME,
            success=not failure,
            time_s=time.time(),
            duration_s=late_s if failure else 0.0,
            families=export(EVENT_FAMILIES, values),
            error=failure,
        )
        self._failures.tell(failure)
        return [self._reading]

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._turned_s = time.monotonic()
            try:
                with self._gate.calls(WAIT_MS / 1000):
                    self._admit()
                    self._wait()
            except GateClosedError:
                continue
            except pynvml.NVMLError as error:
                self._failure = str(error)
                self._stopping.wait(WAIT_MS / 1000)  # an error that returns at once must not become a busy loop
            else:
                self._failure = ""

    def _admit(self) -> None:
        """Listen to those that have arrived; the handles of an earlier generation are dead."""
        while not self._arrivals.empty():
            generation, device = self._arrivals.get()
            if generation != self._gate.generation:
                continue
            try:
                if self._events is None or self._events.generation != generation:
                    self._events = _Events(generation, pynvml.nvmlEventSetCreate(), {})
                self._events.uuids[_address(device.handle)] = device.uuid
                pynvml.nvmlDeviceRegisterEvents(
                    device.handle, pynvml.nvmlEventTypeXidCriticalError, self._events.handle
                )
            except pynvml.NVMLError as error:
                if device.uuid not in self._without:
                    self._without.add(device.uuid)
                    _log.info("GPU %s tells of no XID errors: %s", device.uuid, error)

    def _wait(self) -> None:
        """Wait for one event, or a while for somebody to listen to."""
        if self._events is None or self._events.generation != self._gate.generation:
            self._stopping.wait(WAIT_MS / 1000)
            return
        try:
            event = pynvml.nvmlEventSetWait_v2(self._events.handle, WAIT_MS)
        except pynvml.NVMLError_Timeout:
            return
        if event.eventType & pynvml.nvmlEventTypeXidCriticalError:
            self._count((self._events.uuids.get(_address(event.device), ""), int(event.eventData)))

    def _count(self, key: _Key) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        now_s = time.monotonic()
        if now_s >= self._told_s.get(key, float("-inf")) + QUIET_S:
            self._told_s[key] = now_s
            _log.warning("GPU %s: XID %d", *key)


def _address(handle: Handle) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value  # type: ignore[arg-type]
