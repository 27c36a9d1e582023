"""A scripted GPU machine: builds the fake driver library once and lets the real nvidia-ml-py load it.

Nothing loads the library by accident. A process started by a test finds it only with `driver_environment`; within the
process of the tests it says that there is no driver unless FAKE_NVML_STATE names a script.
"""

import ctypes
import subprocess
import time
import tomllib
from collections import Counter as Tally
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

FAKE_NVML = Path(__file__).parent / "fake_nvml"
PROFILES = tuple(sorted(path.stem for path in (FAKE_NVML / "profiles").glob("*.toml")))
LIBRARY = "libnvidia-ml.so.1"
XID_EVENT = 8  # nvmlEventTypeXidCriticalError
ALL_LINKS = 2**32 - 1  # the scope of an NVLink field that means their sum
NVLINK_KIB = 400_000_000


def build_fake_driver(directory: Path) -> None:
    """Install the library in a directory, as when a driver is installed: the next attempt to load it succeeds."""
    staged = directory / f"{LIBRARY}.new"
    command = ["gcc", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", str(staged)]
    subprocess.run([*command, str(FAKE_NVML / "fake_nvml.c")], check=True)
    staged.replace(directory / LIBRARY)


@cache
def load_fake_driver() -> None:
    """Build the library and load it under the driver's own name, so that a later load by name finds it."""
    with TemporaryDirectory() as directory:  # once loaded, the file is no longer needed
        build_fake_driver(Path(directory))
        ctypes.CDLL(str(Path(directory) / LIBRARY))


def driver_environment(directory: Path, state: Path, log: Path | None = None) -> dict[str, str]:
    """Variables with which a process finds the library in the directory and follows the script."""
    variables = {"LD_LIBRARY_PATH": str(directory), "FAKE_NVML_STATE": str(state)}
    return variables if log is None else variables | {"FAKE_NVML_LOG": str(log)}


class MovingCounter(NamedTuple):
    """A counter that moves by itself: `base` at Unix time `origin_s`, then `rate_per_s` in steps of `step_s`."""

    base: int
    rate_per_s: float
    origin_s: float
    step_s: float = 0.1

    def __str__(self) -> str:
        """The value as the script writes it."""
        return f"{self.base}+{self.rate_per_s!r}/s@{self.origin_s!r}#{self.step_s!r}"

    def at(self, time_s: float) -> int:
        """What the driver says at a Unix time."""
        steps = int(max(time_s - self.origin_s, 0.0) / self.step_s)
        return self.base + int(self.rate_per_s * steps * self.step_s)

    def with_rate(self, rate_per_s: float, time_s: float) -> "MovingCounter":
        """The same counter, moving at another rate from a Unix time on."""
        return MovingCounter(self.at(time_s), rate_per_s, time_s, self.step_s)


def _flat(table: dict[str, Any], prefix: str) -> dict[str, str]:
    """Keys joined by dots."""
    values: dict[str, str] = {}
    for key, value in table.items():
        values |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: str(value)}
    return values


@cache
def _profile(name: str) -> dict[str, Any]:
    return tomllib.loads((FAKE_NVML / "profiles" / f"{name}.toml").read_text())


def gpu_values(profile: str, index: int) -> dict[str, str]:
    """Script lines of one GPU of a profile."""
    content = _profile(profile)
    gpu = f"gpu{index}."
    values = {f"{gpu}uuid": f"GPU-{index}", f"{gpu}minor_number": str(index)}
    values[f"{gpu}pci_bus_id"] = f"00000000:{0x1B + 0x10 * index:02X}:00.0"
    for link in range(content["nvlinks"]):
        values[f"{gpu}nvlink_active.{link}"] = "1"
        values |= {f"{gpu}nvlink_errors.{link}.{counter}": "0" for counter in range(4)}
        values |= {f"{gpu}field.{field}.{link}".removesuffix(".0"): str(NVLINK_KIB) for field in (138, 139)}
    if content["nvlinks"]:
        total = str(NVLINK_KIB * content["nvlinks"])
        values |= {f"{gpu}field.{field}.{ALL_LINKS}": total for field in (138, 139)}
    return values | {key: value.replace("{index}", str(index)) for key, value in _flat(content["gpu"], gpu).items()}


