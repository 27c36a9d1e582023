"""Counts XID errors per GPU and code, as the driver tells of them; those before the sidecar started are not known.

One thread waits in the driver, never longer than WAIT_MS, so that it can be stopped. The counts outlive a lost GPU: an
XID is often the last that is heard of one. A series begins at 0 one reading before its first count, because a counter
that begins at 1 has no increase.
"""

import ctypes
import logging
import threading
import time

import pynvml

from sidecar.collectors.nvml_catalogue import EVENT_FAMILIES
from sidecar.collectors.nvml_device import Device
from sidecar.collectors.nvml_gate import CallGate, GateClosedError
from sidecar.collectors.reading import Reading, Value, export
from sidecar.samples import labels_of

WAIT_MS = 500
NAME = "nvml_events"
_log = logging.getLogger(__name__)


class XidWatch:
    """Start it once; `register` may be called by any thread inside the gate.

    Args:
        gate: closed while the driver must not be called.
        interval_s: time between two readings of the counts.
    """

    def __init__(self, gate: CallGate, interval_s: float) -> None:
        self._interval_s = interval_s
        self._reading: Reading | None = None
        self._gate = gate
        self._lock = threading.Lock()
        self._set: tuple[int, object] | None = None
        self._uuids: dict[int | None, str] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._shown: set[tuple[str, int]] = set()
        self._failure = ""
        self._stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="collect-nvml-events", daemon=True)

    def stop(self) -> None:
        """End after the wait in progress."""
        self._stopping.set()

    def register(self, device: Device) -> None:
        """Listen to a GPU from now on; one that has no events is left alone."""
        try:
            with self._lock:
                events = self._current_set()
                self._uuids[_address(device.handle)] = device.uuid
            pynvml.nvmlDeviceRegisterEvents(device.handle, pynvml.nvmlEventTypeXidCriticalError, events)
        except pynvml.NVMLError as error:
            _log.info("GPU %s tells of no XID errors: %s", device.uuid, error)

    def latest(self) -> list[Reading]:
        """All counts, once there is something to listen to."""
        if self._set is None:
            return []
        if self._reading is not None and 0.0 <= time.time() - self._reading.time_s < self._interval_s:
            return [self._reading]
        values: list[Value] = []
        with self._lock:
            for key, count in self._counts.items():
                labels = labels_of(uuid=key[0], code=str(key[1]))
                values.append(("dflash_gpu_xid_errors_total", labels, float(count if key in self._shown else 0)))
            self._shown.update(self._counts)
        self._reading = Reading(
            collector=NAME,
            success=not self._failure,
            time_s=time.time(),
            duration_s=0.0,
            families=export(EVENT_FAMILIES, values),
            error=self._failure,
        )
        return [self._reading]

    def _current_set(self) -> object:
        """The set of events of this generation; the one before went with the driver's shutdown."""
        if self._set is None or self._set[0] != self._gate.generation:
            self._set = (self._gate.generation, pynvml.nvmlEventSetCreate())
            self._uuids.clear()
        return self._set[1]

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._gate.calls(WAIT_MS / 1000):
                    self._wait()
            except GateClosedError:
                continue

    def _wait(self) -> None:
        known = self._set
        if known is None or known[0] != self._gate.generation:
            self._stopping.wait(WAIT_MS / 1000)
            return
        try:
            event = pynvml.nvmlEventSetWait_v2(known[1], WAIT_MS)
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_TIMEOUT:
                self._failure = str(error)
                self._stopping.wait(WAIT_MS / 1000)  # an error that returns at once must not become a busy loop
            else:
                self._failure = ""
            return
        self._failure = ""
        if event.eventType & pynvml.nvmlEventTypeXidCriticalError:
            with self._lock:
                uuid = self._uuids.get(_address(event.device), "")
                key = (uuid, int(event.eventData))
                self._counts[key] = self._counts.get(key, 0) + 1
            _log.warning("GPU %s: XID %d", uuid, event.eventData)


def _address(handle: object) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value  # type: ignore[arg-type]
