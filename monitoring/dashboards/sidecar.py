"""The sidecar about itself: what comes in, what is lost, how far the sinks are, what is live."""

from monitoring.dashboards.panels import GOOD_IS_HIGH, GOOD_IS_LOW, Page, Panel

NOW = (
    Panel(
        "Answers",
        "Whether Prometheus could scrape it.",
        "short",
        (("{{instance}}", "up{NODE}"),),
        kind="stat",
        thresholds=GOOD_IS_HIGH,
        width=4,
    ),
    Panel(
        "Up for",
        "Since the sidecar process started.",
        "s",
        (("{{instance}}", "time() - dflash_sidecar_start_time_seconds{NODE}"),),
        kind="stat",
        width=4,
    ),
    Panel("Version", "Of the sidecar.", "none", (("{{version}}", "dflash_sidecar_info{NODE}"),), kind="stat", width=4),
    Panel(
        "Definitions",
        "Digest of those that are live.",
        "none",
        (("{{digest}}", "dflash_definitions_info{NODE}"),),
        kind="stat",
        width=4,
    ),
    Panel(
        "Journal on disk",
        "0: it serves from memory, because the disk is full, read-only or damaged.",
        "short",
        (("{{instance}}", "dflash_journal_up{NODE}"),),
        kind="stat",
        thresholds=GOOD_IS_HIGH,
        width=4,
    ),
    Panel(
        "Records lost",
        "In all. They fell out of the trainer's ring, or it was gone.",
        "short",
        (("lost", "sum(dflash_records_lost_total{NODE})"),),
        kind="stat",
        thresholds=GOOD_IS_LOW,
        width=4,
    ),
)

INGEST = (
    Panel(
        "Records",
        "Stored per second, each once, and those that came by replay after an absence.",
        "short",
        (
            ("received {{instance}}", "rate(dflash_records_received_total{NODE}[RATE])"),
            ("replayed {{instance}}", "rate(dflash_records_replayed_total{NODE}[RATE])"),
        ),
    ),
    Panel(
        "Lost and rejected",
        "Per second, by reason.",
        "short",
        (
            ("lost: {{reason}}", "sum by (reason) (rate(dflash_records_lost_total{NODE}[RATE]))"),
            ("steps not published", "sum(rate(dflash_telemetry_dropped_steps_total{NODE}[RATE]) OF_RUN)"),
            ("rejected: {{reason}}", "sum by (reason) (rate(dflash_frames_rejected_total{NODE}[RATE]))"),
        ),
    ),
    Panel(
        "Since the last message",
        "Of each trainer. It rises when a trainer is stopped or gone.",
        "s",
        (("{{instance}} {{run}} {{rank}}", "time() - dflash_trainer_last_message_timestamp_seconds{NODE} OF_RUN"),),
        thresholds=((None, "green"), (60.0, "red")),
    ),
    Panel(
        "Ring of the trainer",
        "Records it can still replay: how long the sidecar may be away.",
        "short",
        (("{{instance}} {{run}} {{rank}}", "dflash_telemetry_ring_records{NODE} OF_RUN"),),
    ),
    Panel(
        "Memory of the ring",
        "In the trainer.",
        "bytes",
        (("{{instance}} {{run}} {{rank}}", "dflash_telemetry_ring_bytes{NODE} OF_RUN"),),
    ),
    Panel(
        "Cost in the trainer",
        "CPU of its telemetry thread, as a share of one core.",
        "percentunit",
        (("{{instance}} {{run}} {{rank}}", "rate(dflash_telemetry_cpu_seconds_total{NODE}[RATE]) OF_RUN"),),
    ),
)

SINKS = (
    Panel(
        "Lag",
        "Rows that the sink was not yet seen to have.",
        "short",
        (("{{sink}} {{instance}}", "dflash_sink_lag_records{NODE}"),),
    ),
    Panel(
        "Left out",
        "What a sink had to leave out, per second.",
        "short",
        (("{{sink}} {{instance}}", "rate(dflash_sink_dropped_total{NODE}[RATE])"),),
    ),
    Panel(
        "Scrapes",
        "How long Prometheus takes to read /metrics.",
        "s",
        (("{{instance}}", "scrape_duration_seconds{NODE}"),),
    ),
    Panel(
        "Series per scrape",
        "How many samples one page has.",
        "short",
        (("{{instance}}", "scrape_samples_scraped{NODE}"),),
    ),
)

DEFINITIONS = (
    Panel(
        "Reloads",
        "Of the definitions, in ten minutes.",
        "short",
        (("{{outcome}} {{instance}}", "increase(dflash_config_reloads_total{NODE}[10m])"),),
    ),
    Panel(
        "Last reload",
        "0: the file was refused and the set before it is live; `dflash-sidecar status` says why.",
        "short",
        (("{{instance}}", "dflash_config_last_reload_success{NODE}"),),
    ),
    Panel(
        "Definitions that fail",
        "1 for each that could not be evaluated.",
        "short",
        (("{{metric}} {{instance}}", "1 - dflash_definition_success{NODE}"),),
        thresholds=GOOD_IS_LOW,
    ),
)

COLLECTORS = (
    Panel(
        "Failing collectors",
        "1 for each whose newest reading failed.",
        "short",
        (("{{collector}} {{instance}}", "1 - dflash_collector_success{NODE}"),),
        thresholds=GOOD_IS_LOW,
    ),
    Panel(
        "Time of a reading",
        "By collector.",
        "s",
        (("{{collector}} {{instance}}", "dflash_collector_duration_seconds{NODE}"),),
    ),
    Panel(
        "Memory of its control group",
        "With the page cache, where there is a limit.",
        "bytes",
        (
            ("{{instance}} used", 'dflash_cgroup_memory_bytes{NODE, process="sidecar"}'),
            ("{{instance}} limit", 'dflash_cgroup_memory_limit_bytes{NODE, process="sidecar"}'),
        ),
    ),
)

SIDECAR = Page(
    "sidecar",
    "DFlash: sidecar",
    "What the sidecar receives, loses, derives and passes on.",
    (
        ("Now", NOW),
        ("What comes in", INGEST),
        ("Sinks", SINKS),
        ("Definitions", DEFINITIONS),
        ("Collectors", COLLECTORS),
    ),
)
