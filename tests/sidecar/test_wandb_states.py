"""What the W&B sink reports and decides: end states, credentials, refusals, stops, several runs, push."""

import time
from pathlib import Path

import pytest
from fake_wandb import API_KEY, FakeWandb, Fault
from wandb_uplink import Uplink, child_basis, hasty_basis

from sidecar.sinks.wandb_run import Cursor
from sidecar.sinks.wandb_settings import child_environment, has_credentials


@pytest.mark.parametrize(("exit_code", "state"), [(0, "finished"), (7, "failed")])
def test_run_ends_as_its_trainer_did(uplink: Uplink, server: FakeWandb, exit_code: int, state: str) -> None:
    """After the goodbye the run is marked finished or failed, with the exit code, and is closed in the spool."""
    uplink.add(10)
    uplink.end(exit_code)
    uplink.drive_to_idle()

    assert (server.run("run").state, server.run("run").exit_code) == (state, exit_code)
    assert [run.closed for run in uplink.spool.runs()] == [True]


def test_run_is_not_closed_while_the_server_lacks_rows(uplink: Uplink, server: FakeWandb) -> None:
    """When rows are missing on the server before the run is closed, they are sent first, once that has not changed."""
    uplink.add(40)
    uplink.end(0)
    uplink.drive(lambda: uplink.child_pid is None and uplink.spool.run("run").num_sent == 40)
    server.run("run").files.clear()
    uplink.drive_to_idle()

    assert [line["_step"] for line in server.run("run").history] == list(range(40))
    assert any("W&B has 0 rows of this run, it had 40" in state.detail for state in uplink.states)
    assert server.run("run").state == "finished"


def test_resumed_run_is_opened_again(uplink: Uplink, server: FakeWandb) -> None:
    """A session that resumes a closed run sets it running, appends its rows behind the old ones, and closes it anew."""
    uplink.add(10)
    uplink.end(1)
    uplink.drive_to_idle()
    uplink.spool.append("run", "second", Cursor(0), [{"train/step": 100, "train/loss": 0.5}])
    uplink.drive_to_sent()
    state_while_running = server.run("run").state
    uplink.spool.finish("run", "second", 0)
    uplink.drive_to_idle()

    assert state_while_running == "running"
    assert (server.run("run").state, len(server.run("run").history)) == ("finished", 11)


def test_definitions_of_metrics_survive_a_restart(uplink: Uplink, server: FakeWandb) -> None:
    """After a restart every metric ever logged is defined again on its axis, also those that no new row has."""
    uplink.spool.append("run", "run-session", Cursor(0), [{"train/step": 1, "train/loss": 1.0, "gpu/power_w": 9.0}])
    uplink.drive_to_sent()
    uplink.restart()
    uplink.spool.append("run", "run-session", Cursor(1), [{"time/elapsed_s": 5.0, "efficiency/x": 1.0}])
    uplink.drive_to_sent()
    uplink.end(0)
    uplink.drive_to_idle()

    defined = server.run("run").config["_wandb"]["value"]["m"]
    axis_of = {metric["1"]: defined[metric["5"] - 1]["1"] if "5" in metric else None for metric in defined}
    assert axis_of == {
        "train/step": None,
        "time/elapsed_s": None,
        "train/loss": "train/step",
        "gpu/power_w": "train/step",
        "efficiency/x": "time/elapsed_s",
    }


def test_without_credentials_rows_wait_until_there_are_some(tmp_path: Path, server: FakeWandb) -> None:
    """No key means no child and a remedy in the state; a netrc entry that appears later is used."""
    environ = {key: value for key, value in child_basis(server).items() if key != "WANDB_API_KEY"}
    uplink = Uplink(tmp_path, environ | {"NETRC": str(tmp_path / "netrc")})
    uplink.add(10)
    uplink.drive_for(0.2)
    waiting = uplink.state
    (tmp_path / "netrc").write_text(f"machine {server.url.removeprefix('http://')} login user password {API_KEY}\n")
    (tmp_path / "netrc").chmod(0o600)
    uplink.end(0)
    uplink.drive_to_idle()
    uplink.close()

    assert (waiting.state, waiting.lag_records) == ("no-credentials", 10)
    assert "WANDB_API_KEY" in waiting.detail
    assert len(server.run("run").history) == 10


def test_key_in_no_argument_and_no_file(tmp_path: Path, server: FakeWandb) -> None:
    """A key from a systemd credential reaches wandb, but no command line and no file of the state directory."""
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "wandb-api-key").write_text(f"{API_KEY}\n")
    (tmp_path / "state").mkdir()
    environ = {key: value for key, value in child_basis(server).items() if key != "WANDB_API_KEY"}
    uplink = Uplink(tmp_path / "state", environ | {"CREDENTIALS_DIRECTORY": str(tmp_path / "credentials")})
    uplink.add(10)
    uplink.drive_to_sent()
    arguments = Path(f"/proc/{uplink.child_pid}/cmdline").read_bytes()
    uplink.restart()
    holding_it = [p for p in (tmp_path / "state").rglob("*") if p.is_file() and API_KEY.encode() in p.read_bytes()]
    uplink.close()

    assert b"wandb_child" in arguments
    assert API_KEY.encode() not in arguments
    assert holding_it == []
    assert len(server.run("run").history) == 10


def test_refusal_is_reported_and_overcome(uplink: Uplink, server: FakeWandb) -> None:
    """A key the server refuses gives the state refused with its words; when it is accepted again all rows arrive."""
    server.fault = lambda operation: Fault("status", 403) if operation == "UpsertBucket" else None
    uplink.add(10)
    uplink.drive(lambda: uplink.state.state == "refused")
    refused = uplink.state
    server.fault = lambda _operation: None
    uplink.end(0)
    uplink.drive_to_idle()

    assert refused.detail == "injected"
    assert refused.lag_records == 10
    assert len(server.run("run").history) == 10


