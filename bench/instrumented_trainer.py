"""The trainer with somebody's own instrumentation, hooked in from outside: the trainer itself is not changed.

`python -m bench.instrumented_trainer KIND RECORD ARGUMENTS...` runs `dflash-train ARGUMENTS` and appends to the file
RECORD, as two float64, when each optimizer step ended by the machine's monotonic clock, and how much CPU time the
process had used by then. KIND says what else happens at the end of each step, on the thread that steps, as one would
write it into a training loop:

* `none`: nothing. Telemetry of our own is a matter of ARGUMENTS.
* `wandb`: the step's scalars are read with `.item()` and given to `wandb.log`, in a run of the real SDK.
* `prometheus`: they are read the same way and set in metrics of prometheus_client, which serves them over HTTP.

From the environment: BENCH_PROMETHEUS_PORT; BENCH_INIT_TIMEOUT_S, after which training begins without W&B; and
BENCH_HANG_STEP with BENCH_SERVER_PID, the step at which the stand-in W&B server is told to hang.
"""

import logging
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from trainer.app import main as train
from trainer.instruments import StepFacts, StepMailbox

Report = Callable[[StepFacts, Tensor], None]
_log = logging.getLogger(__name__)


def main(kind: str, record: str, *arguments: str) -> int:
    """Train and keep the record."""
    report = {"none": _nothing, "wandb": _wandb, "prometheus": _prometheus}[kind]()
    hang_step, server_pid = (int(os.environ.get(key, "0")) for key in ("BENCH_HANG_STEP", "BENCH_SERVER_PID"))
    post = StepMailbox.post
    with Path(record).open("wb", buffering=0) as times:

        def post_and_report(mailbox: StepMailbox, facts: StepFacts, scalars: Tensor) -> None:
            post(mailbox, facts, scalars)
            report(facts, scalars)
            times.write(struct.pack("2d", time.monotonic(), time.process_time()))
            if facts.step == hang_step:
                os.kill(server_pid, signal.SIGUSR1)

        setattr(StepMailbox, "post", post_and_report)  # noqa: B010 - a method is replaced, which assignment would hide
        return train(arguments)


def _nothing() -> Report:
    return lambda _facts, _scalars: None


def _scalar_values(facts: StepFacts, scalars: Tensor) -> dict[str, float]:
    """What our own step record holds, read as one would."""
    loss, grad_norm, accept_length, *accuracy = (scalar.item() for scalar in scalars)
    return {
        "train/step": facts.step,
        "train/loss": loss,
        "train/grad_norm": grad_norm,
        "train/accept_length_simulated": accept_length,
        "train/learning_rate": facts.learning_rate,
        "train/tokens_real": facts.tokens_real,
        "train/tokens_padding": facts.tokens_padding,
        "train/queue_wait_s": facts.queue_wait_s,
        **{f"train/accuracy/{k}": ratio for k, ratio in enumerate(accuracy, start=1)},
    }


def _wandb() -> Report:
    import wandb  # noqa: PLC0415 - the other kinds must not pay for it

    settings = wandb.Settings(init_timeout=float(os.environ.get("BENCH_INIT_TIMEOUT_S", "60")))
    try:
        run = wandb.init(project="bench", settings=settings)
    except wandb.errors.CommError as error:
        _log.warning("training begins without W&B: %s", error)
        return _nothing()
    return lambda facts, scalars: run.log(_scalar_values(facts, scalars))


def _prometheus() -> Report:
    from prometheus_client import Counter, Gauge, start_http_server  # noqa: PLC0415 - as above

    start_http_server(int(os.environ["BENCH_PROMETHEUS_PORT"]), addr="127.0.0.1")
    gauge = Gauge("dflash_train", "Newest step.", ["figure"])
    tokens = Counter("dflash_tokens", "Tokens.", ["kind"])
    steps = Counter("dflash_steps", "Optimizer steps.")

    def report(facts: StepFacts, scalars: Tensor) -> None:
        for figure, value in _scalar_values(facts, scalars).items():
            gauge.labels(figure).set(value)
        tokens.labels("real").inc(facts.tokens_real)
        tokens.labels("padding").inc(facts.tokens_padding)
        steps.inc()

    return report


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
