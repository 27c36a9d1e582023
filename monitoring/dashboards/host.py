"""The host under a run, the trainer process, and the limits on it."""

from monitoring.dashboards.panels import GOOD_IS_LOW, Panel

HOST = (
    Panel(
        "CPU",
        "In CPUs, by mode.",
        "short",
        (
            ("{{mode}}", "sum by (mode) (rate(dflash_host_cpu_seconds_total{NODE}[RATE]))"),
            ("CPUs", "sum(dflash_host_cpus{NODE})"),
        ),
    ),
    Panel("Load", "Tasks that run or wait, over one minute.", "short", (("{{instance}}", "dflash_host_load1{NODE}"),)),
    Panel(
        "Memory",
        "Available, and swap in use.",
        "bytes",
        (
            ("available {{instance}}", "dflash_host_memory_available_bytes{NODE}"),
            ("swap {{instance}}", "dflash_host_swap_used_bytes{NODE}"),
        ),
    ),
    Panel(
        "Disk",
        "Free share of the file systems that hold a directory.",
        "percentunit",
        (("{{directory}} {{instance}}", "dflash_host_disk_free_bytes{NODE} / dflash_host_disk_total_bytes"),),
        thresholds=((None, "red"), (0.05, "green")),
        top=1.0,
    ),
    Panel(
        "Network",
        "Bytes per second, without loopback.",
        "Bps",
        (
            ("in {{interface}}", "rate(dflash_host_network_receive_bytes_total{NODE}[RATE])"),
            ("out {{interface}}", "rate(dflash_host_network_transmit_bytes_total{NODE}[RATE])"),
        ),
    ),
    Panel(
        "Pressure",
        "Share of time in which some or all tasks waited for a resource.",
        "percentunit",
        (("{{resource}} {{kind}}", "rate(dflash_host_pressure_seconds_total{NODE}[RATE])"),),
        top=1.0,
    ),
)

PROCESS = (
    Panel(
        "CPU by thread",
        "Of the trainer, in CPUs, by name of the thread.",
        "short",
        (("{{thread}}", "sum by (thread) (rate(dflash_process_thread_cpu_seconds_total{NODE}[RATE]) OF_RUN)"),),
        stacked=True,
    ),
    Panel(
        "Ready but without a CPU",
        "Share of time by thread. High: too few cores, or a quota.",
        "percentunit",
        (
            (
                "{{thread}}",
                "sum by (thread) (rate(dflash_process_thread_runqueue_wait_seconds_total{NODE}[RATE]) OF_RUN)",
            ),
        ),
    ),
    Panel(
        "Context switches",
        "Per second. Voluntary: it waits (lock, GIL, disk). Involuntary: it was preempted.",
        "short",
        (
            (
                "{{thread}} {{kind}}",
                "sum by (thread, kind) (rate(dflash_process_thread_context_switches_total{NODE}[RATE]) OF_RUN)",
            ),
        ),
    ),
    Panel(
        "Memory of the trainer",
        "Resident, and what its end would free.",
        "bytes",
        (
            ("resident", "sum by (instance) (dflash_process_resident_memory_bytes{NODE} OF_RUN)"),
            ("unique", "sum by (instance) (dflash_process_unique_memory_bytes{NODE} OF_RUN)"),
        ),
    ),
    Panel(
        "Threads and files",
        "Of the trainer. Files that only rise are a leak.",
        "short",
        (("threads", "dflash_process_threads{NODE} OF_RUN"), ("files", "dflash_process_open_fds{NODE} OF_RUN")),
    ),
    Panel(
        "Disk of the trainer",
        "Bytes per second to and from storage.",
        "Bps",
        (
            ("read", "rate(dflash_process_disk_read_bytes_total{NODE}[RATE]) OF_RUN"),
            ("written", "rate(dflash_process_disk_written_bytes_total{NODE}[RATE]) OF_RUN"),
        ),
    ),
    Panel(
        "CPU of the trainer",
        "In CPUs, by mode.",
        "short",
        (("{{mode}}", "rate(dflash_process_cpu_seconds_total{NODE}[RATE]) OF_RUN"),),
    ),
    Panel(
        "Page faults",
        "Per second; a major one had to read from a disk.",
        "short",
        (("{{kind}}", "rate(dflash_process_page_faults_total{NODE}[RATE]) OF_RUN"),),
    ),
)

GROUPS = (
    Panel(
        "CPU quota",
        "Share of periods in which the quota was used up, and of time stopped by it.",
        "percentunit",
        (
            (
                "{{process}} periods",
                (
                    "rate(dflash_cgroup_cpu_throttled_periods_total{NODE}[RATE]) "
                    "/ (rate(dflash_cgroup_cpu_periods_total[RATE]) > 0)"
                ),
            ),
            ("{{process}} time", "rate(dflash_cgroup_cpu_throttled_seconds_total{NODE}[RATE])"),
        ),
    ),
    Panel(
        "Quota in CPUs",
        "The tightest one; absent without any.",
        "short",
        (("{{process}}", "dflash_cgroup_cpu_limit_cpus{NODE}"),),
    ),
    Panel(
        "Memory under the limit",
        "Page cache included; absent without a limit.",
        "percentunit",
        (("{{process}}", "dflash_cgroup_memory_bytes{NODE} / dflash_cgroup_memory_limit_bytes"),),
        thresholds=((None, "green"), (0.95, "red")),
        top=1.0,
    ),
    Panel(
        "Killed for want of memory",
        "Processes of the group, in an hour.",
        "short",
        (("{{process}}", "increase(dflash_cgroup_oom_kills_total{NODE}[1h])"),),
        thresholds=GOOD_IS_LOW,
    ),
    Panel(
        "Pressure in the group",
        "Share of time in which some or all of its tasks waited.",
        "percentunit",
        (("{{process}} {{resource}} {{kind}}", "rate(dflash_cgroup_pressure_seconds_total{NODE}[RATE])"),),
        top=1.0,
    ),
)
