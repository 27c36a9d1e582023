"""All GPUs of this machine: initialises the driver, keeps a thread for each GPU, and notices those that come and go.

No GPU waits for another: a call that never returns leaves the other threads as they are. The driver is shut down only
while no call is in progress. It is initialised anew, because only that brings a lost GPU back or shows a new one, when
a GPU is lost, when the number of GPUs has changed and when the driver was missing; while nothing comes of it the pause
grows. After a mismatch the library is loaded anew too, since an update of the driver replaces its file.
"""

import _ctypes
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pynvml

from sidecar.collectors.nvml_catalogue import GPU_FAMILIES
from sidecar.collectors.nvml_errors import ABSENT
from sidecar.collectors.nvml_events import XidWatch
from sidecar.collectors.nvml_gate import CallGate, GateClosedError
from sidecar.collectors.nvml_gpu import Gpu, GpuDetails, Owners
from sidecar.collectors.reading import Reading, export
from sidecar.collectors.runner import Worker
from sidecar.samples import ExportedFamily, labels_of

SLOW_INTERVAL_S = 10.0
QUIET_TIMEOUT_S = 1.0
"""How long a new initialisation waits for calls in progress before it is put off."""
MAX_PAUSE_FACTOR = 10
REFRESH_FACTOR = 20
"""So many probes after the newest initialisation a new one is due where nothing else tells of an added GPU."""
GPU_DIRECTORY = Path("/proc/driver/nvidia/gpus")
"""Has an entry for each GPU that the kernel driver has; the library sees only those of its initialisation."""
_log = logging.getLogger(__name__)


