"""The GPUs under a run: power, heat, use, memory, faults."""

from monitoring.dashboards.panels import GOOD_IS_LOW, Panel

NOW = (
    Panel(
        "GPUs up", "For which the driver answers.", "short", (("up", "sum(dflash_gpu_up{NODE})"),), kind="stat", width=4
    ),
    Panel(
        "GPUs lost",
        "The driver does not answer: reset it or restart the node.",
        "short",
        (("lost", "sum(1 - dflash_gpu_up{NODE})"),),
        kind="stat",
        thresholds=GOOD_IS_LOW,
        width=4,
    ),
    Panel("Power", "Of all GPUs.", "watt", (("power", "sum(dflash_gpu_power_watts{NODE})"),), kind="stat", width=4),
    Panel(
        "Energy per token",
        "Joules that all GPUs draw per real token of the drafters.",
        "joule",
        (
            (
                "energy",
                (
                    "sum(rate(dflash_gpu_energy_joules_total{NODE}[RATE])) / "
                    '(sum(rate(dflash_tokens_total{NODE, role="drafter", kind="real"}[RATE])) > 0)'
                ),
            ),
        ),
        kind="stat",
        width=4,
    ),
    Panel(
        "Hottest GPU",
        "Core temperature.",
        "celsius",
        (("hottest", "max(dflash_gpu_temperature_celsius{NODE})"),),
        kind="stat",
        thresholds=((None, "green"), (80.0, "orange"), (87.0, "red")),
        width=4,
    ),
    Panel(
        "XID errors",
        "Since the sidecar started; the kernel's log of the node says more.",
        "short",
        (("errors", "sum(dflash_gpu_xid_errors_total{NODE}) or vector(0)"),),
        kind="stat",
        thresholds=GOOD_IS_LOW,
        width=4,
    ),
)

POWER = (
    Panel(
        "Power",
        "Drawn by each GPU, beside its limit.",
        "watt",
        (
            ("{{instance}} {{uuid}}", "dflash_gpu_power_watts{NODE}"),
            ("lowest limit", "min(dflash_gpu_power_limit_watts{NODE})"),
        ),
    ),
    Panel(
        "Power by role",
        "Of the GPUs on which workers of a role run; empty: of none.",
        "watt",
        (
            (
                "{{role}}",
                "sum by (role) (dflash_gpu_power_watts{NODE} * on (instance, uuid) group_left (role) dflash_gpu_info)",
            ),
        ),
        stacked=True,
    ),
    Panel(
        "Energy per token",
        "Joules that all GPUs draw per real token of the drafters. Rises when GPUs wait.",
        "joule",
        (
            (
                "energy",
                (
                    "sum(rate(dflash_gpu_energy_joules_total{NODE}[RATE])) / "
                    '(sum(rate(dflash_tokens_total{NODE, role="drafter", kind="real"}[RATE])) > 0)'
                ),
            ),
        ),
    ),
)

THERMAL = (
    Panel(
        "Core temperature",
        "Of each GPU.",
        "celsius",
        (("{{instance}} {{uuid}}", "dflash_gpu_temperature_celsius{NODE}"),),
        thresholds=((None, "green"), (87.0, "red")),
    ),
    Panel(
        "Memory temperature",
        "Of the device memory.",
        "celsius",
        (("{{instance}} {{uuid}}", "dflash_gpu_memory_temperature_celsius{NODE}"),),
        thresholds=((None, "green"), (95.0, "red")),
    ),
    Panel(
        "Clock",
        "Of the multiprocessors, beside the highest there is.",
        "hertz",
        (
            ("{{instance}} {{uuid}}", "dflash_gpu_sm_clock_hertz{NODE}"),
            ("highest", "max(dflash_gpu_sm_clock_max_hertz{NODE})"),
        ),
    ),
    Panel(
        "Memory clock",
        "Beside the highest there is.",
        "hertz",
        (
            ("{{instance}} {{uuid}}", "dflash_gpu_memory_clock_hertz{NODE}"),
            ("highest", "max(dflash_gpu_memory_clock_max_hertz{NODE})"),
        ),
    ),
    Panel(
        "Throttled",
        "Share of time under each reason not to clock higher. software_power_cap is common at full load; "
        "hardware_* and power_brake mean cooling or supply.",
        "percentunit",
        (("{{reason}} {{uuid}}", "rate(dflash_gpu_throttled_seconds_total{NODE}[RATE]) > 0"),),
        top=1.0,
    ),
    Panel(
        "Throttled now",
        "1 while the driver names the reason.",
        "short",
        (("{{reason}} {{uuid}}", "dflash_gpu_throttled{NODE}"),),
    ),
)

