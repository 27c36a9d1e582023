"""The tests' stand-in W&B server in a process of its own: `python -m bench.wandb_server answering|hung`.

SIGUSR1 makes it hang from then on: it takes connections and requests, and never answers.
"""

import importlib
import signal
import sys
from typing import Any

FOR_EVER_S = 86_400.0


def main(mode: str) -> None:
    """Serve until killed."""
    fake_wandb: Any = importlib.import_module("fake_wandb")
    server = fake_wandb.FakeWandb()

    def hang() -> None:
        server.fault = lambda _operation: fake_wandb.Fault("hang", hang_s=FOR_EVER_S)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    if mode == "hung":
        hang()
    server.start()
    sys.stdout.write(" ".join(f"{key}={value}" for key, value in server.environment.items()) + "\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGUSR1})
    hang()
    signal.sigwait({signal.SIGUSR1})


if __name__ == "__main__":
    main(*sys.argv[1:])
