"""The families that are read from GPUs. All are keyed by `uuid`; which GPU that is and whose says `dflash_gpu_info`."""

from shared.schema import Family, Kind


def _family(name: str, kind: Kind, text: str, *labels: str) -> Family:
    return Family(f"dflash_gpu_{name}", kind, text, ("uuid", *labels))


GPU_INFO = _family(
    "info",
    "gauge",
    "Always 1; says which GPU it is and which workers run on it (several: joined by +; none: empty).",
    "index",
    "name",
    "pci_bus_id",
    "driver",
    "role",
    "worker",
)

FAST_FAMILIES = (
    _family("up", "gauge", "Whether the driver answers for a GPU."),
    GPU_INFO,
    _family("utilization_ratio", "gauge", "Share of time in which any kernel ran, however small."),
    _family("memory_utilization_ratio", "gauge", "Share of time in which device memory moved."),
    _family("memory_used_bytes", "gauge", "Device memory in use."),
    _family("memory_reserved_bytes", "gauge", "Device memory the driver keeps for itself."),
    _family("memory_total_bytes", "gauge", "Device memory."),
    _family("power_watts", "gauge", "Power drawn by the board."),
    _family("power_limit_watts", "gauge", "Power limit in force."),
    _family(
        "energy_joules_total", "counter", "Energy drawn since the driver was loaded; it advances in steps of 100 ms."
    ),
    _family("temperature_celsius", "gauge", "Core temperature."),
    _family("memory_temperature_celsius", "gauge", "Temperature of the device memory."),
    _family("sm_clock_hertz", "gauge", "Clock of the multiprocessors."),
    _family("memory_clock_hertz", "gauge", "Clock of the device memory."),
    _family("throttled", "gauge", "1 while the driver names this reason for not clocking higher.", "reason"),
    _family(
        "throttled_seconds_total", "counter", "Time under a reason, counted by the sidecar from the flags.", "reason"
    ),
    _family("nvlink_receive_bytes_total", "counter", "Data received over all NVLinks since the driver was loaded."),
    _family("nvlink_transmit_bytes_total", "counter", "Data sent over all NVLinks since the driver was loaded."),
    _family("pcie_receive_bytes_total", "counter", "Bytes received over PCIe since the driver was loaded."),
    _family("pcie_transmit_bytes_total", "counter", "Bytes sent over PCIe since the driver was loaded."),
    _family("sm_utilization_ratio", "gauge", "Share of multiprocessors that were busy (Hopper and newer)."),
    _family("sm_occupancy_ratio", "gauge", "Active warps over the possible (Hopper and newer)."),
    _family("tensor_utilization_ratio", "gauge", "Share of time on tensor cores (Hopper and newer)."),
    _family("dram_utilization_ratio", "gauge", "Memory bandwidth used over the possible (Hopper and newer)."),
    _family("pcie_receive_bytes_per_second", "gauge", "PCIe traffic to the GPU between readings (Hopper and newer)."),
    _family(
        "pcie_transmit_bytes_per_second", "gauge", "PCIe traffic from the GPU between readings (Hopper and newer)."
    ),
    _family(
        "nvlink_receive_bytes_per_second", "gauge", "NVLink traffic to the GPU between readings (Hopper and newer)."
    ),
    _family("nvlink_transmit_bytes_per_second", "gauge", "NVLink traffic from it between readings (Hopper and newer)."),
)

SLOW_FAMILIES = (
    _family("sm_clock_max_hertz", "gauge", "Highest clock of the multiprocessors."),
    _family("memory_clock_max_hertz", "gauge", "Highest clock of the device memory."),
    _family("ecc_errors_total", "counter", "ECC errors since the driver was loaded.", "kind"),
    _family("ecc_errors_lifetime_total", "counter", "ECC errors over the life of the GPU.", "kind"),
    _family("remapped_rows_total", "counter", "Memory rows replaced for good, by the kind of error.", "kind"),
    _family("remapping_pending", "gauge", "1 while a row waits for a reset to be replaced."),
    _family("remapping_failed", "gauge", "1 if a row could not be replaced: have the GPU replaced."),
    _family("pcie_replays_total", "counter", "PCIe packets that had to be sent again."),
    _family("nvlink_errors_total", "counter", "NVLink errors over all links, by kind.", "kind"),
    _family("pcie_sampled_receive_bytes_per_second", "gauge", "PCIe traffic to the GPU, sampled for 20 ms."),
    _family("pcie_sampled_transmit_bytes_per_second", "gauge", "PCIe traffic from the GPU, sampled for 20 ms."),
    _family("process_memory_bytes", "gauge", "Device memory of a trainer, or of all other processes.", "process"),
)

EVENT_FAMILIES = (
    _family("xid_errors_total", "counter", "XID errors since the sidecar started, by code; begins at 0.", "code"),
)

GPU_FAMILIES = (*FAST_FAMILIES, *SLOW_FAMILIES, *EVENT_FAMILIES)
