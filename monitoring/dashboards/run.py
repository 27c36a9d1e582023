"""The run: is it alive, is it learning, how fast, and what limits it."""

from monitoring.dashboards.panels import GOOD_IS_HIGH, Page, Panel

NOW = (
    Panel(
        "Trainers up",
        "Trainers that publish.",
        "short",
        (("up", "sum(dflash_trainer_up{NODE})"),),
        kind="stat",
        thresholds=GOOD_IS_HIGH,
        width=3,
    ),
    Panel(
        "Step",
        "The newest optimizer step.",
        "locale",
        (("step", "max(dflash_step{NODE} OF_RUN)"),),
        kind="stat",
        width=3,
    ),
    Panel("Loss", "Of the newest step.", "short", (("loss", "avg(dflash_loss{NODE} OF_RUN)"),), kind="stat", width=3),
    Panel(
        "Acceptance length",
        "Tokens per pass of the target, on the training blocks of the newest step.",
        "short",
        (("tokens", "avg(dflash_accept_length_simulated{NODE} OF_RUN)"),),
        kind="stat",
        width=4,
    ),
    Panel(
        "Evaluated acceptance length",
        "By real decoding, at the newest evaluation.",
        "short",
        (("tokens", "avg(dflash_accept_length{NODE} OF_RUN)"),),
        kind="stat",
        width=4,
    ),
    Panel(
        "Steps per second",
        "Optimizer steps.",
        "short",
        (("steps/s", "sum(rate(dflash_steps_total{NODE}[RATE]) OF_RUN)"),),
        kind="stat",
        width=3,
    ),
    Panel(
        "What limits the run",
        "drafter: more GPUs for drafters. target: more for targets. transfer: copies. "
        "data: loading. none: less than 5 % of the time is lost.",
        "none",
        (("{{bound}}", "dflash_bottleneck_ratio{NODE}"),),
        kind="stat",
        width=4,
    ),
)

LEARNING = (
    Panel(
        "Loss",
        "Weighted cross entropy. The smoothed line is the mean of a minute.",
        "short",
        (("loss {{run}} {{rank}}", "dflash_loss{NODE} OF_RUN"), ("smoothed", "dflash_loss_smoothed{NODE}")),
    ),
    Panel(
        "Acceptance length",
        "Tokens per pass of the target: simulated on training blocks, and evaluated by decoding. "
        "The second is what counts; if only the first rises, the data is not what the target says.",
        "short",
        (
            ("simulated {{run}} {{rank}}", "dflash_accept_length_simulated{NODE} OF_RUN"),
            ("evaluated", "dflash_accept_length{NODE} OF_RUN"),
        ),
    ),
    Panel(
        "Accuracy per position",
        "Share of drafted tokens that are right, by their place in the block. A block is "
        "accepted up to its first wrong token, so the first positions count most.",
        "percentunit",
        (("{{position}}", "avg by (position) (dflash_accuracy_ratio{NODE} OF_RUN)"),),
        top=1.0,
    ),
    Panel(
        "Gradient norm",
        "Before clipping. Spikes that stay: lower the learning rate.",
        "short",
        (("norm {{run}} {{rank}}", "dflash_grad_norm{NODE} OF_RUN"),),
    ),
    Panel(
        "Learning rate", "Of the newest step.", "sci", (("rate {{run}} {{rank}}", "dflash_learning_rate{NODE} OF_RUN"),)
    ),
)

THROUGHPUT = (
    Panel(
        "Tokens per second",
        "Real tokens, by role. Both roles are equal in the long run.",
        "short",
        (("{{role}}", 'sum by (role) (rate(dflash_tokens_total{NODE, kind="real"}[RATE]) OF_RUN)'),),
    ),
    Panel(
        "Steps per second",
        "Optimizer steps by node.",
        "short",
        (("{{instance}}", "sum by (instance) (rate(dflash_steps_total{NODE}[RATE]) OF_RUN)"),),
    ),
    Panel(
        "Padding",
        "Share of processed tokens that are padding. High: use length buckets or pack more tightly.",
        "percentunit",
        (("{{role}}", "avg by (role) (dflash_padding_ratio{NODE})"),),
        top=1.0,
    ),
)

