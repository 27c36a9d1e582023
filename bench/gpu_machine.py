"""Puts eight GPUs into a directory: `python -m bench.gpu_machine DIR` builds the fake driver there and its script.

It prints, as NAME=VALUE, the environment with which a process finds them.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

PROFILE = "h200"


def main(directory: Path) -> None:
    """Build it and go."""
    nvml_machine: Any = importlib.import_module("nvml_machine")
    nvml_machine.build_fake_driver(directory)
    nvml_machine.Machine(directory / "gpus", profile=PROFILE)
    for name, value in nvml_machine.driver_environment(directory, directory / "gpus").items():
        sys.stdout.write(f"{name}={value}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
