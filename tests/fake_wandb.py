"""A stand-in for the W&B server: enough of it for the real wandb to create, resume, log and finish runs.

It keeps what arrives line by line, as the real one does: an upload says at which line it begins, so an upload that is
repeated overwrites the same lines. What would be a row too many or a row changed shows in `Run.history` and
`Run.conflicts`. Faults are injected per request. From the command line it serves demonstrations:

    python tests/fake_wandb.py --port 8080        # WANDB_BASE_URL=http://127.0.0.1:8080, any key of 40 characters
    curl 127.0.0.1:8080/runs                      # what has arrived, as JSON
"""

import argparse
import json
import threading
from collections.abc import Callable
from typing import Any

from fake_wandb_http import Fault, Handler, Refusal, Server

HISTORY = "wandb-history.jsonl"
API_KEY = "f" * 40
ENTITY = "acme"


class Run:
    """One run as the server has it."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.files: dict[str, dict[int, str]] = {}
        self.config: dict[str, Any] = {}
        self.conflicts: list[tuple[str, str]] = []
        """Lines that a later upload replaced by other values."""
        self.num_attached = 0
        self.exit_code: int | None = None
        self.stop_requested = False

    def lines(self, name: str) -> list[str]:
        """The lines of a file; a gap shows as a KeyError."""
        lines = self.files.get(name, {})
        return [lines[i] for i in range(len(lines))]

    @property
    def history(self) -> list[dict[str, Any]]:
        """All rows in order."""
        return [json.loads(line) for line in self.lines(HISTORY)]

    @property
    def tail(self) -> list[str]:
        """The last line, if any."""
        lines = self.files.get(HISTORY)
        return [lines[max(lines)]] if lines else []

    @property
    def state(self) -> str:
        """As the UI would show it."""
        if self.exit_code is None:
            return "running"
        return "finished" if self.exit_code == 0 else "failed"

    def write(self, name: str, offset: int, lines: list[str]) -> None:
        """Take in an upload."""
        stored = self.files.setdefault(name, {})
        for number, line in enumerate(lines, start=offset):
            if name == HISTORY and number in stored and _values(stored[number]) != _values(line):
                self.conflicts.append((stored[number], line))
            stored[number] = line


class FakeWandb:
    """The server, listening on 127.0.0.1.

    Args:
        port: 0 takes a free one.
    """

    def __init__(self, port: int = 0) -> None:
        self.runs: dict[str, Run] = {}
        self.fault: Callable[[str], Fault | None] = lambda _operation: None
        """From the operation (a GraphQL name, "file_stream" or "upload") to what goes wrong with it."""
        self.bucket_view: Callable[[dict[str, Any]], dict[str, Any]] = lambda bucket: bucket
        """What a client is told of a run, from what is true: a stale cache, for example."""
        self.requests: list[str] = []
        """Operations that took effect."""
        self.arrivals: list[tuple[float, str]] = []
        """When each request came (monotonic), and its operation, those that failed included."""
        self.may_recreate = True
        """Whether the name of a deleted run may be used again."""
        self._deleted: set[str] = set()
        self._lock = threading.RLock()
        self._port = port
        self._server: Server | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """What makes wandb use this server."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": API_KEY}

    def start(self) -> "FakeWandb":
        """Start answering, on the same port as before if it was stopped."""
        self._server = Server(("127.0.0.1", self._port), Handler)
        self._server.fake = self
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def close(self) -> None:
        """Stop answering: connections are refused, those that are open end with their next request."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.is_down = True
            self._server = None

    def run(self, run_id: str) -> Run:
        """A run, made if need be."""
        with self._lock:
            return self.runs.setdefault(run_id, Run(run_id))

    def delete(self, run_id: str) -> Run:
        """Delete a run, as in the UI; returns what it had."""
        with self._lock:
            self._deleted.add(run_id)
            return self.runs.pop(run_id)

    def summary(self) -> dict[str, Any]:
        """What has arrived, for people and for tests in other processes."""
        with self._lock:
            return {
                run.run_id: {
                    "state": run.state,
                    "exit_code": run.exit_code,
                    "num_rows": len(run.files.get(HISTORY, {})),
                    "history": run.history,
                    "conflicts": run.conflicts,
                    "config": run.config,
                }
                for run in self.runs.values()
            }

    def answer(self, operation: str, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Apply a request and return its answer."""
        with self._lock:
            self.requests.append(operation)
            if operation == "file_stream":
                return self._file_stream(path.split("/")[4], request)
            if operation == "upload":
                return {}
            variables = request.get("variables") or {}
            return {"data": _GRAPHQL[operation](self, variables) if operation in _GRAPHQL else {}}

    def _file_stream(self, run_id: str, request: dict[str, Any]) -> dict[str, Any]:
        run = self.run(run_id)
        if not run.num_attached:
            raise Refusal(404, f"run {run_id} not found")
        for name, part in (request.get("files") or {}).items():
            run.write(name, part["offset"], part["content"])
        if request.get("complete"):
            run.exit_code = request.get("exitcode")
        return {"exitcode": None, "limits": {}, "stopped": run.stop_requested}

    def resume_status(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Whether a run exists and how much of it is there."""
        run = self.runs.get(variables["name"])
        bucket = None
        if run is not None and run.num_attached:
            bucket = self.bucket_view(
                _bucket(run)
                | {
                    "summaryMetrics": (run.lines("wandb-summary.json") or ["{}"])[-1],
                    "historyTail": json.dumps(run.tail),
                    "eventsTail": "[]",
                    "eventsLineCount": 0,
                    "logLineCount": 0,
                    "tags": [],
                    "notes": None,
                    "wandbConfig": '{"t": 1}',
                }
            )
        return {"model": _PROJECT | {"bucket": bucket}}

    def upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Create a run, or attach to it, which sets it running again."""
        if variables["name"] in self._deleted and not self.may_recreate:
            raise Refusal(409, f"run {variables['name']} was previously created and deleted; try a new run name")
        run = self.run(variables["name"])
        run.num_attached += 1
        run.exit_code = None
        if variables.get("config"):
            run.config = json.loads(variables["config"])
        return {
            "upsertBucket": {
                "inserted": run.num_attached == 1,
                "bucket": self.bucket_view(_bucket(run)) | {"project": _PROJECT},
            }
        }

    def create_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Say where files may be uploaded."""
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}

    def stopped_status(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Whether somebody pressed Stop."""
        return {"project": {"run": {"stopped": self.run(variables["runId"]).stop_requested}}}


_PROJECT = {"id": "P1", "name": "dflash", "entity": {"id": "E1", "name": ENTITY}}
_VIEWER = {
    "id": "U1",
    "entity": ENTITY,
    "username": "user",
    "email": "user@acme",
    "flags": "{}",
    "teams": {"edges": []},
}
_GRAPHQL: dict[str, Callable[[FakeWandb, dict[str, Any]], dict[str, Any]]] = {
    "Viewer": lambda _fake, _variables: {"viewer": _VIEWER},
    "ServerFeaturesQuery": lambda _fake, _variables: {"serverInfo": {"features": []}},
    "RunResumeStatus": FakeWandb.resume_status,
    "UpsertBucket": FakeWandb.upsert,
    "CreateRunFiles": FakeWandb.create_files,
    "RunStoppedStatus": FakeWandb.stopped_status,
}


def _bucket(run: Run) -> dict[str, Any]:
    return {
        "id": run.run_id,
        "name": run.run_id,
        "displayName": run.run_id,
        "description": None,
        "config": json.dumps(run.config),
        "sweepName": None,
        "state": run.state,
        "historyLineCount": len(run.files.get(HISTORY, {})),
    }


def _values(line: str) -> dict[str, Any]:
    """A row without what wandb measures anew each time it is sent."""
    return {key: value for key, value in json.loads(line).items() if key != "_runtime"}


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="A stand-in for the W&B server.")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 takes a free one")
    fake = FakeWandb(parser.parse_args().port).start()
    print(f"WANDB_BASE_URL={fake.url} WANDB_API_KEY={API_KEY}", flush=True)  # noqa: T201 - a command line
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        fake.close()


if __name__ == "__main__":
    main()
