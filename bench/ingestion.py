"""How much one sidecar takes in: small frames as fast as they come, the past after an outage, many trainers at once."""

import tempfile
import time
from typing import NamedTuple

import msgspec

from bench.receiving import Received
from bench.results import Goal, Result, alone
from bench.workplace import BenchmarkError, Workplace, cpu_seconds

NUM_FRAMES = 100_000
NUM_MISSED = 200_000
RECEIVE_TIMEOUT_S = 120.0
NUM_TRAINERS = 64
TRAINERS_PER_PROCESS = 16
TRAINER_RATE_HZ = 10.0
SETTLE_S = 5.0
FLEET_S = 5.0
MAX_SHARE_CORES = 0.5


def ingest_frames(num_rounds: int) -> list[Result]:
    """Live step frames of one trainer into the journal."""
    runs = [_receive("frames", NUM_FRAMES) for _ in range(num_rounds)]
    per_core = [run.num_records / run.cpu_s for run in runs]
    per_second = [run.num_records / run.wall_s for run in runs]
    return [
        alone("ingest_frames", "frames/CPU-s", per_core, Goal("value", ">=", 20_000)),
        alone("ingest_frames_wall", "frames/s", per_second),
    ]


def catch_up(num_rounds: int) -> list[Result]:
    """What a trainer kept in its ring while no sidecar was there, replayed into the journal."""
    runs = [_receive("ring", NUM_MISSED) for _ in range(num_rounds)]
    if lost := sum(run.num_lost for run in runs):
        raise BenchmarkError(f"catch_up lost {lost} records")
    return [alone("catch_up", "records/s", [run.num_records / run.wall_s for run in runs])]


def ingest_64_trainers(num_rounds: int) -> list[Result]:
    """64 trainers, each with ten steps and ten snapshots a second, beside one whole sidecar.

    It is measured without rows for W&B and with them: a row per step costs an evaluation of the definitions.
    """
    bare, with_rows = _beside_fleet(num_rounds, "off"), _beside_fleet(num_rounds, "offline")
    offered = NUM_TRAINERS * TRAINER_RATE_HZ * 2
    return [
        alone("ingest_64_trainers_cpu", "cores", bare.shares_cores, Goal("value", "<=", MAX_SHARE_CORES)),
        # A trainer's late tick is not made up for, so a few snapshots in a hundred may never have existed.
        alone("ingest_64_trainers_rate", "records/s", bare.rates, Goal("value", ">=", 0.95 * offered)),
        alone("ingest_64_trainers_behind", "records", bare.behind, Goal("value", "<=", 0)),
        alone("ingest_64_trainers_with_rows_cpu", "cores", with_rows.shares_cores),
        alone("ingest_64_trainers_with_rows_behind", "records", with_rows.behind),
    ]


class Fleet(NamedTuple):
    """What was seen in each round: CPU of the sidecar, records taken in per second, most records behind."""

    shares_cores: list[float]
    rates: list[float]
    behind: list[float]


def _beside_fleet(num_rounds: int, wandb_mode: str) -> Fleet:
    fleet = Fleet([], [], [])
    with Workplace() as place:
        sidecar = place.sidecar(("--set", f"wandb.mode={wandb_mode}"))
        for first in range(0, NUM_TRAINERS, TRAINERS_PER_PROCESS):
            trainers = ("fleet", str(place.runtime_dir), str(TRAINERS_PER_PROCESS), str(first), str(TRAINER_RATE_HZ))
            place.popen(("-m", "bench.made_up_trainers", *trainers))
        place.wait(lambda: len(sidecar.status()["trainers"]) == NUM_TRAINERS, sidecar.process, "64 trainers")
        time.sleep(SETTLE_S)
        for _ in range(num_rounds):
            start_s, start_cpu_s = time.monotonic(), cpu_seconds(sidecar.process.pid)
            received = sidecar.status()["records"]["received"]
            time.sleep(FLEET_S)
            status, elapsed_s = sidecar.status(), time.monotonic() - start_s
            fleet.shares_cores.append((cpu_seconds(sidecar.process.pid) - start_cpu_s) / elapsed_s)
            fleet.rates.append((status["records"]["received"] - received) / elapsed_s)
            fleet.behind.append(float(max(trainer["records_behind"] for trainer in status["trainers"])))
    return fleet


def _receive(mode: str, num_records: int) -> Received:
    with Workplace() as place:
        trainer = place.popen(("-m", "bench.made_up_trainers", mode, str(place.runtime_dir), str(num_records)))
        place.wait(lambda: "ready" in place.output(trainer), trainer, "the trainer")
        state_dir = tempfile.mkdtemp(prefix="state-", dir=place.path)
        arguments = (state_dir, str(place.runtime_dir), str(num_records))
        receiving = place.popen(("-m", "bench.receiving", *arguments))
        place.wait(lambda: receiving.poll() is not None, receiving, "all records", RECEIVE_TIMEOUT_S)
        return msgspec.json.decode(place.output(receiving).splitlines()[-1], type=Received)
