"""The evaluation's own choices: threads."""

import time

import pytest
import torch

from trainer.evaluate import quickest_threads


@pytest.mark.parametrize("quickest", [1, 2, 3])
def test_the_quickest_number_of_threads_is_used_and_then_put_back(quickest: int) -> None:
    """Work that is quick with so many threads only is done with so many; afterwards all is as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    tried = []

    def work() -> None:
        tried.append(torch.get_num_threads())
        time.sleep(0 if torch.get_num_threads() == quickest else 0.03)

    try:
        with quickest_threads(work):
            assert torch.get_num_threads() == quickest
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert sorted(set(tried)) == [1, 2, 3]
