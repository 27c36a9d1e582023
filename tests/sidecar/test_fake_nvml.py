"""The fake driver library against nvidia-ml-py: a mistake in it would make the tests that stand on it lie."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest
from nvml_machine import ALL_LINKS, CallLog, Machine, MovingCounter, build_fake_driver, driver_environment

READY = "import pynvml as n, json, sys, time\nn.nvmlInit()\nh = n.nvmlDeviceGetHandleByIndex(0)\n"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the library."""
    directory = tmp_path_factory.mktemp("driver")
    build_fake_driver(directory)
    return directory


class Client:
    """Processes that call the library through nvidia-ml-py."""

    def __init__(self, driver: Path, directory: Path) -> None:
        self.state = directory / "nvml"
        self.log = directory / "calls"
        self._environment = os.environ | driver_environment(driver, self.state, self.log)

    def start(self, code: str) -> "subprocess.Popen[str]":
        """Run code that has `n` (pynvml) and `h` (GPU 0) in a process."""
        command = [sys.executable, "-c", READY + code]
        return subprocess.Popen(
            command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def evaluate(self, expression: str, setup: str = "") -> Any:
        """What an expression is worth."""
        with self.start(f"{setup}\nprint(json.dumps({expression}))") as process:
            output, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        return json.loads(output)


@pytest.fixture
def client(driver: Path, tmp_path: Path) -> Client:
    """A client without a machine as yet."""
    return Client(driver, tmp_path)


def test_error_strings_are_those_of_nvidia_ml_py(driver: Path) -> None:
    """Each return code that nvidia-ml-py has a text for has the same text in the library."""
    library = ctypes.CDLL(str(driver / "libnvidia-ml.so.1"))
    library.nvmlErrorString.restype = ctypes.c_char_p
    texts = pynvml.NVMLError._errcode_to_string

    assert {code: library.nvmlErrorString(code).decode() for code in texts} == texts


def test_structures_are_as_large_as_those_of_nvidia_ml_py(tmp_path: Path) -> None:
    """The C structures that callers hand in have the sizes that nvidia-ml-py allocates."""
    structures = {
        "pci": pynvml.nvmlPciInfo_t,
        "memory": pynvml.c_nvmlMemory_v2_t,
        "temperature": pynvml.c_nvmlTemperature_v1_t,
        "violation": pynvml.c_nvmlViolationTime_t,
        "field": pynvml.c_nvmlFieldValue_t,
        "process": pynvml.c_nvmlProcessInfo_v3_t,
        "event": pynvml.c_nvmlEventData_t,
        "metric": pynvml.c_nvmlGpmMetric_t,
        "gpm_support": pynvml.c_nvmlGpmSupport_t,
    }
    source = Path(__file__).parents[1] / "fake_nvml" / "fake_nvml.c"
    prints = "".join(f'printf("{name} %zu\\n", sizeof(struct {name}));' for name in structures)
    program = tmp_path / "sizes.c"
    program.write_text(f'#include "{source}"\nint main(void) {{ {prints} return 0; }}\n')
    subprocess.run(["gcc", "-o", str(tmp_path / "sizes"), str(program)], check=True)
    printed = subprocess.run([str(tmp_path / "sizes")], check=True, capture_output=True, text=True).stdout
    sizes = dict(line.split() for line in printed.splitlines())

    assert sizes == {name: str(ctypes.sizeof(structure)) for name, structure in structures.items()}


def test_every_kind_of_call_answers_what_the_script_says(client: Client) -> None:
    """Values arrive through the structures of nvidia-ml-py in the right places."""
    machine = Machine(client.state, 2)
    machine.set(gpu0__remapped_rows="1,2,3,4", gpu0__processes="41:1000,42:2000", gpu0__field__75="!4")
    setup = """
f = n.nvmlDeviceGetFieldValues(h, [82, 74, 75, (138, 4294967295), (138, 3)])
a, b = n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()
n.nvmlGpmSampleGet(h, a), n.nvmlGpmSampleGet(h, b)
g = n.c_nvmlGpmMetricsGet_t()
g.version, g.numMetrics, g.sample1, g.sample2 = 1, 2, a, b
g.metrics[0].metricId, g.metrics[1].metricId = 5, 6
n.nvmlGpmMetricsGet(g)
"""
    answers = {
        "[f[0].valueType, f[0].value.uiVal, f[1].valueType, f[1].value.ullVal, f[2].nvmlReturn]": [
            1,
            68,
            3,
            42_000_000_000,
            4,
        ],
        "[f[3].value.ullVal, f[4].value.ullVal]": [18 * 400_000_000, 400_000_000],
        "[g.metrics[0].value, g.metrics[0].nvmlReturn, g.metrics[1].nvmlReturn]": [62.0, 0, 3],
        "n.nvmlDeviceGetRemappedRows(h)": [1, 2, 3, 4],
        "[(p.pid, p.usedGpuMemory) for p in n.nvmlDeviceGetComputeRunningProcesses(h)]": [[41, 1000], [42, 2000]],
        "n.nvmlDeviceGetPciInfo(h).busId": "00000000:1B:00.0",
        "n.nvmlDeviceGetTotalEccErrors(h, 0, 1)": 17,
        "n.nvmlDeviceGetViolationStatus(h, 0).violationTime": 42_000_000_000,
        "n.nvmlDeviceGetMaxClockInfo(h, 2)": 3201,
        "n.nvmlDeviceGetTemperatureThreshold(h, 1)": 87,
        "n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByUUID(b'GPU-1'))": "GPU-1",
    }
    got = client.evaluate(f"[{', '.join(answers)}]", setup)

    assert dict(zip(answers, got, strict=True)) == answers
    assert ALL_LINKS == 4294967295


def test_mig_instances_are_found_under_their_gpu(client: Client) -> None:
    """The A100 has two instances with their own memory, and each knows its GPU."""
    Machine(client.state, profile="a100_mig")
    setup = "m = [n.nvmlDeviceGetMigDeviceHandleByIndex(h, i) for i in (0, 1)]"
    expression = """[n.nvmlDeviceGetMigMode(h), [n.nvmlDeviceGetGpuInstanceId(x) for x in m],
        n.nvmlDeviceGetMemoryInfo(m[1], version=n.nvmlMemory_v2).used,
        n.nvmlDeviceGetUUID(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m[1]))]"""

    assert client.evaluate(expression, setup) == [[1, 1], [1, 2], 22_000_000_000, "GPU-0"]


def test_events_reach_those_who_registered_before(client: Client) -> None:
    """XID errors raised after registration arrive once each and in order; earlier ones and silence do not."""
    machine = Machine(client.state, 2)
    machine.raise_xid(0, 13)
    code = """
s = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(h, 8, s)
print("ready", flush=True)
input()
print([n.nvmlEventSetWait(s, 1000).eventData for _ in range(2)])
try:
    n.nvmlEventSetWait(s, 20)
except n.NVMLError_Timeout:
    print("silence")
"""
    with client.start(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        machine.raise_xid(0, 79)
        machine.raise_xid(1, 31)  # of a GPU that nobody registered
        machine.raise_xid(0, 79)
        output, _ = process.communicate("\n", timeout=20)

    assert output == "[79, 79]\nsilence\n"


def test_hung_call_is_half_done_until_the_script_lets_it_go(client: Client) -> None:
    """The log shows a call that does not return; it returns when the script changes, but a killed one never does."""
    machine = Machine(client.state, 1)
    machine.set_call("nvmlDeviceGetPowerUsage", gpu=0, delay="hang")

    def wait_for_hang() -> None:
        deadline_s = time.monotonic() + 10.0
        while CallLog(client.log).half_done != ["nvmlDeviceGetPowerUsage"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    with client.start("print(n.nvmlDeviceGetPowerUsage(h))") as process:
        wait_for_hang()
        machine.set_call("nvmlDeviceGetPowerUsage", gpu=0)
        output, _ = process.communicate(timeout=20)
    assert (output, CallLog(client.log).half_done) == ("651250\n", [])

    machine.set_call("nvmlDeviceGetPowerUsage", gpu=0, delay="hang")
    with client.start("n.nvmlDeviceGetPowerUsage(h)") as process:
        wait_for_hang()
        process.send_signal(signal.SIGKILL)
    log = CallLog(client.log)
    assert log.half_done == ["nvmlDeviceGetPowerUsage"]
    assert log.counts()["nvmlDeviceGetPowerUsage"] == 2


def test_energy_is_the_integral_of_power_in_steps(client: Client) -> None:
    """Two readings are as far apart as the power says, to a step of 100 ms, and a change of power loses nothing."""
    machine = Machine(client.state, 1)
    machine.set_power(0, 500_000)
    time.sleep(0.3)
    machine.set_power(0, 0)
    energy_mj = client.evaluate("n.nvmlDeviceGetTotalEnergyConsumption(h)") - 123_456_789
    counter = MovingCounter(10, 1000.0, 50.0)

    assert energy_mj in range(150_000, 1_000_000, 50_000)
    assert [counter.at(t) for t in (0.0, 50.05, 50.15, 51.0)] == [10, 10, 110, 1010]


def test_added_gpu_is_found_when_the_library_is_initialised_anew(client: Client) -> None:
    """A running library does not see a new GPU."""
    machine = Machine(client.state, 1)
    code = """
print(n.nvmlDeviceGetCount(), flush=True)
input()
print(n.nvmlDeviceGetCount())
n.nvmlShutdown()
n.nvmlInit()
print(n.nvmlDeviceGetCount())
"""
    with client.start(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        machine.add_gpu()
        output, _ = process.communicate("\n", timeout=20)

    assert output == "1\n2\n"


def test_library_without_a_script_is_a_machine_without_driver(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has the library by accident sees no GPUs."""
    monkeypatch.delenv("FAKE_NVML_STATE", raising=False)
    library = ctypes.CDLL(str(driver / "libnvidia-ml.so.1"))

    assert library.nvmlInitWithFlags(0) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
