"""Whole runs on a small target: what they leave behind, how they resume, and that telemetry changes nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import zmq
from safetensors.torch import load_file
from training_run import short_run

from shared.wire import TOPIC_EVENT, Event, decode_record
from trainer.app import main
from trainer.export import load_exported

pytestmark = pytest.mark.usefixtures("own_runtime_dir")
STEPS = 12


def arguments(small_target: Path, out_dir: Path, *extra: str) -> list[str]:
    """A short run on a preset that only lacks its target."""
    settings: dict[str, object] = {
        "train__steps": STEPS,
        "train__batch_size": 4,
        "queue__max_items": 4,
        "checkpoint__every_steps": 4,
        "evaluation__num_prompts": 2,
        "evaluation__max_new_tokens": 12,
        "telemetry__interval_s": 0.02,
        "telemetry__linger_s": 0.1,
    }
    return short_run(small_target, out_dir, *extra, **settings)


def weights(out_dir: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights of the newest checkpoint."""
    checkpoints = out_dir / "checkpoints"
    return load_file(checkpoints / (checkpoints / "latest").read_text() / "drafter.safetensors")


def assert_same_weights(left: Path, right: Path) -> None:
    """Every tensor is equal to the bit."""
    left_weights, right_weights = weights(left), weights(right)
    assert left_weights.keys() == right_weights.keys()
    for name, tensor in left_weights.items():
        assert torch.equal(tensor, right_weights[name]), name


def test_a_run_leaves_everything_it_promises(small_target: Path, tmp_path: Path) -> None:
    """A finished run has settings, checkpoints, an exported drafter that loads, and a report."""
    out_dir = tmp_path / "run"

    status = main(arguments(small_target, out_dir))
    report = json.loads((out_dir / "report.json").read_text())

    assert status == 0
    assert report["steps"] == STEPS
    assert report["lossless"] is True
    assert 1 <= report["accept_length"] <= 4
    assert report["tokens_per_second"] > 0
    assert {"wall_seconds", "loss", "run_id", "session"} <= report.keys()
    assert load_exported(out_dir / "drafter").config.block_size == 4
    assert json.loads((out_dir / "config.json").read_text())["run"]["id"] == report["run_id"]


def test_training_does_not_depend_on_telemetry(small_target: Path, tmp_path: Path) -> None:
    """The same seed ends in the same weights, to the bit, with telemetry on and off."""
    main(arguments(small_target, tmp_path / "on", "--telemetry", "on"))
    main(arguments(small_target, tmp_path / "off", "--telemetry", "off"))

    assert_same_weights(tmp_path / "on", tmp_path / "off")


def test_resumed_run_ends_like_one_never_stopped(small_target: Path, tmp_path: Path) -> None:
    """1. Stop at step 5. 2. Resume to 9. 3. Resume to the end. Result: the weights of an unbroken run, to the bit."""
    main(arguments(small_target, tmp_path / "whole"))
    broken = tmp_path / "broken"
    main(arguments(small_target, broken, "--max-steps", "5"))
    assert main(["--resume", "--out", str(broken), "--max-steps", "9"]) == 0
    assert main(["--resume", "--out", str(broken)]) == 0

    assert_same_weights(tmp_path / "whole", broken)


def test_bf16_sliding_layers_and_muon_resume_too(small_target: Path, tmp_path: Path) -> None:
    """The same holds for bf16 on both sides, sliding layers and Muon; weights on disk are fp32."""
    extra = (
        "--set=train.dtype=bfloat16",
        "--set=target.dtype=bfloat16",
        "--set=train.optimizer=muon",
        '--set=drafter.layer_types=["sliding_attention", "full_attention"]',
        "--set=drafter.sliding_window=8",
    )
    main(arguments(small_target, tmp_path / "whole", *extra))
    main(arguments(small_target, tmp_path / "broken", "--max-steps", "5", *extra))
    assert main(["--resume", "--out", str(tmp_path / "broken")]) == 0

    assert_same_weights(tmp_path / "whole", tmp_path / "broken")
    assert {tensor.dtype for tensor in weights(tmp_path / "whole").values()} == {torch.float32}
    assert json.loads((tmp_path / "whole" / "report.json").read_text())["lossless"] is True