QUEUE = (
    Panel(
        "Queue fill",
        "Near 1 the drafters limit the run, near 0 the targets do.",
        "percentunit",
        (
            ("{{queue}} batches", "dflash_queue_depth{NODE} / dflash_queue_capacity OF_RUN"),
            ("{{queue}} bytes", "dflash_queue_bytes{NODE} / dflash_queue_capacity_bytes OF_RUN"),
        ),
        top=1.0,
    ),
    Panel(
        "Blocked at the queue",
        "Share of time that workers of one side wait. put: targets wait for room. get: drafters wait for a batch.",
        "percentunit",
        (
            ("targets (put)", "dflash_queue_put_blocked_ratio{NODE}"),
            ("drafters (get)", "dflash_queue_get_blocked_ratio{NODE}"),
        ),
        top=1.0,
    ),
    Panel(
        "What limits the run",
        "Share of time lost to it, named by its bound.",
        "percentunit",
        (("{{bound}}", "dflash_bottleneck_ratio{NODE}"),),
        stacked=True,
        top=1.0,
    ),
    Panel(
        "Batches through the queue",
        "In and out per second: they part only while it fills or empties.",
        "short",
        (
            ("put", "sum(rate(dflash_queue_puts_total{NODE}[RATE]) OF_RUN)"),
            ("get", "sum(rate(dflash_queue_gets_total{NODE}[RATE]) OF_RUN)"),
        ),
    ),
    Panel(
        "Oldest batch",
        "How long it has waited. It stays below the age limit of the queue.",
        "s",
        (("{{queue}}", "dflash_queue_age_seconds{NODE} OF_RUN"),),
    ),
)

WORKERS = (
    Panel(
        "Targets: time by phase",
        "Share of time in each phase, mean over workers. The largest is worth work; put is waiting for room.",
        "percentunit",
        (("{{phase}}", 'avg by (phase) (rate(dflash_phase_seconds_total{NODE, role="target"}[RATE]) OF_RUN)'),),
        stacked=True,
    ),
    Panel(
        "Drafters: time by phase",
        "Share of time in each phase, mean over workers. get is waiting for a batch.",
        "percentunit",
        (("{{phase}}", 'avg by (phase) (rate(dflash_phase_seconds_total{NODE, role="drafter"}[RATE]) OF_RUN)'),),
        stacked=True,
    ),
    Panel(
        "Duration of a phase",
        "Mean of one pass.",
        "s",
        (("{{role}} {{phase}}", "avg by (role, phase) (dflash_phase_mean_seconds{NODE})"),),
    ),
    Panel(
        "Batches per worker",
        "Workers of one role should be equally fast. One below the others: look at its GPU.",
        "short",
        (("{{role}} {{worker}} {{instance}}", "rate(dflash_batches_total{NODE}[RATE]) OF_RUN"),),
    ),
    Panel(
        "Imbalance",
        "Batch rate of the fastest worker of a role over the mean; 1 is balanced.",
        "short",
        (("{{role}}", "dflash_worker_imbalance_ratio{NODE}"),),
        thresholds=((None, "green"), (1.2, "orange")),
    ),
    Panel(
        "Not waiting for the queue",
        "Share of time. Low on one side only: move a GPU to the other side.",
        "percentunit",
        (("{{role}} {{worker}}", "dflash_worker_utilization_ratio{NODE}"),),
        top=1.0,
    ),
)

BATCHES = (
    Panel(
        "Sequence lengths",
        "How many sequences of which length are trained on.",
        "short",
        (("{{le}}", "sum by (le) (rate(dflash_sequence_length_tokens_bucket{NODE}[RATE]) OF_RUN)"),),
        kind="heatmap",
    ),
    Panel(
        "Sequence length",
        "Mean and 95th percentile of five minutes, in tokens.",
        "short",
        (("mean", "dflash_sequence_length_mean_tokens{NODE}"), ("p95", "dflash_sequence_length_p95_tokens{NODE}")),
    ),
    Panel(
        "Anchors",
        "Positions at which a block begins: valid in the data, and used for training. Few used: raise "
        "the number of anchors per sequence.",
        "short",
        (("{{kind}}", "sum by (kind) (rate(dflash_anchors_total{NODE}[RATE]) OF_RUN)"),),
    ),
    Panel(
        "Samples skipped",
        "Per second, by reason.",
        "short",
        (("{{reason}}", "sum by (reason) (rate(dflash_samples_skipped_total{NODE}[RATE]) OF_RUN)"),),
    ),
)

RUN = Page(
    "run",
    "DFlash: run",
    "Whether a run is alive and learning, how fast, and what limits it.",
    (
        ("Now", NOW),
        ("Learning", LEARNING),
        ("Throughput", THROUGHPUT),
        ("Queue and bottleneck", QUEUE),
        ("Workers", WORKERS),
        ("Batches", BATCHES),
    ),
)
