"""A storm of kill -9 on the sidecar of one real run.

What arrived is compared with what the trainer wrote down by itself: every record in the journal, every step in W&B,
each once, in order and unchanged; and Prometheus never saw a counter fall or a rate that was not there.
"""

import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from audit import assert_journal_equals, assert_wandb_equals, audited
from fake_wandb import FakeWandb
from prometheus_server import PrometheusServer, prometheus_scraping
from sidecar_process import Place, Sidecar, wait_for
from training_run import RUN_ID, last_step, trainer_arguments

ONLINE = ("--set", "wandb.mode=online", "--set", "wandb.transmit_interval_s=1", "--set", "wandb.interval_s=1")
NUM_KILLS = [8, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


class Storm:
    """A run that trains, uploads and is scraped, while somebody kills.

    Args:
        path: the test's directory.
        target: of the trainer.
        server: the W&B server.
    """

    def __init__(self, path: Path, target: Path, server: FakeWandb) -> None:
        self.place = Place(path)
        self.place.environ |= server.environment
        self.server = server
        self.out_dir = path / "run"
        self.audit = path / "audit"
        self.random = Random(1)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        arguments = trainer_arguments(target, self.out_dir, telemetry__audit_path=self.audit)
        self.trainer = self.place.popen(*arguments)
        wait_for(self.audit.exists, "the trainer to publish")

    def sidecar(self) -> Sidecar:
        """Start a sidecar without waiting for it."""
        return self.place.starting_sidecar(*ONLINE, port=self.port)

    def pause(self, longest_s: float) -> None:
        """Wait for a random time."""
        time.sleep(self.random.uniform(0.0, longest_s))

    def finish(self, sidecar: Sidecar) -> dict[str, int]:
        """End the trainer, let everything arrive, check it; returns the final counts of records."""
        sidecar.wait_until_ready()
        assert self.trainer.poll() is None
        self.trainer.terminate()
        assert self.trainer.wait(30) == 128 + signal.SIGTERM
        run = self.server.run(RUN_ID)
        wait_for(lambda: run.exit_code is not None, "W&B to have everything", 300)
        records: dict[str, int] = sidecar.status()["records"]
        sidecar.terminate()
        assert [fields[4] for fields in audited(self.audit, "step")] == list(range(1, last_step(self.out_dir) + 1))
        assert_journal_equals(self.place.state_dir / "journal.sqlite", self.audit)
        assert_wandb_equals(run, self.audit)
        assert run.exit_code == 128 + signal.SIGTERM
        return records


@pytest.fixture
def storm(tmp_path: Path, small_target: Path) -> Iterator[Storm]:
    """A run in full swing."""
    server = FakeWandb().start()
    storm = Storm(tmp_path, small_target, server)
    yield storm
    storm.place.close()
    server.close()


def assert_prometheus_saw_no_fault(prometheus: PrometheusServer, audit: Path) -> None:
    """No counter of trainer or sidecar ever fell, and no rate of steps was faster than the steps were."""
    counters = prometheus.values('{__name__=~"dflash_.*_total",__name__!~"dflash_(host|process)_.*"}[1h]')
    assert len(counters) > 25
    assert [values for values in counters if values != sorted(values)] == []
    [[fastest]] = prometheus.values("max_over_time(rate(dflash_steps_total[10s])[1h:1s])")
    times_s = [fields[3] for fields in audited(audit, "step")]
    window = 100
    true_rates = [window / (later - earlier) for earlier, later in zip(times_s, times_s[window:], strict=False)]
    assert 0.0 < fastest < 1.5 * max(true_rates)


@needs_prometheus
@pytest.mark.parametrize("num_kills", NUM_KILLS)
def test_sidecar_killed_again_and_again(storm: Storm, tmp_path: Path, num_kills: int) -> None:
    """Killed at random moments, often before it has started, the sidecar loses and doubles nothing."""
    with prometheus_scraping(storm.port, tmp_path) as prometheus:
        for _ in range(num_kills):
            sidecar = storm.sidecar()
            storm.pause(3.0)
            sidecar.kill()
        sidecar = storm.sidecar()
        sidecar.wait_until_ready()
        wait_for(lambda: bool(prometheus.values("dflash_steps_total")), "a scrape")
        assert_prometheus_saw_no_fault(prometheus, storm.audit)
        records = storm.finish(sidecar)

    assert (records["lost"], records["rejected"]) == (0, 0)
    assert records["received"] == len(storm.audit.read_bytes().splitlines())