class Machine:
    """GPUs that a test writes values, errors and delays into.

    Args:
        path: the script file; the environment variable FAKE_NVML_STATE must name it.
        num_gpus: how many; by default as many as the profile has.
        profile: one of `PROFILES`.
    """

    def __init__(self, path: Path, num_gpus: int | None = None, profile: str = "h200") -> None:
        self.path = path
        self.profile = profile
        self.num_gpus: int = _profile(profile)["gpus"] if num_gpus is None else num_gpus
        self.values: dict[str, str] = {"driver": "580.65.06", "nvml": "13.580.65.06", "cuda": "13000"}
        self.values |= {"count": str(self.num_gpus), "events": "0"}
        for index in range(self.num_gpus):
            self.values |= gpu_values(profile, index)
        self._energy: dict[int, MovingCounter] = {}
        self.write()

    def write(self) -> None:
        """Make the values what the driver says from now on."""
        staged = self.path.with_suffix(".new")
        staged.write_text("".join(f"{key}={value}\n" for key, value in self.values.items()))
        staged.replace(self.path)

    def set(self, **values: object) -> None:
        """Change values (`gpu0__power_mw="!15"`), or remove them with None."""
        for name, value in values.items():
            key = name.replace("__", ".")
            self.values.pop(key, None)
            if value is not None:
                self.values[key] = str(value)
        self.write()

    def set_call(
        self, call: str, *, gpu: int | None = None, error: int | None = None, delay: str | None = None
    ) -> None:
        """Let a call fail with a return code, or take a delay in ms ("hang": until this is called again)."""
        prefix = "" if gpu is None else f"gpu{gpu}."
        self.set(**{f"{prefix}error.{call}": error, f"{prefix}delay_ms.{call}": delay})

    def set_power(self, gpu: int, power_mw: int) -> None:
        """Draw this power from now on; energy is its integral, in steps of 100 ms."""
        now_s = time.time()
        still = MovingCounter(int(self.values[f"gpu{gpu}.energy_mj"].partition("+")[0]), 0.0, now_s)
        self._energy[gpu] = self._energy.get(gpu, still).with_rate(float(power_mw), now_s)
        self.set(**{f"gpu{gpu}.power_mw": power_mw, f"gpu{gpu}.energy_mj": self._energy[gpu]})

    def raise_xid(self, gpu: int, code: int) -> None:
        """Queue an XID error for those who wait for events."""
        number = int(self.values["events"]) + 1
        self.set(**{f"event.{number}": f"{gpu}:{XID_EVENT}:{code}", "events": number})

    def add_gpu(self) -> None:
        """Put one more GPU in; the driver library finds it when it is initialised anew."""
        self.values |= gpu_values(self.profile, self.num_gpus)
        self.num_gpus += 1
        self.set(count=self.num_gpus)

    def remove_driver(self) -> None:
        """Take the driver away."""
        self.path.unlink()


def machine_of(environ: dict[str, str], directory: Path, num_gpus: int) -> Machine:
    """Scripted GPUs, of which processes with this environment learn; `directory` holds driver and script."""
    (directory / "driver").mkdir()
    build_fake_driver(directory / "driver")
    environ |= driver_environment(directory / "driver", directory / "nvml")
    return Machine(directory / "nvml", num_gpus)


class CallLog:
    """The calls that reached the library of a process started with a log."""

    def __init__(self, path: Path) -> None:
        self.entered: list[tuple[float, str, str]] = []
        """Monotonic seconds, name and GPU of each call, in order."""
        half_done: dict[str, str] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            time_s, what, number, call, gpu = line.split()
            if what == "enter":
                self.entered.append((float(time_s), call, gpu))
                half_done[number] = call
            else:
                del half_done[number]
        self.half_done = sorted(half_done.values())
        """Names of the calls that did not return."""

    def counts(self) -> Tally[str]:
        """How often each call was made."""
        return Tally(call for _, call, _ in self.entered)

    def per_second(self, call: str) -> float:
        """Calls per second between the first and the last call of any name."""
        span_s = self.entered[-1][0] - self.entered[0][0] if self.entered else 0.0
        return self.counts()[call] / span_s if span_s else 0.0
