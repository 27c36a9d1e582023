"""The page of each kind of GPU machine, read by the real collector through nvidia-ml-py.

To renew the golden pages after a change of families, run this file with RENEW_GOLDEN=1 and read the difference.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from nvml_machine import PROFILES, Machine, build_fake_driver, driver_environment

ROOT = Path(__file__).parents[2]
READ_PAGE = """
import time
from sidecar.collectors.nvml import GpuFleet
from sidecar.collectors.nvml_catalogue import GPU_FAMILIES
from sidecar.collectors.reading import families_of
from sidecar.exposition import merged
from sidecar.samples import Result
from sidecar.sinks.prometheus import PrometheusSink

def page():
    names = {family.name for family in GPU_FAMILIES}
    families = tuple(family for family in merged(families_of(fleet.latest())) if family.name in names)
    sink = PrometheusSink()
    sink.publish(Result(time_s=1.0, families=families))
    return sink.render("")[0].decode()

fleet = GpuFleet(interval_s=0.2, deadline_s=5.0)
fleet.start()
time.sleep(3.0)  # the slow readings, and the second sample of the windowed ones
text = page()
fleet.close(2.0)
print(text, end="")
"""


ELAPSED = re.compile(r"^(dflash_gpu_throttled_seconds_total\{.*\}) (?!0\.0$).*$", re.MULTILINE)
"""Time under a reason, which depends on when the page is read."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the library."""
    directory = tmp_path_factory.mktemp("driver")
    build_fake_driver(directory)
    return directory


@pytest.mark.parametrize("profile", PROFILES)
def test_page_of_a_machine_is_exactly_this(profile: str, driver: Path, tmp_path: Path) -> None:
    """Each kind of machine has the families that it supports, in base units, and no others."""
    Machine(tmp_path / "nvml", profile=profile)
    environment = os.environ | driver_environment(driver, tmp_path / "nvml")
    done = subprocess.run(
        [sys.executable, "-c", READ_PAGE], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    golden = Path(__file__).parent / "golden" / f"nvml_{profile}.txt"
    page = ELAPSED.sub(r"\1 ELAPSED", done.stdout)
    if os.environ.get("RENEW_GOLDEN"):
        golden.write_text(page)

    assert page == golden.read_text()