USE = (
    Panel(
        "Busy",
        "Share of time in which any kernel ran, however small.",
        "percentunit",
        (("{{instance}} {{uuid}}", "dflash_gpu_utilization_ratio{NODE}"),),
        top=1.0,
    ),
    Panel(
        "Multiprocessors and tensor cores",
        "Shares of multiprocessors that were busy, of warps that were active, and "
        "of time on tensor cores (Hopper and newer).",
        "percentunit",
        (
            ("SM {{uuid}}", "dflash_gpu_sm_utilization_ratio{NODE}"),
            ("warps {{uuid}}", "dflash_gpu_sm_occupancy_ratio{NODE}"),
            ("tensor {{uuid}}", "dflash_gpu_tensor_utilization_ratio{NODE}"),
        ),
        top=1.0,
    ),
    Panel(
        "Memory bandwidth",
        "Share of time in which memory moved, and of the possible bandwidth.",
        "percentunit",
        (
            ("time {{uuid}}", "dflash_gpu_memory_utilization_ratio{NODE}"),
            ("bandwidth {{uuid}}", "dflash_gpu_dram_utilization_ratio{NODE}"),
        ),
        top=1.0,
    ),
    Panel(
        "NVLink",
        "Bytes per second.",
        "Bps",
        (
            ("to {{uuid}}", "rate(dflash_gpu_nvlink_receive_bytes_total{NODE}[RATE])"),
            ("from {{uuid}}", "rate(dflash_gpu_nvlink_transmit_bytes_total{NODE}[RATE])"),
        ),
    ),
    Panel(
        "PCIe",
        "Bytes per second. Hidden states leave the targets and reach the drafters here.",
        "Bps",
        (
            ("to {{uuid}}", "rate(dflash_gpu_pcie_receive_bytes_total{NODE}[RATE])"),
            ("from {{uuid}}", "rate(dflash_gpu_pcie_transmit_bytes_total{NODE}[RATE])"),
        ),
    ),
)

MEMORY = (
    Panel(
        "GPU memory",
        "Used and kept by the driver, of all there is.",
        "percentunit",
        (
            (
                "{{instance}} {{uuid}}",
                (
                    "(dflash_gpu_memory_used_bytes{NODE} + dflash_gpu_memory_reserved_bytes) "
                    "/ dflash_gpu_memory_total_bytes"
                ),
            ),
        ),
        thresholds=((None, "green"), (0.97, "red")),
        top=1.0,
    ),
    Panel(
        "Whose memory",
        "Of trainers, and of all other processes.",
        "bytes",
        (("{{process}} {{uuid}}", "dflash_gpu_process_memory_bytes{NODE}"),),
        stacked=True,
    ),
    Panel(
        "Allocator",
        "Held by live tensors, now and at most since the reading before, and by PyTorch's caching allocator.",
        "bytes",
        (
            ("allocated {{device}}", "dflash_cuda_allocator_allocated_bytes{NODE} OF_RUN"),
            ("allocated at most {{device}}", "dflash_cuda_allocator_allocated_peak_bytes{NODE} OF_RUN"),
            ("reserved {{device}}", "dflash_cuda_allocator_reserved_bytes{NODE} OF_RUN"),
        ),
    ),
    Panel(
        "Fragmentation",
        "Share of reserved memory lost in split blocks. High with retries: expandable segments.",
        "percentunit",
        (("{{device}}", "dflash_cuda_allocator_fragmentation_ratio{NODE}"),),
        top=1.0,
    ),
    Panel(
        "Allocation trouble",
        "In ten minutes: retries after a flush, which stall a worker, out of memory, and memory that went back.",
        "short",
        (
            ("retries {{device}}", "increase(dflash_cuda_allocator_alloc_retries_total{NODE}[10m]) OF_RUN"),
            ("out of memory {{device}}", "increase(dflash_cuda_allocator_ooms_total{NODE}[10m]) OF_RUN"),
            ("memory given back {{device}}", "increase(dflash_cuda_allocator_device_frees_total{NODE}[10m]) OF_RUN"),
        ),
    ),
)

FAULTS = (
    Panel(
        "XID errors",
        "Since the sidecar started, by code.",
        "short",
        (("{{code}} {{uuid}}", "dflash_gpu_xid_errors_total{NODE}"),),
        thresholds=GOOD_IS_LOW,
    ),
    Panel(
        "ECC errors",
        "In an hour. Corrected ones are harmless, uncorrected ones are not.",
        "short",
        (("{{kind}} {{uuid}}", "increase(dflash_gpu_ecc_errors_total{NODE}[1h])"),),
    ),
    Panel(
        "Rows of memory",
        "Remapped over the life of the GPU; pending: reset it; failed: have it replaced.",
        "short",
        (
            ("{{kind}} {{uuid}}", "dflash_gpu_remapped_rows_total{NODE}"),
            ("pending {{uuid}}", "dflash_gpu_remapping_pending{NODE}"),
            ("failed {{uuid}}", "dflash_gpu_remapping_failed{NODE}"),
        ),
    ),
    Panel(
        "Links",
        "Errors per second: PCIe packets sent again, NVLink by kind.",
        "short",
        (
            ("PCIe {{uuid}}", "rate(dflash_gpu_pcie_replays_total{NODE}[RATE])"),
            ("NVLink {{kind}} {{uuid}}", "rate(dflash_gpu_nvlink_errors_total{NODE}[RATE])"),
        ),
    ),
)
