"""One GPU in a thread of its own, known to the driver by its index and to everybody else by its UUID.

The thread finds the GPU itself, because already that may hang. One failing query never removes another: what is not
supported is asked again after a while, anything else at the next reading. When the handle is dead, or no query at all
is answered, the GPU is lost: its series go, `dflash_gpu_up` is 0, until the driver has been initialised anew.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import pynvml

from sidecar.collectors.nvml_catalogue import GPU_FAMILIES
from sidecar.collectors.nvml_device import Device
from sidecar.collectors.nvml_errors import GONE, UNSUPPORTED
from sidecar.collectors.nvml_events import XidWatch
from sidecar.collectors.nvml_gate import CallGate
from sidecar.collectors.nvml_gpm import PerformanceMonitor
from sidecar.collectors.nvml_queries import FAST_QUERIES, MEMORY_QUERY, SLOW_QUERIES, Query
from sidecar.collectors.nvml_throttle import Throttling
from sidecar.collectors.reading import export
from sidecar.gpu_owners import NO_OWNER, Owner, bare_uuid
from sidecar.samples import ExportedFamily, Labels, Point, labels_of

UNSUPPORTED_RETRY_S = 600.0
FIND_WAIT_S = 1.0
_Signal = tuple[str, tuple[str, ...]]
"""UUID and families of a query: a query of its own may be a new object after each initialisation."""
LASTING_S = 10.0
"""A query that has failed for so long is worth a line in the log."""
_log = logging.getLogger(__name__)


class Owners:
    """What is known of the trainers; both are called for each reading, from any thread."""

    def __init__(
        self,
        gpus: Callable[[], Mapping[str, Owner]] = dict,
        trainers: Callable[[], Mapping[int, Labels]] = dict,
    ) -> None:
        self.gpus = gpus
        self.trainers = trainers


class Gpu:
    """The GPU of one index; a collector.

    Args:
        index: the driver's number.
        gate: closed while the driver must not be called.
        xids: is told of the GPU when it is found.
        owners: whose GPU it is.
    """

    name = "nvml"

    def __init__(self, index: int, gate: CallGate, xids: XidWatch, owners: Owners) -> None:
        self._index = index
        self._gate = gate
        self._xids = xids
        self._owners = owners
        self._generation = 0
        self.devices: tuple[Device, ...] = ()
        """The GPU and its MIG instances; empty when it is lost."""
        self.uuid = ""
        """The last one found at this index."""
        self._throttling = Throttling()
        self._queries: tuple[Query, ...] = ()
        self.found = threading.Event()
        self._failing_s: dict[_Signal, float] = {}
        self._reported: set[_Signal] = set()

    @property
    def is_lost(self) -> bool:
        """Whether only a new initialisation can bring it back."""
        return self._generation == self._gate.generation and not self.devices

    def devices_of(self, generation: int) -> tuple[Device, ...]:
        """Handles that are good in this generation."""
        return self.devices if self._generation == generation else ()

    def collect(self) -> Sequence[ExportedFamily]:
        """Read what changes all the time."""
        with self._gate.calls():
            if self._generation != self._gate.generation:
                self._find()
            if not self.devices:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            values: list[Point] = [("dflash_gpu_up", self.devices[0].labels, 1.0)]
            for device in self.devices:
                queries = (MEMORY_QUERY,) if device.parent else self._queries
                values.append(("dflash_gpu_info", self._info(device), 1.0))
                answers = self.read(device, queries)
                if not answers and any(uuid == device.uuid for uuid, _ in self._failing_s):
                    self._give_up(device)
                values += answers
            return export(GPU_FAMILIES, values)

    def _give_up(self, device: Device) -> None:
        """Nothing at all is answered: of a MIG instance because it is gone, of a GPU because it is as good as lost."""
        if device.parent is not None:
            self.find_again()
            return
        self.devices = ()
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    def find_again(self) -> None:
        """Take new handles at the next reading: the MIG instances are others now."""
        self._generation = 0

    def unread(self) -> Sequence[ExportedFamily]:
        """What is shown while it cannot be read."""
        return export(GPU_FAMILIES, [("dflash_gpu_up", labels_of(uuid=self.uuid), 0.0)] if self.uuid else [])

    def read(self, device: Device, queries: Iterable[Query]) -> list[Point]:
        """Values of all queries that work; raises NVMLError when the GPU is gone."""
        values: list[Point] = []
        now_s = time.monotonic()
        for query in queries:
            if device.retry_s.get(query, now_s) > now_s:
                continue
            try:
                values += query.read(device)
            except pynvml.NVMLError as error:
                if error.value in GONE:
                    self.devices = ()
                    raise
                if error.value in UNSUPPORTED:
                    device.retry_s[query] = now_s + UNSUPPORTED_RETRY_S
                    continue
                self._failed(device, query, error, now_s)
            else:
                self._worked(device, query, now_s)
        return values

    def memory_of_processes(self, device: Device) -> list[Point]:
        """Memory of the trainers that run on it, under their labels, and of all others together."""
        trainers = self._owners.trainers()
        family = "dflash_gpu_process_memory_bytes"
        used: dict[Labels, float] = {device.labels_with("process", "other"): 0.0}
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device.handle):
            if process.usedGpuMemory is None:
                continue
            labels = device.labels_with("process", "other")
            if process.pid in trainers:
                own = dict(trainers[process.pid])
                labels = labels_of(**{**own, "uuid": device.uuid, "process": "trainer"})
            used[labels] = used.get(labels, 0.0) + float(process.usedGpuMemory)
        return [(family, labels, value) for labels, value in used.items()]

    def _find(self) -> None:
        """Take the handle of this generation, good or not."""
        self._generation, self.devices = self._gate.generation, ()
        driver = pynvml.nvmlSystemGetDriverVersion()
        gpu = Device(pynvml.nvmlDeviceGetHandleByIndex(self._index), str(self._index), driver)
        if self.uuid != gpu.uuid:
            self._throttling = Throttling()
        self.uuid = gpu.uuid
        self._queries = (*FAST_QUERIES, self._throttling.query, PerformanceMonitor().query)
        self._xids.register(gpu)
        self.devices = (gpu, *gpu.instances())
        known = {device.uuid for device in self.devices}
        self._failing_s = {key: since_s for key, since_s in self._failing_s.items() if key[0] in known}
        self._reported.intersection_update(self._failing_s)
        self.found.set()

    def _info(self, device: Device) -> Labels:
        owner = self._owners.gpus().get(bare_uuid(device.uuid), NO_OWNER)
        return labels_of(**{**owner, **device.identity})

    def _failed(self, device: Device, query: Query, error: pynvml.NVMLError, now_s: float) -> None:
        key = (device.uuid, query.families)
        if now_s - self._failing_s.setdefault(key, now_s) >= LASTING_S and key not in self._reported:
            self._reported.add(key)
            _log.warning("GPU %s: %s cannot be read: %s", device.uuid, ", ".join(query.families), error)

    def _worked(self, device: Device, query: Query, now_s: float) -> None:
        key = (device.uuid, query.families)
        since_s = self._failing_s.pop(key, None)
        if since_s is not None and key in self._reported:
            self._reported.discard(key)
            _log.info("GPU %s: %s is read again after %.0f s", device.uuid, ", ".join(query.families), now_s - since_s)


class GpuDetails:
    """What costs milliseconds or changes rarely, of one GPU; a collector with a thread and a slower pace of its own."""

    name = "nvml_slow"

    def __init__(self, gpu: Gpu, gate: CallGate) -> None:
        self._gpu = gpu
        self._gate = gate
        self._processes = Query(("dflash_gpu_process_memory_bytes",), gpu.memory_of_processes)

    def collect(self) -> Sequence[ExportedFamily]:
        """Read it, unless the GPU is lost, of which its own thread tells."""
        self._gpu.found.wait(FIND_WAIT_S)
        with self._gate.calls():
            generation = self._gate.generation
            values: list[Point] = []
            devices = self._gpu.devices_of(generation)
            if devices and {d.uuid for d in devices[0].instances()} != {d.uuid for d in devices[1:]}:
                self._gpu.find_again()
            for device in devices:
                queries = (self._processes,) if device.parent else (*SLOW_QUERIES, self._processes)
                values += self._gpu.read(device, queries)
            return export(GPU_FAMILIES, values)

    def unread(self) -> Sequence[ExportedFamily]:
        """Nothing: whether the GPU is up is not for it to say."""
        return ()
