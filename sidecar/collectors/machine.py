"""Everything that is read from this machine: host, disks, trainer processes and GPUs, each with its own threads."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sidecar.collectors.disk import DiskCollector
from sidecar.collectors.host import HostCollector
from sidecar.collectors.nvml import GpuFleet
from sidecar.collectors.nvml_gpu import Owners
from sidecar.collectors.process import ProcessCollector, ProcessMemoryCollector
from sidecar.collectors.reading import Collector, Reading
from sidecar.collectors.runner import CollectorRunner
from sidecar.collectors.watched import WatchedTrainers
from sidecar.config import CollectorConfig
from sidecar.gpu_owners import Owner
from sidecar.stored import StoredSession

GPU_CLOSE_S = 6.0
"""How long an orderly end waits for a call into the GPU driver: cutting one off has frozen GPUs."""
MEMORY_INTERVAL_S = 60.0
"""The kernel walks all pages of a trainer for its unique memory."""


class Machine:
    """The collectors of this machine.

    Args:
        config: their pace.
        state_dir: its disk is watched.
        trainers: every live session of this machine; called from any thread.
        gpu_owners: bare UUID of a GPU to whose it is; called from any thread.
    """

    def __init__(
        self,
        config: CollectorConfig,
        state_dir: Path,
        trainers: Callable[[], Sequence[StoredSession]],
        gpu_owners: Callable[[], Mapping[str, Owner]],
    ) -> None:
        watched = WatchedTrainers(trainers)
        process, memory = ProcessCollector(watched), ProcessMemoryCollector(watched)
        collectors: list[Collector] = [HostCollector(), DiskCollector(state_dir, trainers), process, memory]
        interval_s, deadline_s = config.interval_s, config.deadline_s
        self._runner = CollectorRunner(collectors, interval_s, deadline_s, slow={memory.name: MEMORY_INTERVAL_S})
        owners = Owners(gpu_owners, watched.labels_by_pid)
        self._gpus = GpuFleet(interval_s, deadline_s, config.gpu_probe_s, owners)

    def start(self) -> None:
        """Start all threads."""
        self._runner.start()
        self._gpus.start()

    @property
    def has_read(self) -> bool:
        """Whether everything has been read once, or is known to be missing."""
        return self._runner.has_read and self._gpus.has_read

    def latest(self) -> list[Reading]:
        """The newest reading of each. Never blocks."""
        return [*self._runner.latest(), *self._gpus.latest()]

    def close(self) -> None:
        """Stop reading; waits a bounded time for calls in progress."""
        self._gpus.close(GPU_CLOSE_S)
        self._runner.close()
