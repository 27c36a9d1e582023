"""No secret leaves the place it was given to: looked for in every file, output, page, argument and upload."""

import base64
import json
import stat
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_wandb import FakeWandb
from sidecar_process import Place, Sidecar, wait_for

ONLINE = ("--set", "wandb.mode=online", "--set", "wandb.transmit_interval_s=1", "--set", "wandb.interval_s=1")
KEY = "5ec2e7" * 6 + "beef"
CONFIG = {
    "api_key": "hunter-api-key",
    "hub.token": "hunter-token",
    "db.password": "hunter-password",
    "hf_token": "hunter-hf-token",
    "data.path": "https://hunter-user:hunter-pass@host/data",
    "train.steps": 4321,
}
SECRETS = [KEY, base64.b64encode(f"api:{KEY}".encode()).decode().rstrip("="), "hunter-"]


@pytest.fixture(params=["environment", "systemd credential", "netrc"])
def place(tmp_path: Path, server: FakeWandb, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place with a key for that server, and a trainer whose settings hold secrets."""
    place = Place(tmp_path)
    place.environ |= {"WANDB_BASE_URL": server.url, "TRAINER_CONFIG": json.dumps(CONFIG)}
    if request.param == "environment":
        place.environ["WANDB_API_KEY"] = KEY
    elif request.param == "netrc":
        netrc = tmp_path / ".netrc"
        netrc.write_text(f"machine {server.url.removeprefix('http://')} login user password {KEY}\n")
        netrc.chmod(0o600)
    else:
        directory = tmp_path / "credentials"
        directory.mkdir()
        (directory / "wandb-api-key").write_text(KEY + "\n")
        place.environ["CREDENTIALS_DIRECTORY"] = str(directory)
    yield place
    place.close()


def command_lines(sidecar: Sidecar) -> dict[str, bytes]:
    """The arguments of the sidecar and everything it started, as any user can read them."""
    processes = [psutil.Process(sidecar.process.pid)]
    processes += processes[0].children(recursive=True)
    return {f"arguments of {p.pid}": Path(f"/proc/{p.pid}/cmdline").read_bytes() for p in processes}


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def leaks(places: dict[str, bytes]) -> list[tuple[str, str]]:
    """Where which secret is."""
    return [(place, secret) for place, text in places.items() for secret in SECRETS if secret.encode() in text]


def readable_by_all(directory: Path) -> list[str]:
    """Files below a directory whose mode lets everybody read them, but for the one that says who is there."""
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name != "sidecar.lock")
    return [str(path) for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o027]


def test_nothing_leaks_when_all_is_well(place: Place, server: FakeWandb) -> None:
    """A run that uploads leaves its secrets nowhere, and W&B gets its other settings."""
    trainer = place.trainer(steps_per_second=20.0)
    sidecar = place.sidecar(*ONLINE)
    run = server.run("run")
    wait_for(lambda: len(run.history) > 20, "rows to arrive")
    found = command_lines(sidecar) | contents(place.state_dir)
    num_processes = sum(name.startswith("arguments") for name in found)
    pages = {path: sidecar.get(path).encode() for path in ("/metrics", "/api/v1/status")}
    trainer.stop()
    wait_for(lambda: run.exit_code == 0, "the run to be closed")
    too_open = readable_by_all(place.state_dir)
    _, output = sidecar.terminate()
    uploaded = json.dumps([run.config, run.files]).encode()
    found |= pages | {"output": output.encode(), "W&B": uploaded} | contents(place.state_dir)

    assert num_processes >= 3  # the sidecar, its child, wandb-core
    assert leaks(found) == []
    assert too_open == []
    assert run.config["train.steps"]["value"] == CONFIG["train.steps"]
    assert run.config["data.path"]["value"] == "https://***@host/data"


class _Telltale(BaseHTTPRequestHandler):
    """A server that lets nobody begin a run, and says with which key it was asked."""

    fake: FakeWandb
    status: int
    num_requests = 0

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        """Say nothing."""

    def do_POST(self) -> None:
        """Answer whether there is such a run, and refuse everything else."""
        type(self).num_requests += 1
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if b"RunResumeStatus" in asked:
            self._send(HTTPStatus.OK, self.fake.answer("RunResumeStatus", self.path, json.loads(asked)))
        else:
            shown = self.headers.get("Authorization", "")
            self._send(self.status, {"errors": [{"message": f"bad key {KEY}, shown as {shown}"}]})

    def _send(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(params=[401, 403, 500])
def telltale(request: pytest.FixtureRequest, place: Place, server: FakeWandb) -> Iterator[type[_Telltale]]:
    """Such a server in the place of the other one."""
    handler = type("Handler", (_Telltale,), {"status": request.param, "fake": server})
    refusing = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=refusing.serve_forever, args=(0.02,))
    thread.start()
    before = place.environ["WANDB_BASE_URL"]
    place.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{refusing.server_port}"
    netrc = Path(place.environ["HOME"]) / ".netrc"
    if netrc.exists():
        after = place.environ["WANDB_BASE_URL"].removeprefix("http://")
        netrc.write_text(netrc.read_text().replace(before.removeprefix("http://"), after))
    yield handler
    refusing.shutdown()
    thread.join()
    refusing.server_close()


def test_nothing_leaks_when_the_server_repeats_the_key(place: Place, telltale: type[_Telltale]) -> None:
    """A server that refuses and says the key in its message gets it into no log, state, file or page of ours."""
    place.trainer(steps_per_second=20.0)
    sidecar = place.sidecar(*ONLINE)
    if telltale.status == HTTPStatus.INTERNAL_SERVER_ERROR:  # tried again and again
        wait_for(lambda: telltale.num_requests > 2, "requests")
    else:
        wait_for(lambda: sidecar.status()["sinks"]["wandb"]["state"] == "refused", "the refusal")
        assert "bad key ***" in sidecar.status()["sinks"]["wandb"]["detail"]
    found = command_lines(sidecar)
    found |= {path: sidecar.get(path).encode() for path in ("/metrics", "/api/v1/status")}
    table = place.command("status", "--state-dir", str(place.state_dir)).stdout
    too_open = readable_by_all(place.state_dir)
    _, output = sidecar.terminate()
    logs = contents(place.state_dir)
    found |= {"output": output.encode(), "table": table.encode()} | logs

    assert any(b"***" in text for name, text in logs.items() if name.endswith("debug-internal.log"))
    assert leaks(found) == []
    assert too_open == []
