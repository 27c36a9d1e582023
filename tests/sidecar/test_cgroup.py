"""Limits of control groups: file trees as version 1 and 2 write them, and groups of this machine with a real limit."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sidecar.collectors.cgroup import ControlGroups, Mount, mounts_of, values_of

Files = dict[str, str]


def written(root: Path, files: Files) -> None:
    """Write the files of a tree."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def read(text: str, mounts: list[Mount]) -> dict[str, float]:
    """Values by name, and by resource and kind where there are several."""
    found = {}
    for name, labels, value in values_of(text, mounts, (("process", "trainer"),)):
        found["/".join([name.removeprefix("dflash_cgroup_"), *(v for k, v in labels if k != "process")])] = value
    return found


def test_version_2_shows_the_tightest_limits_on_the_way_up(tmp_path: Path) -> None:
    """The quota of the pod and the memory limit of the container hold; throttling of both is added."""
    written(
        tmp_path,
        {
            "pod/cpu.max": "150000 100000\n",
            "pod/cpu.stat": "usage_usec 9\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2500000\n",
            "pod/memory.max": "max\n",
            "pod/c1/cpu.max": "max 100000\n",
            "pod/c1/cpu.stat": "usage_usec 9\nnr_periods 5\nnr_throttled 1\nthrottled_usec 500000\n",
            "pod/c1/memory.max": "1073741824\n",
            "pod/c1/memory.current": "536870912\n",
            "pod/c1/memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\n",
            "pod/c1/cpu.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n"
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=250000\n",
        },
    )

    assert read("0::/pod/c1\n", [Mount("/", tmp_path, ())]) == {
        "cpu_limit_cpus": 1.5,
        "cpu_periods_total": 15.0,
        "cpu_throttled_periods_total": 5.0,
        "cpu_throttled_seconds_total": 3.0,
        "memory_limit_bytes": 1073741824.0,
        "memory_bytes": 536870912.0,
        "oom_kills_total": 3.0,
        "pressure_seconds_total/some/cpu": pytest.approx(1.5),
        "pressure_seconds_total/full/cpu": pytest.approx(0.25),
    }


def test_version_1_in_a_container_that_sees_its_own_part(tmp_path: Path) -> None:
    """Each controller has its hierarchy, mounted from the container's group down; no limit is the largest number."""
    written(
        tmp_path,
        {
            "cpu/cpu.cfs_quota_us": "200000\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "cpu/cpu.stat": "nr_periods 100\nnr_throttled 40\nthrottled_time 1500000000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "5\n",
            "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        },
    )
    mounts = mounts_of(
        f"1 2 0:29 /docker/ab {tmp_path}/cpu ro,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
        f"1 2 0:30 /docker/ab {tmp_path}/memory ro,nosuid - cgroup cgroup rw,memory\n"
        "9 2 0:31 / /proc rw - proc proc rw\n"
    )

    assert read("4:cpu,cpuacct:/docker/ab\n3:memory:/docker/ab\n0::/\n", mounts) == {
        "cpu_limit_cpus": 2.0,
        "cpu_periods_total": 100.0,
        "cpu_throttled_periods_total": 40.0,
        "cpu_throttled_seconds_total": 1.5,
        "oom_kills_total": 1.0,
    }


@pytest.mark.parametrize("path", ["/../other", "/elsewhere/x"])
def test_group_outside_of_what_is_mounted_is_left_out(tmp_path: Path, path: str) -> None:
    """A trainer in a group that this container cannot see shows nothing, above all not this container's limits."""
    written(tmp_path, {"cpu.max": "150000 100000\n", "memory.max": "5\n"})
    root = "/" if path.startswith("/..") else "/docker/ab"

    assert read(f"0::{path}\n", [Mount(root, tmp_path, ())]) == {}


def mounted(controller: str) -> Path | None:
    """Where version 1 has a controller on this machine."""
    mounts = mounts_of(Path("/proc/self/mountinfo").read_text())
    return next((mount.path for mount in mounts if controller in mount.controllers), None)


def removed(group: Path) -> bool:
    """Remove a group, once the last of its processes has gone."""
    try:
        group.rmdir()
    except OSError:
        return False
    return True


@contextmanager
def limited(controller: str, files: Files, work: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A process in a new group of this machine with real limits."""
    hierarchy = mounted(controller)
    if hierarchy is None or os.getuid() != 0:
        pytest.skip(f"no version 1 hierarchy for {controller} in which a group can be made")
    group = hierarchy / f"dflash-test-{os.getpid()}"
    group.mkdir()
    try:
        for name, text in files.items():
            (group / name).write_text(text)
        join = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
        with subprocess.Popen([sys.executable, "-c", join + work]) as process:
            try:
                yield process
            finally:
                process.kill()
    finally:
        wait_until(lambda: removed(group))


def live_values(pid: int) -> dict[str, float]:
    """What is read of a process now."""
    return {name.removeprefix("dflash_cgroup_"): value for name, _, value in ControlGroups().values(pid, "trainer")}


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_real_quota_throttles_and_shows() -> None:
    """A spinning process with a tenth of a CPU is throttled, and its group says so."""
    files = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "10000"}
    with limited("cpu", files, "while True: pass") as process:
        wait_until(lambda: live_values(process.pid).get("cpu_throttled_seconds_total", 0.0) > 0.2)
        values = live_values(process.pid)

    assert values["cpu_limit_cpus"] == 0.1
    assert 0 < values["cpu_throttled_periods_total"] <= values["cpu_periods_total"]


def test_real_memory_limit_and_a_real_kill_show() -> None:
    """A child that takes more than its group may have is killed for it; limit, use and the kill are read."""
    child = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'bytearray(2**28)'])\nsys.stdin.read()\n"
    work = child.replace("sys.stdin.read()", "import time; time.sleep(100)")
    with limited("memory", {"memory.limit_in_bytes": str(2**26)}, work) as process:
        wait_until(lambda: live_values(process.pid).get("oom_kills_total", 0.0) > 0)
        values = live_values(process.pid)

    assert values["memory_limit_bytes"] == 2**26
    assert 0 < values["memory_bytes"] <= 2**26
    assert values["oom_kills_total"] >= 1


def test_bytes_that_are_no_text_in_a_path_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount or a group named in bytes that are not UTF-8 is a name like any other."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_bytes(b"0::/caf\xe9\n")
    (tmp_path / "self").mkdir()
    mounted = f"31 23 0:26 / {tmp_path}/groups rw - cgroup2 cgroup2 rw\n".encode()
    (tmp_path / "self/mountinfo").write_bytes(b"30 23 8:1 / /media/caf\xe9 rw - ext4 /dev/sda1 rw\n" + mounted)
    group = tmp_path / os.fsdecode(b"groups/caf\xe9")
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))

    assert ("dflash_cgroup_cpu_limit_cpus", (("process", "trainer"),), 0.5) in ControlGroups().values(7, "trainer")
