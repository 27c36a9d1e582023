"""What this machine's matrix products allow: their best rate, and how many operations our step puts into them."""

import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.step import ours
from bench.step.case import NUM_THREADS, make_case

WIDTH = 2048
NUM_TRIES = 20


def matmul_rate() -> float:
    """Floating-point operations a second in the best of some products of square bfloat16 matrices."""
    torch.set_num_threads(NUM_THREADS)
    left, right = (torch.randn(WIDTH, WIDTH).bfloat16() for _ in range(2))
    best_s = float("inf")
    for _ in range(NUM_TRIES):
        start_s = time.perf_counter()
        torch.mm(left, right)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * WIDTH**3 / best_s


def step_operations(vocab_size: int) -> int:
    """Floating-point operations of all matrix products in one of our steps."""
    step = ours.make_step(make_case(vocab_size))
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())
