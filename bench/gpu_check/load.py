"""Keeps GPUs busy with products: `python -m bench.gpu_check.load SECONDS DEVICE...`, such as `12 cuda:0 cuda:1`."""

import sys
import time

import torch

SIZE = {"cuda": 8192, "cpu": 256}
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
PRODUCTS = 20
"""Between two looks at the clock: about a third of a second of work on a large GPU."""


def main(seconds: str, *names: str) -> int:
    """Multiply until the time is over; says `busy` once all devices are at work."""
    pairs = [_matrices(torch.device(name)) for name in names]
    end_s, said = time.monotonic() + float(seconds), False
    while time.monotonic() < end_s:
        for left, out in pairs:
            for _ in range(PRODUCTS):
                torch.matmul(left, left, out=out)
        for _, out in pairs:
            out[0, 0].item()  # waits, so that no work piles up
        if not said:
            said = True
            sys.stdout.write("busy\n")
            sys.stdout.flush()
    return 0


def _matrices(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    size, dtype = SIZE[device.type], DTYPE[device.type]
    # Random bits in the operands: a GPU draws far less power to multiply zeros.
    left = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
    return left, torch.empty_like(left)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
