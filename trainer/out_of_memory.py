"""What the allocator holds, added to the error of a worker whose GPU has no memory left."""

from typing import Any

import torch

GIB = 1024**3
REMEDY = "lower train.batch_size, train.num_anchors, data.max_length or queue.prefetch"


def explain_out_of_memory(error: torch.OutOfMemoryError, worker: str, statistics: dict[str, Any]) -> None:
    """Add the worker's name, the allocator's state and the remedy to an error, after what torch says.

    Args:
        error: as raised by torch.
        worker: name of its thread.
        statistics: of the worker's GPU, from `torch.cuda.memory_stats`; empty where CUDA has not started.
    """
    sizes = ", ".join(
        f"{name} {statistics.get(f'{key}_bytes.all.current', 0) / GIB:.2f} GiB"
        f" (peak {statistics.get(f'{key}_bytes.all.peak', 0) / GIB:.2f})"
        for name, key in (("allocated", "allocated"), ("reserved", "reserved"), ("split and unused", "inactive_split"))
    )
    retries = statistics.get("num_alloc_retries", 0)
    text = f"{worker} ran out of GPU memory: {sizes}, {retries} retries after emptying the cache; {REMEDY}"
    error.args = (f"{text} ({error})",)
