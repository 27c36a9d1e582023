"""A real Prometheus over a fixed set of samples, for tests that need the original's own answer.

The binaries are those in the folder PROMETHEUS_DIR if that is set, as .ci/prometheus3 prints it, else those on PATH.
"""

import functools
import json
import math
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sidecar.promql.values import Vector
from sidecar.samples import Sample

READY_TIMEOUT_S = 30.0


def binary(name: str) -> str | None:
    """Return the path of `prometheus` or `promtool`, None when it is not installed."""
    return shutil.which(name, path=os.environ.get("PROMETHEUS_DIR")) or shutil.which(name)


@functools.cache
def major_version() -> int:
    """Return the major version of the Prometheus that tests use, 0 without one."""
    server = binary("prometheus")
    if server is None or binary("promtool") is None:
        return 0
    said = subprocess.run([server, "--version"], check=True, capture_output=True, text=True)
    found = re.search(r"version (\d+)\.", said.stdout + said.stderr)
    assert found is not None, said
    return int(found[1])


@dataclass(frozen=True)
class PrometheusServer:
    """A running server's address."""

    port: int

    def query(self, expression: str, time_s: float) -> float | Vector | None:
        """Return the answer to an instant query; None when the server refuses it, or it is no number or vector."""
        parameters = urllib.parse.urlencode({"query": expression, "time": repr(time_s)})
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/query?{parameters}") as response:
                data = json.load(response)["data"]
        except urllib.error.HTTPError as error:
            error.close()
            return None
        if data["resultType"] in {"string", "matrix"}:
            return None  # the engine refuses expressions that give these
        if data["resultType"] == "scalar":
            return float(data["result"][1])
        return [(tuple(sorted(e["metric"].items())), float(e["value"][1])) for e in data["result"]]

    def values(self, expression: str) -> list[list[float]]:
        """Return the values of each series that a query of this moment finds: one each, or all in a range."""
        parameters = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/query?{parameters}") as response:
            found = json.load(response)["data"]["result"]
        return [[float(value) for _, value in entry.get("values", [entry.get("value")])] for entry in found]

    def is_ready(self) -> bool:
        """Tell whether the server answers queries."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready"):
                return True
        except OSError:
            return False


def open_metrics(samples: Iterable[Sample]) -> str:
    """Write samples in the OpenMetrics text format, each metric in one piece."""
    by_name: dict[str, list[str]] = {}
    for sample in samples:
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels)
        value = "NaN" if math.isnan(sample.value) else repr(sample.value)
        by_name.setdefault(sample.name, []).append(f"{sample.name}{{{labels}}} {value} {sample.time_s!r}")
    return "".join(f"# TYPE {name} unknown\n" + "\n".join(lines) + "\n" for name, lines in by_name.items()) + "# EOF\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@contextmanager
def prometheus_with(samples: Iterable[Sample], folder: Path) -> Iterator[PrometheusServer]:
    """Run a Prometheus that holds exactly these samples until the block ends."""
    text = folder / "samples.txt"
    text.write_text(open_metrics(samples))
    with prometheus_of(text, folder) as server:
        yield server


@contextmanager
def prometheus_of(text: Path, folder: Path) -> Iterator[PrometheusServer]:
    """Run a Prometheus that holds exactly what is in an OpenMetrics file until the block ends."""
    load = [
        binary("promtool") or "promtool",
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        str(text),
        str(folder / "data"),
    ]
    subprocess.run(load, check=True, capture_output=True)
    with prometheus_over(folder) as server:
        yield server


@contextmanager
def prometheus_over(folder: Path) -> Iterator[PrometheusServer]:
    """Run a Prometheus over the blocks that lie in `data` of a folder, or over nothing, until the block ends."""
    with _serving("{}\n", folder) as server:
        yield server


@contextmanager
def prometheus_that_receives(folder: Path) -> Iterator[PrometheusServer]:
    """Run an empty Prometheus that takes remote writes until the block ends."""
    with _serving("{}\n", folder, "--web.enable-remote-write-receiver") as server:
        yield server


@contextmanager
def prometheus_scraping(port: int, folder: Path, ca_file: str = "") -> Iterator[PrometheusServer]:
    """Run a Prometheus that scrapes a port of this machine, with TLS if there is a CA, until the block ends."""
    job: dict[str, object] = {"job_name": "dflash", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    if ca_file:
        job |= {"scheme": "https", "tls_config": {"ca_file": ca_file}}
    with prometheus_configured({"scrape_configs": [job]}, folder) as server:
        yield server


@contextmanager
def prometheus_configured(config: Mapping[str, object], folder: Path) -> Iterator[PrometheusServer]:
    """Run a Prometheus with a configuration, scraping and evaluating every second, until the block ends."""
    every_second = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    with _serving(json.dumps({"global": every_second, **config}), folder) as server:
        yield server


@contextmanager
def _serving(config: str, folder: Path, *options: str) -> Iterator[PrometheusServer]:
    (folder / "prometheus.yml").write_text(config)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        binary("prometheus") or "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address=127.0.0.1:{port}",
        *options,
    ]
    with (folder / "server.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            server = PrometheusServer(port)
            deadline = time.monotonic() + READY_TIMEOUT_S
            while not server.is_ready():
                assert process.poll() is None, (folder / "server.log").read_text()
                assert time.monotonic() < deadline, "Prometheus does not become ready"
                time.sleep(0.05)
            yield server
        finally:
            process.terminate()
