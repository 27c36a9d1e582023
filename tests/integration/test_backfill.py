"""Definitions over the past: the values they had live, in a real Prometheus, and as rules that it accepts."""

import itertools
import json
import subprocess
from pathlib import Path

import pytest
from audit import audited
from fake_wandb import FakeWandb, Run
from prometheus_server import binary, prometheus_of, prometheus_over, prometheus_with
from sidecar_process import Place, wait_for

from sidecar.backfill import ask
from sidecar.samples import Sample
from sidecar.sinks.wandb_spool import Spool

pytestmark = pytest.mark.skipif(binary("promtool") is None, reason="prometheus is not installed")

DEFINITIONS = """
[[metric]]
name = "dflash_loss_per_position"
help = 'A "step" metric, with \\\\ and quotes in its help.'
type = "gauge"
at = "step"
expr = 'dflash_loss * on () group_right () dflash_accuracy_ratio'
wandb = "custom/loss/{position}"

[[metric]]
name = "dflash_speed"
help = "A tick metric."
type = "gauge"
expr = "sum(rate(dflash_steps_total[2s]))"
wandb = "custom/speed"

[[metric]]
name = "dflash_work_total"
help = "A counter."
type = "counter"
expr = 'dflash_tokens_total{kind="real"} * 2'
"""


@pytest.fixture
def finished(place: Place, tmp_path: Path) -> Place:
    """A place with a journal of a finished run that had these definitions all along."""
    (tmp_path / "metrics.toml").write_text(DEFINITIONS)
    trainer = place.trainer()
    options = ("--definitions", str(tmp_path / "metrics.toml"), "--set", "wandb.interval_s=0.05")
    sidecar = place.sidecar(*options)
    wait_for(lambda: sidecar.status()["records"]["received"] > 300, "records")
    trainer.stop()
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave")
    sidecar.terminate()
    return place


