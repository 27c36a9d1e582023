"""What the commands `run`, `check`, `backfill`, `rules`, `dashboard` and `push` do."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from shared.endpoint import runtime_dir
from sidecar.backfill import ask
from sidecar.background import fetch_status
from sidecar.catalogue import stored_catalogue
from sidecar.config import SidecarConfig
from sidecar.daemon import Daemon
from sidecar.dashboard import custom_dashboard
from sidecar.definitions import SHIPPED_FILE, Definition, DefinitionSet, load
from sidecar.live_definitions import definitions_file
from sidecar.log import log_to_stderr
from sidecar.outlet import SPOOL_NAME, wandb_settings
from sidecar.past import PastError, chosen, export, parse_labels, parse_since
from sidecar.rules import recording_rules
from sidecar.sinks.wandb_push import push as upload
from sidecar.state_dir import StateDir, keep_files_private
from sidecar.station import JOURNAL_NAME

BACKFILL_POLL_S = 0.5


def run(config: SidecarConfig, path: Path, log: Path | None) -> int:
    """Run a sidecar in the foreground until it is told to stop, with its log on stderr or in a file."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it asks for a reload: neither a start nor an end is to die of it
    keep_files_private()
    with log_to_stderr(log), closing(StateDir(path)) as state:
        daemon = Daemon(config, state, runtime_dir(os.environ), os.environ)
        try:
            daemon.run()
        finally:
            daemon.close()
    return 0


def check(file: Path, path: Path) -> DefinitionSet:
    """Check a file of definitions against what this version and the trainers in the state directory's journal have.

    Raises:
        DefinitionsError: with everything that is wrong.
    """
    return load(file, stored_catalogue(path / JOURNAL_NAME))


def export_past(
    config: SidecarConfig, path: Path, metrics: Sequence[str], since: str | None, labels: Sequence[str], file: Path
) -> list[str]:
    """Compute definitions over the past into an OpenMetrics file; returns lines that say what is in it."""
    definitions = _chosen(config, path, metrics)
    return export(path / JOURNAL_NAME, definitions, parse_since(since, time.time()), parse_labels(labels), file)


def backfill(
    config: SidecarConfig, path: Path, metrics: Sequence[str], since: str | None, say: Callable[[str], None]
) -> str:
    """Let the running sidecar fill definitions into W&B, and wait until it has, telling how far it is."""
    fetch_status(config, path)  # a sidecar must be there to do it
    request = ask(path, metrics, parse_since(since, time.time()))
    while True:
        _, document = fetch_status(config, path)
        status = document.backfill
        if status is not None and status.id == request.id:
            if status.state == "failed":
                raise PastError(status.detail)
            if status.state == "done":
                waiting = document.sinks["wandb"]
                names = ", ".join(status.metrics)
                return f"{names}: {status.rows} rows in the spool, W&B {waiting.state}, {waiting.lag} rows waiting"
            say(f"{status.rows} rows, at {time.ctime(status.reached_s)}")
        time.sleep(BACKFILL_POLL_S)


def rules(config: SidecarConfig, path: Path, metrics: Sequence[str], labels: Sequence[str], interval_s: float) -> str:
    """Definitions as the text of a recording-rule file."""
    definitions = _chosen(config, path, metrics)
    return recording_rules(definitions, interval_s, parse_labels(labels))


def dashboard(config: SidecarConfig, path: Path, metrics: Sequence[str]) -> str:
    """Definitions as the text of a dashboard; without names those that are not shipped."""
    definitions = _chosen(config, path, metrics)
    if not metrics:
        shipped = {definition.name for definition in check(SHIPPED_FILE, path).definitions}
        definitions = [definition for definition in definitions if definition.name not in shipped]
    if not definitions:
        raise ValueError("every definition is a shipped one, which is on the shipped dashboards; name some to see them")
    return custom_dashboard(definitions)


def push(config: SidecarConfig, path: Path) -> int:
    """Upload what waits in the spool; no sidecar may be using it."""
    keep_files_private()
    with log_to_stderr(), closing(StateDir(path)):
        return upload(path / SPOOL_NAME, wandb_settings(config.wandb), os.environ, print)


def _chosen(config: SidecarConfig, path: Path, metrics: Sequence[str]) -> list[Definition]:
    """The definitions with these names, of the file that is or would be live."""
    file = definitions_file(Path(config.definitions) if config.definitions else None, path)
    return chosen(check(file, path), metrics)
