"""A real process that listens where a trainer would, and does on its threads what a test wants."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from trainer_frames import hello

from shared.wire import Scalar
from sidecar.samples import Labels
from sidecar.stored import StoredSession

_SCRIPT = """
import os, socket, sys, threading, time
sys.path.insert(0, sys.argv[1])
from shared.thread_name import name_this_thread

listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[2])
listener.listen(8)

named = threading.Semaphore(0)

def spin(name):
    name_this_thread(name)
    named.release()
    while True:
        pass

def rest(name):
    name_this_thread(name)
    named.release()
    time.sleep(1000)

if sys.argv[3:] and sys.argv[3].startswith("user-"):
    os.setuid(int(sys.argv.pop(3).split("-")[1]))
for work in sys.argv[3:]:
    threading.Thread(target={"spin": spin, "rest": rest}[work.split("-")[0]], args=(work,), daemon=True).start()
    named.acquire()
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def session_of(endpoint: Path, pid: int, labels: Labels = (), **config: Scalar) -> StoredSession:
    """A live session as the journal has it; `pid` is what its trainer knows itself by."""
    said = msgspec.structs.replace(hello(f"s{pid}", pid=pid), start_time_s=time.time(), config=dict(config))
    return StoredSession(
        number=1,
        hello=said,
        endpoint=str(endpoint),
        labels=labels,
        next_seq=0,
        end_seq=0,
        ended_s=None,
        exit_code=None,
        consumed=False,
    )


@contextmanager
def listening(
    endpoint: Path, *works: str, prefix: Sequence[str] = ()
) -> "Iterator[tuple[subprocess.Popen[str], StoredSession]]":
    """A process that listens, with a thread per word (`spin-a`, `rest-b`); it ends with the context.

    A first word `user-65534` makes it a process of that user.
    """
    root = str(Path(__file__).parent.parent)
    command = [*prefix, sys.executable, "-c", _SCRIPT, root, str(endpoint), *works]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
    ) as process:
        try:
            assert process.stdout is not None
            yield process, session_of(endpoint, int(process.stdout.readline()))
        finally:
            process.communicate("")
