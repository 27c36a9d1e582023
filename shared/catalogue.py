"""Every raw metric a trainer publishes: the one table of names, kinds, labels and help texts.

`TRAINER_FAMILIES` live in cells and travel in snapshots. `STEP_FAMILIES` are read out of step records and evaluation
events by the sidecar. Both are what definitions may refer to when no trainer is there to ask.
"""

from shared.schema import Family

SEQUENCE_LENGTH_BUCKETS_TOKENS = (32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 3072.0, 4096.0, 8192.0, 16384.0)
_WORKER = ("role", "worker")

TRAINER_FAMILIES = (
    Family("dflash_steps_total", "counter", "Optimizer steps taken since the trainer started."),
    Family("dflash_tokens_total", "counter", "Tokens processed, real or padding.", (*_WORKER, "kind")),
    Family("dflash_batches_total", "counter", "Batches finished by each worker.", _WORKER),
    Family("dflash_samples_skipped_total", "counter", "Samples that were not trained on, by reason.", ("reason",)),
    Family("dflash_phase_seconds_total", "counter", "Time spent per phase of a worker.", (*_WORKER, "phase")),
    Family("dflash_phase_calls_total", "counter", "How often each phase of a worker ran.", (*_WORKER, "phase")),
    Family("dflash_queue_depth", "gauge", "Batches of hidden states that wait in the queue.", ("queue",)),
    Family("dflash_queue_capacity", "gauge", "Most batches the queue holds.", ("queue",)),
    Family("dflash_queue_bytes", "gauge", "Bytes of hidden states in the queue.", ("queue",)),
    Family("dflash_queue_capacity_bytes", "gauge", "Most bytes the queue holds.", ("queue",)),
    Family("dflash_queue_puts_total", "counter", "Batches put into the queue.", ("queue",)),
    Family("dflash_queue_gets_total", "counter", "Batches taken out of the queue.", ("queue",)),
    Family(
        "dflash_queue_blocked_seconds_total",
        "counter",
        "Time workers waited for room (put) or for a batch (get).",
        ("queue", "side"),
    ),
    Family("dflash_queue_age_seconds", "gauge", "Age of the oldest batch in the queue.", ("queue",)),
    Family(
        "dflash_sequence_length_tokens",
        "histogram",
        "Lengths of the sequences trained on.",
        (),
        SEQUENCE_LENGTH_BUCKETS_TOKENS,
    ),
    Family("dflash_anchors_total", "counter", "Anchor positions: valid in the data, used in training.", ("kind",)),
    Family("dflash_cuda_allocator_allocated_bytes", "gauge", "Bytes held by live tensors.", ("device",)),
    Family("dflash_cuda_allocator_reserved_bytes", "gauge", "Bytes the caching allocator holds.", ("device",)),
    Family("dflash_cuda_allocator_active_bytes", "gauge", "Bytes in active allocator blocks.", ("device",)),
    Family("dflash_cuda_allocator_inactive_split_bytes", "gauge", "Bytes lost to fragmentation.", ("device",)),
    *(
        Family(
            f"dflash_cuda_allocator_{size}_peak_bytes",
            "gauge",
            f"Largest {size.replace('_', ' ')} bytes since the reading before.",
            ("device",),
        )
        for size in ("allocated", "reserved", "active", "inactive_split")
    ),
    Family("dflash_cuda_allocator_alloc_retries_total", "counter", "Allocations retried after a flush.", ("device",)),
    Family("dflash_cuda_allocator_ooms_total", "counter", "Out-of-memory errors of the allocator.", ("device",)),
    Family(
        "dflash_cuda_allocator_device_allocs_total", "counter", "Times the driver was asked for memory.", ("device",)
    ),
    Family("dflash_cuda_allocator_device_frees_total", "counter", "Times memory went back to the driver.", ("device",)),
    Family("dflash_telemetry_ring_records", "gauge", "Records the trainer can still replay."),
    Family("dflash_telemetry_ring_bytes", "gauge", "Bytes of records the trainer can still replay."),
    Family("dflash_telemetry_dropped_steps_total", "counter", "Steps that were not published: nobody collected them."),
    Family("dflash_telemetry_cpu_seconds_total", "counter", "CPU time of the trainer's telemetry thread."),
)

STEP_FAMILIES = (
    Family("dflash_step", "gauge", "Number of the newest optimizer step, counted over all sessions of the run."),
    Family("dflash_loss", "gauge", "Weighted cross entropy of the newest optimizer step."),
    Family("dflash_accuracy_ratio", "gauge", "Share of drafted tokens that are right, per position.", ("position",)),
    Family("dflash_accept_length_simulated", "gauge", "Acceptance length on the training blocks of the newest step."),
    Family("dflash_accept_length", "gauge", "Mean acceptance length of the newest evaluation by real decoding."),
    Family("dflash_grad_norm", "gauge", "Gradient norm of the newest step, before clipping."),
    Family("dflash_learning_rate", "gauge", "Learning rate of the newest step."),
    Family("dflash_event_timestamp_seconds", "gauge", "When the newest event of a kind happened.", ("kind",)),
)

SHOWN_EVENTS = ("checkpoint", "evaluation", "error")
"""Kinds of events whose newest one is a series."""