def command(place: Place, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command on the place's state directory and definitions."""
    places = ("--state-dir", str(place.state_dir), "--definitions", str(place.state_dir.parent / "metrics.toml"))
    return place.command(*arguments, *places)


def values_in(file: Path, name: str) -> list[tuple[float, float]]:
    """Times and values of a series in an OpenMetrics file."""
    found = [line.rsplit(" ", 2) for line in file.read_text().splitlines() if line.startswith(name)]
    return [(float(time_s), float(value)) for _, value, time_s in found]


def test_a_definition_gives_the_same_values_live_and_over_the_past(finished: Place, tmp_path: Path) -> None:
    """What went to W&B while the run lived is what is computed afterwards: every step, every tick, to the bit."""
    file = tmp_path / "past.txt"
    done = command(finished, "backfill", "--openmetrics", str(file))
    spool = Spool(finished.state_dir / "spool.sqlite", read_only=True)
    rows = [row for _, row in spool.rows("run", 0, 10**6)]
    spool.close()

    assert done.returncode == 0, done.stderr
    live = [(row["_timestamp"], row["custom/loss/1"]) for row in rows if "custom/loss/1" in row]
    assert [(pytest.approx(time_s, abs=1e-6), value) for time_s, value in live] == values_in(
        file, 'dflash_loss_per_position{position="1"}'
    )
    assert len(live) == len(audited(finished.audit("run"), "step"))
    live = [(row["_timestamp"], row["custom/speed"]) for row in rows if "custom/speed" in row]
    assert [(pytest.approx(time_s, abs=1e-6), value) for time_s, value in live] == values_in(file, "dflash_speed")
    assert len(live) > 20


def test_a_prometheus_takes_the_past_in(finished: Place, tmp_path: Path) -> None:
    """Promtool makes blocks of the file, and a server that is started on them answers for the past."""
    file = tmp_path / "past.txt"
    done = command(finished, "backfill", "--openmetrics", str(file), "--label", "instance=node-1")
    with prometheus_of(file, tmp_path) as prometheus:
        last_s, last = values_in(file, "dflash_work_total")[-1]
        loss = prometheus.query('dflash_loss_per_position{instance="node-1"}', last_s)
        work = prometheus.query("sum(dflash_work_total)", last_s)

    assert "dflash_work_total: " in done.stdout
    assert isinstance(loss, list)
    assert sorted(dict(labels)["position"] for labels, _ in loss) == ["1", "2"]
    assert work == [((), last)]


def test_rules_are_accepted_and_computed_by_prometheus(finished: Place, tmp_path: Path) -> None:
    """Promtool finds nothing wrong with the rules, and a broken name is refused with the nearest known one."""
    text = command(finished, "rules", "dflash_speed", "--label", "job=dflash").stdout
    (tmp_path / "rules.json").write_text(text)
    check = [binary("promtool") or "promtool", "check", "rules", str(tmp_path / "rules.json")]
    checked = subprocess.run(check, capture_output=True, text=True, check=False)
    unknown = command(finished, "rules", "dflash_sped")

    [group] = json.loads(text)["groups"]
    assert [(rule["record"], rule["labels"]) for rule in group["rules"]] == [("dflash_speed", {"job": "dflash"})]
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert unknown.returncode == 1
    assert "does not define it; did you mean 'dflash_speed'?" in unknown.stderr


def test_a_prometheus_computes_the_rules_over_its_own_past(finished: Place, tmp_path: Path) -> None:
    """Promtool evaluates the rules where a server has the raw series, and its blocks hold what a query says there."""
    raw, derived = tmp_path / "raw", tmp_path / "derived"
    raw.mkdir()
    derived.mkdir()
    first_s = 1_700_000_040
    past = [Sample("dflash_steps_total", (), first_s + second, 4.0 * second) for second in range(61)]
    (derived / "rules.json").write_text(command(finished, "rules", "dflash_speed").stdout)
    with prometheus_with(past, raw) as prometheus:
        evaluate = [binary("promtool") or "promtool", "tsdb", "create-blocks-from", "rules", "--eval-interval=1s"]
        where = [f"--url=http://127.0.0.1:{prometheus.port}", f"--output-dir={derived / 'data'}"]
        when = [f"--start={first_s}", f"--end={first_s + 60}"]
        subprocess.run([*evaluate, *where, *when, str(derived / "rules.json")], check=True, capture_output=True)
        asked = [prometheus.query("sum(rate(dflash_steps_total[2s]))", first_s + second) for second in (30, 60)]
    with prometheus_over(derived) as prometheus:
        recorded = [prometheus.query("sum(dflash_speed)", first_s + second) for second in (30, 60)]

    assert recorded == asked == [[((), 4.0)]] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--since", "yesterday"), "--since 'yesterday': expected a duration such as 90m or 7d"),
        (("--label", "in stance=x"), "--label 'in stance=x': expected NAME=VALUE"),
        (("--openmetrics", "/proc/none"), "/proc/none: No such file or directory; give a file"),
        (("dflash_sped",), "did you mean 'dflash_speed'?"),
    ],
)
def test_mistakes_are_one_line(finished: Place, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """A time, label, file or name that cannot be used is named with the remedy."""
    done = command(finished, "backfill", "--openmetrics", str(tmp_path / "x"), *arguments)

    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


NEW = """
[[metric]]
name = "dflash_loss_doubled"
help = "New."
type = "gauge"
at = "step"
expr = "2 * dflash_loss"
wandb = "custom/loss_doubled"

[[metric]]
name = "dflash_pace"
help = "New too."
type = "gauge"
expr = "sum(rate(dflash_steps_total[2s]))"
wandb = "custom/pace"
"""


def test_a_new_metric_is_filled_into_w_and_b_over_the_past(place: Place, server: FakeWandb, tmp_path: Path) -> None:
    """1. Train. 2. Add definitions. 3. Backfill, killed in the middle. 4. Start again. 5. Backfill again. 6. End.

    Result: one pid; every step has the new key once, live or filled in, with its own step, time and value.
    """
    place.environ |= server.environment
    definitions = tmp_path / "metrics.toml"
    definitions.write_text(DEFINITIONS)
    online = ("--set=wandb.mode=online", "--set=wandb.transmit_interval_s=1", "--set=wandb.interval_s=1")
    options = ("--definitions", str(definitions), *online)
    trainer = place.trainer(steps_per_second=400.0)
    sidecar = place.sidecar(*options)
    wait_for(lambda: sidecar.status()["records"]["received"] > 6_000, "records")
    definitions.write_text(DEFINITIONS + NEW)
    wait_for(lambda: "dflash_pace" in sidecar.metrics(), "the new definition")
    ask(place.state_dir, ["dflash_loss_doubled", "dflash_pace"], 0.0)
    spool = Spool(place.state_dir / "spool.sqlite", read_only=True)
    wait_for(lambda: spool.backfill_cursor(f"run-{trainer.pid}", "custom/loss_doubled").seq > 0, "the first rows")
    sidecar.kill()
    spool.close()
    assert (place.state_dir / "backfill.json").exists()
    sidecar = place.sidecar(*options)
    wait_for(lambda: (sidecar.status()["backfill"] or {}).get("state") == "done", "the rest", 150)
    again = command(place, "backfill", "dflash_loss_doubled", "dflash_pace")
    assert sidecar.status()["trainers"][0]["pid"] == trainer.pid
    num_steps, _ = trainer.stop()
    run = server.run("run")
    wait_for(lambda: run.exit_code is not None, "W&B to have everything", 90)
    sidecar.terminate()

    assert again.stdout.startswith("dflash_loss_doubled, dflash_pace: 0 rows in the spool"), again
    assert_filled_in(run, place.audit("run"), num_steps)


def assert_filled_in(run: Run, audit: Path, num_steps: int) -> None:
    """Check the new keys of a run, record by record."""
    rows = sorted((row for row in run.history if "custom/loss_doubled" in row), key=lambda row: row["train/step"])
    found = [(row["train/step"], row["_timestamp"], row["custom/loss_doubled"]) for row in rows]
    assert found == [(fields[4], fields[3], 2 * fields[5]) for fields in audited(audit, "step")]
    assert len(found) == num_steps
    assert [row["_step"] for row in run.history] == list(range(len(run.history)))
    assert run.conflicts == []
    paces = sorted(row["_timestamp"] for row in run.history if "custom/pace" in row)
    assert len(paces) > 10
    assert all(0.5 < later - earlier < 1.5 for earlier, later in itertools.pairwise(paces))


def test_what_cannot_be_filled_in_says_why(finished: Place) -> None:
    """Without a sidecar, with W&B off, or for a metric without a key, one line says what to do."""
    nobody = command(finished, "backfill", "dflash_speed", "--listen", "127.0.0.1:9")
    sidecar = finished.sidecar("--definitions", str(finished.state_dir.parent / "metrics.toml"))
    keyless = command(finished, "backfill", "dflash_work_total")
    sidecar.terminate()
    off = finished.sidecar("--set=wandb.mode=off", "--definitions", str(finished.state_dir.parent / "metrics.toml"))
    nowhere = command(finished, "backfill", "dflash_speed")
    off.terminate()

    assert "no sidecar answers at http://127.0.0.1:9" in nobody.stderr
    assert keyless.stderr.startswith("dflash-sidecar: dflash_work_total: its definition names no wandb key")
    assert nowhere.stderr == "dflash-sidecar: W&B is off, or its spool cannot be written now\n"
    assert [done.returncode for done in (nobody, keyless, nowhere)] == [1, 1, 1]