def test_accumulated_batches_resume_too(small_target: Path, tmp_path: Path) -> None:
    """With two batches a step the data cursor still points to what was not trained on."""
    extra = ("--set=train.accumulate=2",)
    main(arguments(small_target, tmp_path / "whole", *extra))
    main(arguments(small_target, tmp_path / "broken", "--max-steps", "3", *extra))
    main(["--resume", "--out", str(tmp_path / "broken")])

    assert_same_weights(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_resume_loses_nothing(small_target: Path, tmp_path: Path, number: signal.Signals) -> None:
    """1. Start a run. 2. Signal it. Result: it saves, exits with 128 + signal; resumed, it ends as if unbroken."""
    steps = "--set=train.steps=400"
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    command = [sys.executable, "-m", "trainer.app", *arguments(small_target, broken, steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (broken / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)

    assert process.returncode == 128 + number
    assert "saved at step" in output
    stopped_at = int((broken / "checkpoints" / "latest").read_text().removeprefix("step-"))
    assert 4 <= stopped_at < 400
    main(["--resume", "--out", str(broken), "--max-steps", str(stopped_at + 5)])
    main(arguments(small_target, whole, steps, "--max-steps", str(stopped_at + 5)))
    assert_same_weights(broken, whole)


def test_kill_while_saving_never_spoils_a_run(small_target: Path, tmp_path: Path) -> None:
    """Killed -9 again and again while it saves after every step, a run always resumes and ends like an unbroken one."""
    settings = ("--set=train.steps=120", "--set=checkpoint.every_steps=1", "--set=evaluation.num_prompts=0")
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    command = [sys.executable, "-m", "trainer.app"]
    main(arguments(small_target, broken, "--max-steps", "1", *settings))
    latest = broken / "checkpoints" / "latest"
    for num_steps in (3, 7, 2, 5):
        before = int(latest.read_text().removeprefix("step-"))
        with subprocess.Popen([*command, "--resume", "--out", str(broken)], stdout=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 60
            while int(latest.read_text().removeprefix("step-")) < before + num_steps and time.monotonic() < deadline:
                time.sleep(0.001)
            process.kill()
    assert main(["--resume", "--out", str(broken)]) == 0
    main(arguments(small_target, whole, *settings))

    assert_same_weights(broken, whole)


def test_interrupt_before_training_leaves_nothing(small_target: Path, tmp_path: Path) -> None:
    """A signal while the target is still being prepared ends the command at once: one line, no run directory."""
    command = [sys.executable, "-m", "trainer.app", *arguments(small_target, tmp_path / "run")]
    fifo = tmp_path / "data.jsonl"
    os.mkfifo(fifo)
    with subprocess.Popen(
        [*command, f"--set=data.path={fifo}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while "reading" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=30)

    assert process.returncode == 128 + signal.SIGTERM
    assert error == "dflash-train: interrupted\n"
    assert not (tmp_path / "run").exists()


def test_failing_worker_ends_the_run_with_its_own_traceback(small_target: Path, tmp_path: Path) -> None:
    """A checkpoint that cannot be written fails the drafter worker: status 1, its traceback, an event, no hang."""
    out_dir = tmp_path / "run"
    out_dir.mkdir()
    (out_dir / "checkpoints").write_text("in the way")
    command = [sys.executable, "-m", "trainer.app", *arguments(small_target, out_dir, "--set=run.id=failing")]
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.RECONNECT_IVL, 10)
        subscriber.subscribe(TOPIC_EVENT)
        subscriber.connect(f"ipc://{os.environ['DFLASH_RUNTIME_DIR']}/failing-0.sock")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        events = []
        while subscriber.poll(100):
            events.append(decode_record(subscriber.recv_multipart()[1]))

    assert [(event.kind, event.detail.keys()) for event in events if isinstance(event, Event)][-2:] == [
        ("error", {"message"}),
        ("goodbye", {"exit_code"}),
    ]
    assert done.returncode == 1
    assert "NotADirectoryError" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "drafter_worker.py" in done.stderr


def test_second_trainer_on_one_endpoint_is_refused(
    small_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs of one name: the second says who is in the way and leaves nothing behind."""
    command = [sys.executable, "-m", "trainer.app"]
    first = arguments(small_target, tmp_path / "a", "--set=run.id=same", "--set=train.steps=100000")
    with subprocess.Popen([*command, *first], stdout=subprocess.DEVNULL) as process:
        path = Path(os.environ["DFLASH_RUNTIME_DIR"]) / "same-0.sock"
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        status = main(arguments(small_target, tmp_path / "b", "--set=run.id=same"))
        process.kill()

    assert status == 2
    assert f"in use by process {process.pid}" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--preset", "embeded"], "--preset embeded: no such preset; did you mean 'embedded'?"),
        (["--set=train.stesp=3"], "unknown key 'train.stesp'; did you mean 'train.steps'?"),
        (["--set=train.steps=three"], "train.steps='three': Expected `int`, got `str`"),
        (["--max-steps", "0"], "--max-steps 0: must be at least 1"),
        (["--set=data.path=/nowhere.jsonl"], "data.path /nowhere.jsonl: No such file"),
        (["--set=target.path=/nowhere"], "target.path /nowhere: no such directory"),
        (["--set=target.layer_ids=[0, 9]"], "cannot tap layer 9 of a target with 4 layers; choose from 0 to 2"),
        (["--set=drafter.mask_token_id=9999"], "drafter.mask_token_id 9999 is outside the target's vocabulary"),
        (["--set=queue.hs_min_ready=9"], "queue.hs_min_ready=9 exceeds queue.max_items=4"),
        (["--set=queue.max_bytes=9"], "queue.max_bytes=9 holds 0 batches of up to"),
        (["--set=devices.drafters=[7]"], "there is no CUDA device 7"),
        (["--resume"], "no such file or directory; --resume needs a run directory"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(
    small_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    """Each mistake: status 2, one line that names the key, nothing left behind."""
    status = main([*arguments(small_target, tmp_path / "run"), *extra])
    error = capsys.readouterr().err

    assert status == 2
    assert message.lower() in error.lower()
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_own_target_does_not_inherit_the_embedded_preset(small_target: Path, tmp_path: Path) -> None:
    """A target without a preset starts from the defaults; a preset that is named applies to any target."""
    own, named = tmp_path / "own", tmp_path / "named"
    main(arguments(small_target, own, "--max-steps", "1"))
    main(arguments(small_target, named, "--max-steps", "1", "--preset", "embedded"))

    settings = [json.loads((out_dir / "config.json").read_text())["train"]["optimizer"] for out_dir in (own, named)]
    assert settings == ["adamw", "muon"]


def test_malformed_data_line_is_named(small_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of a bad line has the file, the number of the line and the forms that are allowed."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "response": "b c d e"}\n{"prompt": 3}\n')

    status = main(arguments(small_target, tmp_path / "run", f"--set=data.path={data}"))

    assert status == 2
    assert f"{data}:2: " in capsys.readouterr().err


def test_unwritable_out_directory(small_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that cannot be made is an error that names it."""
    (tmp_path / "file").touch()

    status = main(arguments(small_target, tmp_path / "file" / "run"))

    assert status == 2
    assert "choose a writable directory" in capsys.readouterr().err


def test_unusable_runtime_directory(
    small_target: Path, short_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endpoints that cannot be placed are an error that names the variable to set."""
    (short_path / "file").touch()
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(short_path / "file" / "run"))

    status = main(arguments(small_target, short_path / "run"))

    assert status == 2
    assert "set DFLASH_RUNTIME_DIR to a writable directory" in capsys.readouterr().err
    assert not (short_path / "run").exists()


def test_resume_refuses_what_would_change_the_run(
    small_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in progress keeps its batch size; telemetry may change."""
    out_dir = tmp_path / "run"
    main(arguments(small_target, out_dir, "--max-steps", "2"))

    status = main(["--resume", "--out", str(out_dir), "--set=train.batch_size=8"])
    refusal = capsys.readouterr().err

    assert main(["--resume", "--out", str(out_dir), "--max-steps", "2"]) == 2
    assert "the run is already at step 2" in capsys.readouterr().err
    assert main(["--resume", "--out", str(out_dir), "--preset", "embedded"]) == 2
    assert "a run keeps its settings; leave --preset out" in capsys.readouterr().err
    assert status == 2
    assert "train.batch_size cannot change in a run that has begun" in refusal
    assert main(["--resume", "--out", str(out_dir), "--max-steps", "3", "--set=telemetry.interval_s=0.5"]) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_loading_says_which_it_was(small_target: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Before there is anything to save, a signal ends the command in one line, with 128 plus its number."""
    command = [sys.executable, "-m", "trainer.app", *arguments(small_target, tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(number)
        errors = process.stderr.read()

    assert process.returncode == 128 + number
    assert errors.splitlines()[-1] == "dflash-train: interrupted"
    assert "Traceback" not in errors
