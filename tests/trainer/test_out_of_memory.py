"""A worker without GPU memory says what the allocator held and what to do."""

import pytest
import torch

from trainer.out_of_memory import explain_out_of_memory
from trainer.stopping import Stop
from trainer.supervisor import Supervisor

TORCH_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB."


def test_the_error_tells_the_state_of_the_allocator() -> None:
    """Worker, sizes now and at their peak, retries, remedy and torch's own words are all in one line."""
    error = torch.OutOfMemoryError(TORCH_SAYS)
    statistics = {
        "allocated_bytes.all.current": 3 * 2**30,
        "allocated_bytes.all.peak": 4 * 2**30,
        "reserved_bytes.all.current": 6 * 2**30,
        "reserved_bytes.all.peak": 7 * 2**30,
        "inactive_split_bytes.all.current": 2**29,
        "inactive_split_bytes.all.peak": 2**30,
        "num_alloc_retries": 9,
    }

    explain_out_of_memory(error, "drafter-1", statistics)

    assert str(error) == (
        "drafter-1 ran out of GPU memory: allocated 3.00 GiB (peak 4.00), reserved 6.00 GiB (peak 7.00), split and "
        "unused 0.50 GiB (peak 1.00), 9 retries after emptying the cache; lower train.batch_size, train.num_anchors, "
        f"data.max_length or queue.prefetch ({TORCH_SAYS})"
    )


def test_a_failing_worker_raises_it_with_its_name() -> None:
    """The supervisor raises the worker's own error, of the same type, with the worker's name and the remedy."""

    def fill() -> None:
        raise torch.OutOfMemoryError(TORCH_SAYS)

    with pytest.raises(torch.OutOfMemoryError, match=r"target-0 ran out of GPU memory: .* lower train\.batch_size"):
        Supervisor(Stop(), lambda: None).run({"target-0": fill}, watch=lambda: None)
