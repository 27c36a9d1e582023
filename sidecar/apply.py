"""What the command `apply` does: check, try out, replace, reload, confirm; or say what stands in the way.

Nothing is replaced before the set was checked and tried out over the journal. What the running sidecar says is live is
what counts: when it does not take the new file, the one before is put back.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from sidecar.background import fetch_status
from sidecar.catalogue import Catalogue, stored_catalogue
from sidecar.config import SidecarConfig
from sidecar.definition_source import DefinitionsError, Problem
from sidecar.definitions import SHIPPED_FILE, DefinitionSet, load
from sidecar.dry_run import DryRun, diff, dry_run
from sidecar.installation import Installation
from sidecar.live_definitions import LAST_GOOD_NAME
from sidecar.state_dir import Owner, owner_of
from sidecar.station import JOURNAL_NAME
from sidecar.status import StatusDocument

CONFIRM_TIMEOUT_S = 20.0
POLL_S = 0.05
Say = Callable[[str], None]


class ApplyError(ValueError):
    """A file that does not become live; the message is meant for the user."""


class _Place(NamedTuple):
    """Where definitions are applied, and what is live there."""

    config: SidecarConfig
    state_dir: Path
    owner: Owner | None
    status: StatusDocument | None
    catalogue: Catalogue


def apply(config: SidecarConfig, state_dir: Path, file: Path | None, say: Say, *, only_try: bool) -> None:
    """Make a file of definitions live.

    Args:
        config: the settings.
        state_dir: of the sidecar, which need not be running.
        file: the new definitions; None for those before the last apply.
        say: called with each line of the report.
        only_try: stop before anything is replaced.

    Raises:
        DefinitionsError: the file is refused, by the checks or by the running sidecar.
        ValueError: something else is in the way; the message is meant for the user.
    """
    place = _place(config, state_dir)
    installation = Installation(state_dir)
    if file is None and not installation.previous.exists():
        raise ApplyError(f"there is nothing to go back to: no apply has replaced a file in {state_dir} yet")
    with nullcontext() if only_try else installation.hold():
        new = load(installation.previous if file is None else file, place.catalogue)
        old = _live_set(place, installation)
        values = dry_run(state_dir / JOURNAL_NAME, new)
        _refuse_failures(new, old, values)
        for line in diff(old, new, values):
            say(line)
        if only_try:
            say("good; nothing was replaced")
            return
        installation.replace(new.content, (old or load(SHIPPED_FILE, place.catalogue)).content)
        if place.owner is None or place.status is None:
            say(f"installed as {installation.file}; no sidecar runs on {state_dir}, so it is live at the next start")
            return
        say(_confirmed(place, place.owner, place.status, installation, new))


def _place(config: SidecarConfig, state_dir: Path) -> _Place:
    owner = owner_of(state_dir)
    status = fetch_status(config, state_dir)[1] if owner is not None else None
    chosen = status.definitions.chosen if status is not None else config.definitions
    if chosen:
        who = f"the sidecar {status.sidecar.pid} was started with" if status is not None else "the settings name"
        live = f"{status.definitions.file}, digest {status.definitions.digest}, is live" if status is not None else ""
        raise ApplyError(
            f"{who} the definitions {chosen}, so {state_dir / Installation(state_dir).file.name} is not read"
            f"{f'; {live}' if live else ''}; replace {chosen} instead, it is watched, or drop --definitions"
        )
    return _Place(config, state_dir, owner, status, stored_catalogue(state_dir / JOURNAL_NAME))


def _live_set(place: _Place, installation: Installation) -> DefinitionSet | None:
    """What is live, or would be at the next start; None when it cannot be read any more."""
    candidates = [installation.file, place.state_dir / LAST_GOOD_NAME, SHIPPED_FILE]
    for file in candidates:
        try:
            found = load(file, place.catalogue)
        except DefinitionsError:
            continue
        if place.status is None or found.digest == place.status.definitions.digest:
            return found
    return None


def _refuse_failures(new: DefinitionSet, old: DefinitionSet | None, values: DryRun) -> None:
    """Raise for what fails over the journal, unless it is live already: then keeping it out would mend nothing."""
    before = {definition.name: definition for definition in old.definitions} if old is not None else {}
    problems = tuple(
        Problem(
            file=new.file,
            line=definition.line,
            metric=definition.name,
            message=f"fails on the newest samples of the journal: {failure.message}",
        )
        for definition in new.definitions
        if (failure := values.failures.get(definition.name)) is not None
        and (definition.name not in before or definition.differences(before[definition.name]))
    )
    if problems:
        raise DefinitionsError(problems)


def _confirmed(
    place: _Place, owner: Owner, before: StatusDocument, installation: Installation, new: DefinitionSet
) -> str:
    """Ask for a reload and wait until the set is live; else put the file back and raise."""
    try:
        after = _reloaded(place, owner, new.digest, before.definitions.num_tried)
    except ValueError as error:
        installation.put_back()
        _ask(owner)
        raise ApplyError(f"{error}\nthe file before is back in place, nothing has changed") from error
    trainers = ", ".join(f"trainer {trainer.pid} goes on" for trainer in after.trainers) or "no trainer"
    return (
        f"live: {len(new.definitions)} metrics, digest {new.digest} (before: {before.definitions.digest}), "
        f"sidecar {after.sidecar.pid}, {trainers}"
    )


def _reloaded(place: _Place, owner: Owner, digest: str, num_tried: int) -> StatusDocument:
    _ask(owner)
    deadline_s = time.monotonic() + CONFIRM_TIMEOUT_S
    while time.monotonic() < deadline_s:
        _, status = fetch_status(place.config, place.state_dir)
        definitions = status.definitions
        if definitions.digest == digest:
            return status
        if definitions.problem and definitions.num_tried > num_tried and definitions.tried_digest == digest:
            raise ApplyError(f"the sidecar {owner.pid} refuses it:\n{definitions.problem}")
        time.sleep(POLL_S)
    raise ApplyError(f"the sidecar {owner.pid} does not show it after {CONFIRM_TIMEOUT_S:g} s; look at its log")


def _ask(owner: Owner) -> None:
    """Ask for a reload at once; where that is not allowed, the sidecar sees the new file by itself a moment later."""
    with suppress(OSError):
        os.kill(owner.pid, signal.SIGHUP)
