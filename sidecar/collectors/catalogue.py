"""Every family the sidecar reads from this machine itself, so that definitions can be checked without reading any."""

from shared.schema import Family
from sidecar.collectors.nvml_catalogue import GPU_FAMILIES

HOST_FAMILIES = (
    Family("dflash_host_cpu_seconds_total", "counter", "CPU time of the host, summed over its CPUs.", ("mode",)),
    Family("dflash_host_cpus", "gauge", "Logical CPUs of the host."),
    Family("dflash_host_load1", "gauge", "Runnable and uninterruptible tasks, averaged over one minute."),
    Family("dflash_host_memory_total_bytes", "gauge", "Physical memory of the host."),
    Family("dflash_host_memory_available_bytes", "gauge", "Memory that can be given out without swapping."),
    Family("dflash_host_swap_total_bytes", "gauge", "Swap space of the host."),
    Family("dflash_host_swap_used_bytes", "gauge", "Swap space in use."),
    Family("dflash_host_disk_total_bytes", "gauge", "Size of the file system that holds a directory.", ("directory",)),
    Family("dflash_host_disk_free_bytes", "gauge", "Bytes an unprivileged process may still write.", ("directory",)),
    Family("dflash_host_network_receive_bytes_total", "counter", "Bytes received, without loopback.", ("interface",)),
    Family("dflash_host_network_transmit_bytes_total", "counter", "Bytes sent, without loopback.", ("interface",)),
)

PROCESS_FAMILIES = (
    Family("dflash_process_cpu_seconds_total", "counter", "CPU time of the trainer process.", ("mode",)),
    Family("dflash_process_resident_memory_bytes", "gauge", "Resident memory of the trainer process."),
    Family("dflash_process_open_fds", "gauge", "File descriptors the trainer process has open."),
    Family("dflash_process_threads", "gauge", "Threads of the trainer process."),
    Family(
        "dflash_process_thread_cpu_seconds_total",
        "counter",
        "CPU time of the trainer's threads, summed over threads of one name.",
        ("thread",),
    ),
)

RUNNER_FAMILIES = (
    Family("dflash_collector_success", "gauge", "Whether the newest reading of a collector worked.", ("collector",)),
    Family("dflash_collector_duration_seconds", "gauge", "How long the newest reading took.", ("collector",)),
)

COLLECTOR_FAMILIES = (*HOST_FAMILIES, *PROCESS_FAMILIES, *GPU_FAMILIES, *RUNNER_FAMILIES)