class GpuFleet:
    """Reads all GPUs until closed; itself a collector, which looks after the driver.

    Args:
        interval_s: time between two readings of a GPU.
        deadline_s: a reading that takes longer counts as failed.
        probe_s: time between attempts to find a missing driver or a lost or new GPU.
        owners: whose GPUs they are.
    """

    name = "nvml"

    def __init__(
        self, interval_s: float, deadline_s: float, probe_s: float = 30.0, owners: Owners | None = None
    ) -> None:
        self._pace = (interval_s, deadline_s)
        self._probe_s = probe_s
        self._owners = owners or Owners()
        self._gate = CallGate()
        self._xids = XidWatch(self._gate, interval_s)
        self._gpus: tuple[Gpu, ...] = ()
        self._workers: tuple[Worker, ...] = ()
        self._seen: set[str] = set()
        self._is_initialized = False
        self._next_probe_s = float("-inf")
        self._next_init_s = float("-inf")
        self._num_vain = 0
        self._initialized_s = 0.0
        self._present: frozenset[str] | None = None
        self._failure: pynvml.NVMLError | None = None
        self._driver_worker = Worker(self, *self._pace, source="driver")

    def start(self) -> None:
        """Start looking for GPUs."""
        self._xids.thread.start()
        self._driver_worker.start()

    @property
    def has_read(self) -> bool:
        """Whether driver and GPUs have been read, or are known to be missing."""
        return all(worker.latest() is not None for worker in (self._driver_worker, *self._workers))

    def latest(self) -> list[Reading]:
        """The newest reading of the driver, of each GPU, and of the events. Never blocks."""
        readings = [reading for worker in self._workers if (reading := worker.latest()) is not None]
        lost = {
            reading.source: reading for reading in readings if reading.collector == Gpu.name and not reading.success
        }
        driver = self._driver_worker.latest()
        return [
            *([] if driver is None else [driver]),
            *(_without_details(reading, lost.get(reading.source)) for reading in readings),
            *self._xids.latest(),
        ]

    def close(self, timeout_s: float) -> None:
        """Let calls in progress return and shut the driver down; a call that does not return in time is abandoned."""
        deadline_s = time.monotonic() + timeout_s
        self._xids.stop()
        self._driver_worker.stopping.set()
        self._driver_worker.join_until(deadline_s)  # from here on nobody starts another thread
        for worker in self._workers:
            worker.stopping.set()
        if not self._gate.close(max(deadline_s - time.monotonic(), 0.0)) or self._driver_worker.is_alive():
            _log.warning("a call into the GPU driver does not return; it is abandoned")
            return
        if self._is_initialized:
            shutdown = threading.Thread(target=_shutdown, name="nvml-shutdown", daemon=True)
            shutdown.start()
            shutdown.join(max(deadline_s - time.monotonic(), 0.1))

    def collect(self) -> Sequence[ExportedFamily]:
        """Look after the driver when it is time; raises NVMLError when it is there but refuses to be used."""
        now_s = time.monotonic()
        if now_s >= self._next_probe_s:
            self._probe(now_s)
        if self._failure is not None:
            raise self._failure
        self._seen |= {gpu.uuid for gpu in self._gpus if gpu.uuid}
        missing = self._seen - {gpu.uuid for gpu in self._gpus}
        return export(GPU_FAMILIES, [("dflash_gpu_up", labels_of(uuid=uuid), 0.0) for uuid in sorted(missing)])

    def unread(self) -> Sequence[ExportedFamily]:
        """What is shown while the driver refuses: the GPUs known are down."""
        return export(GPU_FAMILIES, [("dflash_gpu_up", labels_of(uuid=uuid), 0.0) for uuid in sorted(self._seen)])

    def _probe(self, now_s: float) -> None:
        if self._is_initialized and not self._is_wrong():
            self._num_vain = 0
            self._next_probe_s = now_s + self._probe_s
            return
        self._next_probe_s = now_s + self._probe_s
        if self._is_initialized:
            if now_s < self._next_init_s or not self._gate.close(QUIET_TIMEOUT_S):
                return
            self._num_vain += 1
            self._is_initialized = False
            _shutdown()
        self._next_init_s = now_s + self._probe_s * min(2 ** min(self._num_vain, 8) - 1, MAX_PAUSE_FACTOR)
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._forget_gpus()
            self._failure = None
            if error.value in ABSENT:
                return
            self._next_probe_s = now_s + min(self._probe_s, 5.0)
            if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
                _unload_library()
            self._failure = error
            return
        self._is_initialized, self._failure = True, None
        self._initialized_s, self._present = now_s, _present()
        self._gate.open()
        try:
            self._keep_threads(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:  # it is asked again after the next initialisation
            self._failure = error

    def _is_wrong(self) -> bool:
        """Whether only a new initialisation helps."""
        try:
            with self._gate.calls():
                if pynvml.nvmlDeviceGetCount() != len(self._gpus) or any(gpu.is_lost for gpu in self._gpus):
                    return True
        except (GateClosedError, pynvml.NVMLError):
            return True
        present = _present()
        is_due = time.monotonic() >= self._initialized_s + REFRESH_FACTOR * self._probe_s
        return is_due if present is None else present != self._present

    def _forget_gpus(self) -> None:
        self._seen |= {gpu.uuid for gpu in self._gpus if gpu.uuid}
        self._keep_threads(0)

    def _keep_threads(self, num_gpus: int) -> None:
        """Have two threads for each GPU; those that are there stay."""
        for worker in self._workers[2 * num_gpus :]:
            worker.stopping.set()
        gpus, workers = list(self._gpus[:num_gpus]), list(self._workers[: 2 * num_gpus])
        interval_s, deadline_s = self._pace
        for index in range(len(gpus), num_gpus):
            gpu = Gpu(index, self._gate, self._xids, self._owners)
            gpus.append(gpu)
            slow_s = max(SLOW_INTERVAL_S, interval_s) if interval_s >= 1.0 else 10 * interval_s
            workers += [
                Worker(gpu, interval_s, deadline_s, source=f"gpu{index}"),
                Worker(GpuDetails(gpu, self._gate), slow_s, deadline_s, source=f"gpu{index}"),
            ]
            workers[-2].start()
            workers[-1].start()
        self._gpus, self._workers = tuple(gpus), tuple(workers)


def _present() -> frozenset[str] | None:
    """The GPUs of the kernel driver; None where it does not say."""
    try:
        return frozenset(path.name for path in GPU_DIRECTORY.iterdir())
    except OSError:
        return None


def _without_details(reading: Reading, lost: Reading | None) -> Reading:
    """What a slow reading is worth once its GPU is lost: nothing, or it would look alive until the next."""
    if lost is None or reading.collector != GpuDetails.name:
        return reading
    return msgspec.structs.replace(reading, success=False, families=(), time_s=lost.time_s, error=lost.error)


def _shutdown() -> None:
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


def _unload_library() -> None:
    """Let go of a library that does not fit the driver, so that the next attempt loads the file that is there then."""
    library, pynvml.nvmlLib = pynvml.nvmlLib, None
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - it holds functions of the library that goes
    if library is not None:
        _ctypes.dlclose(library._handle)  # noqa: SLF001 - ctypes has no public way to close a library
