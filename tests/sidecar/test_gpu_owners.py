"""Whose GPU it is, from the hellos of the trainers."""

from collections.abc import Sequence

import msgspec
from trainer_frames import hello

from shared.wire import Device
from sidecar.gpu_owners import owners_of
from sidecar.samples import Labels, labels_of
from sidecar.stored import StoredSession


def session(devices: Sequence[Device], labels: Labels = ()) -> StoredSession:
    """A live trainer with these devices."""
    return StoredSession(
        number=1,
        hello=msgspec.structs.replace(hello(), topology=tuple(devices)),
        endpoint="/run/dflash/a.sock",
        labels=labels,
        next_seq=0,
        end_seq=0,
        ended_s=None,
        exit_code=None,
        consumed=False,
    )


def test_each_gpu_has_the_worker_that_says_so() -> None:
    """Devices are told apart by UUID, whatever the index; a worker on a CPU owns nothing."""
    devices = [
        Device("target", "0", "cuda:0", "GPU-B"),
        Device("drafter", "0", "cuda:1", "GPU-a"),
        Device("drafter", "1", "cpu", ""),
    ]

    assert owners_of([session(devices)]) == {
        "b": {"role": "target", "worker": "0"},
        "a": {"role": "drafter", "worker": "0"},
    }


def test_workers_that_share_a_gpu_are_one_owner() -> None:
    """Roles and runs of several workers on one GPU, or MIG instance under either prefix, are joined."""
    first = session([Device("target", "0", "cuda:0", "GPU-a")], labels_of(run="x"))
    second = session([Device("drafter", "1", "cuda:0", "MIG-a")], labels_of(run="y"))

    assert owners_of([first, second]) == {"a": {"role": "drafter+target", "worker": "0+1", "run": "x+y"}}
