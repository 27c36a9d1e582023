"""One GPU or MIG instance, as long as its handle is good."""

from collections.abc import Iterator
from functools import cached_property
from typing import TypeAlias

import pynvml

from sidecar.samples import Labels, labels_of

Handle: TypeAlias = object


class Device:
    """A handle with what is known about it, and the labels of its series made once.

    Args:
        handle: the driver's.
        index: the driver's number for the GPU; of a MIG instance followed by its own.
        driver: version of the driver.
        parent: the GPU that a MIG instance is a part of.
    """

    def __init__(self, handle: Handle, index: str, driver: str, parent: "Device | None" = None) -> None:
        self.handle = handle
        self.parent = parent
        self.uuid: str = pynvml.nvmlDeviceGetUUID(handle)
        self.labels = labels_of(uuid=self.uuid)
        self.identity = {"uuid": self.uuid, "index": index, "name": _name(handle), "driver": driver}
        self.identity["pci_bus_id"] = parent.identity["pci_bus_id"] if parent else _pci_bus_id(handle)
        self.retry_s: dict[object, float] = {}
        """Until when a query is not asked again, because it is not supported."""
        self._with: dict[tuple[str, str], Labels] = {}

    def labels_with(self, name: str, value: str) -> Labels:
        """The labels of a series that has one more."""
        labels = self._with.get((name, value))
        if labels is None:
            labels = self._with[name, value] = labels_of(uuid=self.uuid, **{name: value})
        return labels

    @cached_property
    def nvlinks(self) -> tuple[int, ...]:
        """The links that were up when they were first asked for."""
        found = []
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                if pynvml.nvmlDeviceGetNvLinkState(self.handle, link):
                    found.append(link)
            except (pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_NotSupported):
                break  # no more links
        return tuple(found)

    def instances(self) -> Iterator["Device"]:
        """The MIG instances of this GPU, if MIG is on."""
        try:
            if not pynvml.nvmlDeviceGetMigMode(self.handle)[0]:
                return
            num_possible = pynvml.nvmlDeviceGetMaxMigDeviceCount(self.handle)
        except pynvml.NVMLError:
            return
        for number in range(num_possible):
            try:
                handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self.handle, number)
                yield Device(handle, f"{self.identity['index']}:{number}", self.identity["driver"], self)
            except pynvml.NVMLError:
                continue  # there is none of this number


def _name(handle: Handle) -> str:
    try:
        return str(pynvml.nvmlDeviceGetName(handle))
    except (pynvml.NVMLError, UnicodeDecodeError):
        return ""


def _pci_bus_id(handle: Handle) -> str:
    try:
        bus_id = pynvml.nvmlDeviceGetPciInfo(handle).busId
    except pynvml.NVMLError:
        return ""
    return bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
