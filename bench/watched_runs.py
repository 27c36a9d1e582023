"""Training runs of the embedded preset, each watched in one way, with what that way needs beside it.

Each is started, trained past the cost of starting and left standing still (`bench.contestants`).
"""

import os
import socket
from collections.abc import Mapping

from bench.contestants import Contestant
from bench.workplace import WandbServer, Workplace, progress
from trainer.embedded_target import default_cache_dir, embedded_target

WARM_UP_STEPS = 60
HANG_STEP = 20
"""A stand-in server that is to hang later hangs from this step on."""
SCRAPE_INTERVAL_S = 1.0
SETTINGS = {
    "run.id": "bench",
    "evaluation.num_prompts": 0,
    # About ten steps a second on two cores, so that a turn has many.
    "train.batch_size": 4,
    "train.steps": 100_000,
    "checkpoint.every_steps": 100_000,
}


def make_target() -> None:
    """Build the preset's target now if it is not cached, so that no run does it while it is measured."""
    embedded_target(default_cache_dir(os.environ), on_progress=progress)


def unwatched(place: Workplace) -> Contestant:
    """No telemetry, no sidecar."""
    return _started(Contestant(place, "off"), "none", {}, WARM_UP_STEPS)


def beside_sidecar(place: Workplace, server: WandbServer, steps: int = WARM_UP_STEPS) -> Contestant:
    """Telemetry on, and a sidecar that journals, is scraped and uploads to a W&B server."""
    sidecar = place.sidecar(environ=server.environ)
    scraper = place.popen(("-m", "bench.scraper", sidecar.url, "/metrics", str(SCRAPE_INTERVAL_S), "0"))
    return _started(Contestant(place, "ours", (sidecar.process, scraper)), "none", {}, steps, telemetry="on")


def with_wandb(place: Workplace, server: WandbServer, steps: int = WARM_UP_STEPS, **environ: str) -> Contestant:
    """`wandb.log` in the trainer; more environment as `bench.instrumented_trainer` has it."""
    return _started(Contestant(place, "wandb"), "wandb", {**server.environ, **environ}, steps)


def with_wandb_that_hangs(place: Workplace, steps: int = WARM_UP_STEPS) -> Contestant:
    """`wandb.log` in the trainer, to a server that hangs from HANG_STEP on."""
    server = place.wandb_server()
    return with_wandb(place, server, steps, BENCH_HANG_STEP=str(HANG_STEP), BENCH_SERVER_PID=str(server.pid))


def with_prometheus(place: Workplace) -> Contestant:
    """Metrics of prometheus_client in the trainer, scraped."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    scraper = place.popen(("-m", "bench.scraper", url, "/metrics", str(SCRAPE_INTERVAL_S), "0"))
    contestant = Contestant(place, "prometheus", (scraper,))
    return _started(contestant, "prometheus", {"BENCH_PROMETHEUS_PORT": str(port)}, WARM_UP_STEPS)


def _started(
    contestant: Contestant, kind: str, environ: Mapping[str, str], steps: int, telemetry: str = "off"
) -> Contestant:
    settings = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    # Relative to the contestant's place, where its processes run.
    arguments = ["--preset", "embedded", *settings, "--out", f"run-{contestant.name}", "--telemetry", telemetry]
    contestant.start(kind, arguments, environ, steps=steps)
    return contestant
