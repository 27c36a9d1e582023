"""The uploading process as its supervisor holds it: started with a task, read without blocking."""

import os
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from sidecar.sinks.wandb_protocol import Failed, Message, Task, decode_line


class ChildProcess:
    """One uploading process and its pipe.

    Args:
        task: what it is to do.
        environment: what it gets to see.
        now_s: monotonic.
    """

    def __init__(self, task: Task, environment: Mapping[str, str], now_s: float) -> None:
        self.run_id = task.run_id
        self.started_s = self.heard_s = now_s
        """When it was started, then when it had attached; and when it last said something."""
        self.leaving = False
        self.is_attached = False
        self.num_sent: int | None = None
        self.failure: Failed | None = None
        self._buffer = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sidecar.sinks.wandb_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the terminal is for the sidecar alone, which then ends its child
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdout = self.process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        with self.process.stdin as stdin:
            stdin.write(msgspec.json.encode(task) + b"\n")  # far less than a pipe holds

    def read(self) -> list[Message]:
        """All messages that have arrived in full."""
        while part := self._stdout.read(65536):
            self._buffer += part
        *lines, self._buffer = self._buffer.split(b"\n")
        return [decode_line(line) for line in lines]

    def end(self, timeout_s: float) -> None:
        """Let it send what it has in hand for a while, then kill it."""
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Close the pipe of an ended process."""
        self._stdout.close()
