"""Opens a run in W&B so that an upload can go on where the last one ended.

Facts behind the settings (wandb 0.31):

* A resume forgets all earlier metric definitions, so all are made again each time, by exact name.
* `x_update_finish_state=False` lets `finish()` send what is left without marking the run finished.
* `stop_fn` is called within 15 s for a stop in the UI and, because of `stop_on_fatal_error`, when uploading has ended
  for good; it does not say which. Without `stop_fn` wandb interrupts the main thread.
"""

import os
import time
from collections.abc import Callable, Mapping

import wandb
from wandb.errors import AuthenticationError, CommError, Error, UsageError
from wandb.sdk.mailbox.mailbox import MailboxClosedError

from sidecar.sinks.wandb_lookup import CLAIM_KEY
from sidecar.sinks.wandb_protocol import Failed, GiveUp, Task
from sidecar.sinks.wandb_run import STEP_AXIS, TIME_AXIS
from sidecar.sinks.wandb_secrets import redacted

_REFUSED_SHARE = 0.9
"""wandb retries whatever may pass until `init_timeout`; an error well before that is the server's last word."""


def attach(task: Task, config: dict[str, object], stop: Callable[[], None]) -> wandb.Run:
    """Open the run and put our name on it; raises GiveUp."""

    def on_stop() -> (
        None
    ):  # a plain function: wandb copies its settings deeply, which a method of a lock does not survive
        stop()

    closing = task.exit_code is not None
    started_s = time.monotonic()
    settings = wandb.Settings(
        init_timeout=task.init_timeout_s,
        finish_timeout=task.finish_timeout_s,
        finish_timeout_raises=True,
        stop_fn=on_stop,
        stop_on_fatal_error=True,
        x_update_finish_state=closing,
        x_file_stream_transmit_interval=task.transmit_interval_s,
        console="off",
        quiet=True,
        silent=True,
        disable_git=True,
        disable_code=True,
        x_save_requirements=False,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
    )
    try:
        return wandb.init(
            id=task.run_id,
            name=task.run_id,
            resume="must" if closing else "allow",
            project=task.project,
            entity=task.entity or None,
            config=config | {CLAIM_KEY: task.owner},
            dir=task.directory,
            settings=settings,
        )
    except (Error, MailboxClosedError, TimeoutError, ConnectionError) as error:
        retried = time.monotonic() - started_s > task.init_timeout_s * _REFUSED_SHARE
        raise GiveUp(_failure(error, retried=retried)) from error


def define(run: wandb.Run, keys: Mapping[str, bool], defined: set[str]) -> None:
    """Say of each metric which axis it belongs to, once; `defined` remembers.

    Args:
        run: the attached run.
        keys: each with whether it comes with a training step; others go by time.
        defined: what was said already.
    """
    for key, is_of_steps in keys.items():
        if key in defined or key.startswith("_"):
            continue
        if not defined:
            run.define_metric(STEP_AXIS)
            run.define_metric(TIME_AXIS)
            defined |= {STEP_AXIS, TIME_AXIS}
        if key not in defined:
            run.define_metric(key, step_metric=STEP_AXIS if is_of_steps else TIME_AXIS)
            defined.add(key)


def without_key(text: str) -> str:
    """A message on one line, without the API key should it be in there."""
    return redacted(" ".join(text.split()), os.environ.get("WANDB_API_KEY", ""))[:500]


def _failure(error: Exception, *, retried: bool) -> Failed:
    refused = isinstance(error, AuthenticationError | UsageError) or (isinstance(error, CommError) and not retried)
    return Failed("refused" if refused else "unreachable", without_key(str(error)))