def test_uploads_refused_for_good_are_noticed(tmp_path: Path, server: FakeWandb) -> None:
    """A permanent error while uploading (403) ends the child when wandb notices; then every row is sent after all."""
    uplink = Uplink(tmp_path, hasty_basis(server, tmp_path))
    uplink.add(10)
    uplink.drive(lambda: bool(server.run("run").files.get("wandb-history.jsonl")))
    server.fault = lambda operation: Fault("status", 403) if operation == "file_stream" else None
    uplink.add(10)
    uplink.drive(lambda: uplink.state.state == "waiting")
    stopped = uplink.state
    server.fault = lambda _operation: None
    uplink.end(0)
    uplink.drive_to_idle()
    uplink.close()

    assert "stopped taking rows" in stopped.detail
    assert [line["_step"] for line in server.run("run").history] == list(range(20))


def test_stop_in_the_ui_interrupts_nothing(tmp_path: Path, server: FakeWandb) -> None:
    """A stop requested in the UI costs one child, which sends what it holds; the next one reports it and lives on."""
    uplink = Uplink(tmp_path, hasty_basis(server, tmp_path), transmit_interval_s=15)
    server.fault = lambda _operation: time.sleep(
        0.2
    )  # as far away as a real server: the stop is never known at the start
    server.run("run").stop_requested = True
    uplink.add(10)
    uplink.drive_to_sent()
    uplink.add(10)
    uplink.drive(lambda: "stop was requested in the W&B UI" in uplink.state.detail)
    num_arrived, child = len(server.run("run").history), uplink.child_pid
    uplink.add(10)
    uplink.drive_for(2.5)
    same_child = uplink.child_pid == child
    uplink.end(0)
    uplink.drive_to_idle()
    uplink.close()

    assert (num_arrived, same_child) == (20, True)
    assert [state.state for state in uplink.states].count("waiting") == 1
    assert (len(server.run("run").history), server.run("run").state) == (30, "finished")


def test_several_runs_take_turns(tmp_path: Path, server: FakeWandb) -> None:
    """The newest run is served first; a run that is still going makes way for another, and both get everything."""
    uplink = Uplink(tmp_path, child_basis(server), slice_s=1.0)
    uplink.add(20, "older")
    uplink.add(20, "newer")
    uplink.drive(lambda: len(server.runs) == 2)
    first = next(iter(server.runs))
    for _ in range(3):
        uplink.add(10, "older")
        uplink.add(10, "newer")
        uplink.drive_for(1.0)
    uplink.end(0, "older")
    uplink.end(0, "newer")
    uplink.drive_to_idle(timeout_s=30.0)
    uplink.close()

    assert first == "newer"
    assert {run_id: (len(run.history), run.state) for run_id, run in server.runs.items()} == {
        "newer": (50, "finished"),
        "older": (50, "finished"),
    }


@pytest.mark.parametrize("mode", ["offline", "off"])
def test_other_modes_start_nothing(tmp_path: Path, server: FakeWandb, mode: str) -> None:
    """Offline and off report themselves and what waits, and never start a child."""
    uplink = Uplink(tmp_path, child_basis(server), mode=mode)
    uplink.add(10)
    uplink.drive_for(0.3)
    state = uplink.state
    uplink.close()

    assert (state.state, state.lag_records, server.requests) == (mode, 10, [])


def test_second_uploader_waits_outside(uplink: Uplink, server: FakeWandb) -> None:
    """While one process uploads a spool, another gives up with a clear reason and disturbs nothing."""
    uplink.add(10)
    uplink.drive_to_sent()
    said: list[str] = []
    started_s = time.monotonic()
    other = Uplink(uplink.path.parent, child_basis(server))
    other.drive(lambda: other.state.state == "waiting")
    said.append(other.state.detail)
    other.close()
    uplink.add(10)
    uplink.end(0)
    uplink.drive_to_idle()

    assert "another process uploads this spool" in said[0]
    assert time.monotonic() - started_s < 20.0
    assert len(server.run("run").history) == 20


def test_child_sees_no_other_runs_variables(tmp_path: Path) -> None:
    """What would make wandb join another run or service is not passed on; the key and the server are."""
    environ = {"WANDB_RUN_ID": "x", "WANDB_SERVICE": "y", "WANDB_MODE": "offline", "WANDB_BASE_URL": "u", "PATH": "p"}
    child = child_environment(environ | {"WANDB_API_KEY": API_KEY}, tmp_path)

    assert child == {
        "PATH": "p",
        "WANDB_BASE_URL": "u",
        "WANDB_API_KEY": API_KEY,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_DATA_DIR": str(tmp_path / "cache"),
    }


def test_where_credentials_are_looked_for(tmp_path: Path) -> None:
    """A key counts from the environment, a systemd credential, or netrc for the server in use, and nowhere else."""
    (tmp_path / ".netrc").write_text("machine wandb.example.com:8443 login user password x\n")
    (tmp_path / ".netrc").chmod(0o600)
    (tmp_path / "wandb-api-key").write_text("x")
    home = {"HOME": str(tmp_path)}

    assert not has_credentials({})
    assert not has_credentials(home)
    assert has_credentials(home | {"WANDB_BASE_URL": "https://wandb.example.com:8443"})
    assert has_credentials({"WANDB_API_KEY": "x"})
    assert has_credentials({"CREDENTIALS_DIRECTORY": str(tmp_path)})
    assert not has_credentials({"CREDENTIALS_DIRECTORY": str(tmp_path / "none")})
