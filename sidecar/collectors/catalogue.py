"""Every family the sidecar reads from this machine itself, so that definitions can be checked without reading any."""

from shared.schema import Family
from sidecar.collectors.nvml_catalogue import GPU_FAMILIES

_WHOSE = ("process",)
"""`trainer` or `sidecar`."""

HOST_FAMILIES = (
    Family("dflash_host_cpu_seconds_total", "counter", "CPU time of the host, summed over its CPUs.", ("mode",)),
    Family("dflash_host_cpus", "gauge", "Logical CPUs of the host."),
    Family("dflash_host_load1", "gauge", "Runnable and uninterruptible tasks, averaged over one minute."),
    Family("dflash_host_memory_total_bytes", "gauge", "Physical memory of the host."),
    Family("dflash_host_memory_available_bytes", "gauge", "Memory that can be given out without swapping."),
    Family("dflash_host_swap_total_bytes", "gauge", "Swap space of the host."),
    Family("dflash_host_swap_used_bytes", "gauge", "Swap space in use."),
    Family("dflash_host_network_receive_bytes_total", "counter", "Bytes received, without loopback.", ("interface",)),
    Family("dflash_host_network_transmit_bytes_total", "counter", "Bytes sent, without loopback.", ("interface",)),
    Family(
        "dflash_host_pressure_seconds_total",
        "counter",
        "Time in which some or all (full) tasks waited for a resource; absent where the kernel does not count it.",
        ("resource", "kind"),
    ),
)

DISK_FAMILIES = (
    Family("dflash_host_disk_total_bytes", "gauge", "Size of the file system that holds a directory.", ("directory",)),
    Family("dflash_host_disk_free_bytes", "gauge", "Bytes an unprivileged process may still write.", ("directory",)),
)

PROCESS_FAMILIES = (
    Family("dflash_process_cpu_seconds_total", "counter", "CPU time of the trainer process.", ("mode",)),
    Family("dflash_process_resident_memory_bytes", "gauge", "Resident memory of the trainer process."),
    Family("dflash_process_open_fds", "gauge", "File descriptors the trainer process has open."),
    Family("dflash_process_threads", "gauge", "Threads of the trainer process."),
    Family(
        "dflash_process_page_faults_total", "counter", "Page faults; a major one had to read from a disk.", ("kind",)
    ),
    Family("dflash_process_disk_read_bytes_total", "counter", "Bytes the trainer process had read from storage."),
    Family("dflash_process_disk_written_bytes_total", "counter", "Bytes it had written to storage."),
    Family(
        "dflash_process_thread_cpu_seconds_total",
        "counter",
        "CPU time of the trainer's threads, summed over threads of one name.",
        ("thread",),
    ),
    Family(
        "dflash_process_thread_runqueue_wait_seconds_total",
        "counter",
        "Time in which threads were ready to run but had no CPU.",
        ("thread",),
    ),
    Family(
        "dflash_process_thread_context_switches_total",
        "counter",
        "How often threads left their CPU: voluntary to wait (GIL, lock, disk), involuntary when preempted.",
        ("thread", "kind"),
    ),
)

PROCESS_MEMORY_FAMILIES = (
    Family("dflash_process_unique_memory_bytes", "gauge", "Memory that the end of the trainer process would free."),
)

CGROUP_FAMILIES = (
    Family("dflash_cgroup_cpu_limit_cpus", "gauge", "CPUs that the tightest quota allows; absent without one.", _WHOSE),
    Family("dflash_cgroup_cpu_periods_total", "counter", "Periods in which a quota was in force.", _WHOSE),
    Family("dflash_cgroup_cpu_throttled_periods_total", "counter", "Periods in which the quota was used up.", _WHOSE),
    Family("dflash_cgroup_cpu_throttled_seconds_total", "counter", "Time stopped because of a quota.", _WHOSE),
    Family("dflash_cgroup_memory_limit_bytes", "gauge", "The tightest memory limit; absent without one.", _WHOSE),
    Family("dflash_cgroup_memory_bytes", "gauge", "Memory in use, page cache included, under that limit.", _WHOSE),
    Family("dflash_cgroup_oom_kills_total", "counter", "Processes of the group killed for want of memory.", _WHOSE),
    Family(
        "dflash_cgroup_pressure_seconds_total",
        "counter",
        "Time in which some or all (full) tasks of the group waited for a resource; version 2 only.",
        (*_WHOSE, "resource", "kind"),
    ),
)

RUNNER_FAMILIES = (
    Family("dflash_collector_success", "gauge", "Whether the newest reading of a collector worked.", ("collector",)),
    Family("dflash_collector_duration_seconds", "gauge", "How long the newest reading took.", ("collector",)),
)

COLLECTOR_FAMILIES = (
    *HOST_FAMILIES,
    *DISK_FAMILIES,
    *PROCESS_FAMILIES,
    *PROCESS_MEMORY_FAMILIES,
    *CGROUP_FAMILIES,
    *GPU_FAMILIES,
    *RUNNER_FAMILIES,
)
