"""Which workers run on which GPU, as the trainers' hellos say.

A GPU has one owner, however many workers share it, so that a join of its power with `dflash_gpu_info` counts no watt
twice: several roles, workers or runs are joined by `+`. UUIDs are compared without their prefix, because a trainer sees
a MIG instance under its own UUID but cannot tell it from a GPU. Indices play no part: CUDA_VISIBLE_DEVICES moves them.
"""

from collections.abc import Iterable, Mapping

from sidecar.stored import StoredSession

Owner = Mapping[str, str]
"""Labels of `dflash_gpu_info` that say whose GPU it is."""
NO_OWNER: Owner = {"role": "", "worker": ""}


def bare_uuid(uuid: str) -> str:
    """A UUID without the prefix that says what it belongs to."""
    return uuid.removeprefix("MIG-").removeprefix("GPU-").lower()


def owners_of(sessions: Iterable[StoredSession]) -> dict[str, Owner]:
    """The owner of each GPU by its bare UUID, of live trainers of this machine."""
    found: dict[str, dict[str, set[str]]] = {}
    for stored in sessions:
        for device in stored.hello.topology:
            if device.uuid:
                labels = found.setdefault(bare_uuid(device.uuid), {})
                for name, value in (("role", device.role), ("worker", device.worker), *stored.labels):
                    labels.setdefault(name, set()).add(value)
    return {uuid: {name: "+".join(sorted(values)) for name, values in labels.items()} for uuid, labels in found.items()}
