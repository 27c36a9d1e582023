"""A scripted GPU machine: builds the fake driver library once and lets the real nvidia-ml-py load it."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).parent / "fake_nvml" / "fake_nvml.c"
H200 = {
    "name": "NVIDIA H200",
    "utilization_percent": "97",
    "memory_utilization_percent": "41",
    "memory_used_bytes": "120000000000",
    "memory_reserved_bytes": "600000000",
    "memory_total_bytes": "150754820096",
    "power_mw": "651250",
    "power_limit_mw": "700000",
    "energy_mj": "123456789",
    "temperature_c": "61",
    "sm_clock_mhz": "1980",
    "memory_clock_mhz": "3201",
}


@cache
def load_fake_driver() -> None:
    """Build the library and load it under the driver's own name, so that a later load by name finds it."""
    with TemporaryDirectory() as directory:  # once loaded, the file is no longer needed
        library = Path(directory) / "libnvidia-ml.so.1"
        command = ["gcc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(SOURCE)]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library))


class Machine:
    """GPUs that a test writes values, errors and delays into.

    Args:
        path: the script file; the environment variable FAKE_NVML_STATE must name it.
    """

    def __init__(self, path: Path, num_gpus: int) -> None:
        self._path = path
        self.values: dict[str, str] = {"driver": "580.65.06", "count": str(num_gpus)}
        for index in range(num_gpus):
            self.values[f"gpu{index}.uuid"] = f"GPU-{index}"
            self.values |= {f"gpu{index}.{key}": value for key, value in H200.items()}
        self.write()

    def write(self) -> None:
        """Make the values what the driver says from now on."""
        staged = self._path.with_suffix(".new")
        staged.write_text("".join(f"{key}={value}\n" for key, value in self.values.items()))
        staged.replace(self._path)

    def set(self, **values: str | None) -> None:
        """Change values (`gpu0__power_mw="!15"`), or remove them with None."""
        for name, value in values.items():
            key = name.replace("__", ".")
            self.values.pop(key, None)
            if value is not None:
                self.values[key] = value
        self.write()

    def remove_driver(self) -> None:
        """Take the driver away."""
        self._path.unlink()
