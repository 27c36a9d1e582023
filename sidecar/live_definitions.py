"""Which definitions are live, and how they change while the sidecar runs.

The file is the one given, else STATE_DIR/metrics.toml if it exists, else the shipped one; it is looked for anew at
each reload. A set is swapped in only after it was read without a mistake and tried on the live samples. Whatever is
refused changes nothing: the live set stays. The last accepted text is kept in the state directory, so that a restart
over a broken file still has definitions that once worked.

A file that is being written in place is half a file for a moment, and half a file of definitions can be a good one. So
it is read only once it has been at rest for a while, and refused when it changes under the reading. One that was put in
place by a rename, which shows in its times (a rename changes the inode, not the content), is read at once.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from sidecar.catalogue import Catalogue
from sidecar.definition_source import DefinitionsError, Problem, read_source
from sidecar.definitions import SHIPPED_FILE, DefinitionSet, Failure, definitions_of, load

OWN_NAME = "metrics.toml"
LAST_GOOD_NAME = "metrics.last-good.toml"
SETTLE_S = 0.5
"""How long a file that is written in place must be at rest before it is read."""
READ_ATTEMPTS = 3
_log = logging.getLogger(__name__)

Trial = Callable[[DefinitionSet], Sequence[Failure]]
"""Evaluates a set on the live samples; returns what would get worse by swapping it in."""


def definitions_file(chosen: Path | None, state_dir: Path) -> Path:
    """The file that should be live."""
    if chosen is not None:
        return chosen
    own = state_dir / OWN_NAME
    return own if own.exists() else SHIPPED_FILE


class _Signature(NamedTuple):
    """What changes when a file does."""

    path: str
    inode: int
    written_ns: int
    changed_ns: int
    size: int
    num_links: int

    @property
    def was_renamed(self) -> bool:
        """Whether it was put in place as a whole after it had been written.

        A file that is just being replaced changes after its content too, but nothing links to it any more.
        """
        return self.changed_ns > self.written_ns and self.num_links > 0


class LiveDefinitions:
    """The live set and its file.

    Args:
        chosen: the file given by the user, None for the rule above.
        state_dir: where the last good copy is kept.
        catalogue: gives the raw families that are known now.
        count: called with "success" or "failure" for each reload.
        clock_s: monotonic time.

    Raises:
        DefinitionsError: `chosen` is refused and nothing was ever accepted in this state directory.
    """

    def __init__(
        self,
        chosen: Path | None,
        state_dir: Path,
        catalogue: Callable[[], Catalogue],
        count: Callable[[str], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.chosen = chosen
        self._state_dir = state_dir
        self._last_good = state_dir / LAST_GOOD_NAME
        self._catalogue = catalogue
        self._count = count
        self._clock_s = clock_s
        self._tried = self._seen = self._signature()
        self._seen_s = clock_s()
        self._kept_digest = ""
        self.num_tried = 0
        self.tried_digest = ""
        """Of the file that was tried last, accepted or not; empty when it could not be read."""
        self.problem: str | None = None
        """Why the file is not what is live."""
        self.current = self._first_set()

    @property
    def file(self) -> Path:
        """The file that should be live."""
        return definitions_file(self.chosen, self._state_dir)

    def reload(self, trial: Trial = lambda _: ()) -> str | None:
        """Swap the set for what is in the file now; when it is refused, keep the set and return the problems."""
        try:
            candidate = self._read_whole()
            if failures := trial(candidate):
                raise _trial_error(candidate, failures)
        except DefinitionsError as error:
            self.problem = str(error)
            self._count("failure")
            _log.error("definitions not reloaded, the previous ones stay live:\n%s", error)
        else:
            self._keep(candidate)
            self.current = candidate
            self.problem = None
            self._count("success")
            _log.info("definitions reloaded: %s, digest %s", candidate.file, candidate.digest)
        return self.problem

    def has_changed(self) -> bool:
        """Whether the file is another than the one tried last, and nobody is writing it."""
        return self._signature() not in {None, self._tried} and self.is_at_rest()

    def is_at_rest(self) -> bool:
        """Whether nobody is writing the file: it was renamed into place, or has not changed for SETTLE_S."""
        seen = self._signature()
        if seen != self._seen:
            self._seen, self._seen_s = seen, self._clock_s()
        if seen is None or seen == self._tried or seen.was_renamed:
            return True
        return self._clock_s() - self._seen_s >= SETTLE_S

    def _first_set(self) -> DefinitionSet:
        try:
            accepted = self._read(self.file)
        except DefinitionsError as error:
            self.problem = str(error)
            try:
                fallback = load(self._last_good, self._catalogue())
            except DefinitionsError:
                if self.chosen is not None:
                    raise error from None
                fallback = load(SHIPPED_FILE, self._catalogue())
            _log.error("definitions refused, going on with %s instead; correct the file:\n%s", fallback.file, error)
            return fallback
        self._keep(accepted)
        return accepted

    def _read_whole(self) -> DefinitionSet:
        """Read the file at rest; raises DefinitionsError, also when somebody is writing it."""
        for _ in range(READ_ATTEMPTS):
            if not self.is_at_rest():
                break
            self._tried = self._seen
            try:
                candidate = self._read(self.file)
            except DefinitionsError:
                if self._signature() == self._tried:
                    raise
            else:
                if self._signature() == self._tried:
                    return candidate
        message = "somebody is writing the file; write it beside its place and rename it, as `apply` does"
        raise DefinitionsError((Problem(file=self.file, message=message),))

    def _read(self, file: Path) -> DefinitionSet:
        self.tried_digest = ""
        self.num_tried += 1
        source = read_source(file)
        self.tried_digest = source.digest
        return definitions_of(source, self._catalogue())

    def _keep(self, accepted: DefinitionSet) -> None:
        if accepted.digest == self._kept_digest:
            return
        draft = self._last_good.with_suffix(".tmp")
        try:
            draft.write_bytes(accepted.content)
            draft.replace(self._last_good)
            self._kept_digest = accepted.digest
        except OSError as error:
            _log.warning("%s: %s: no copy of the definitions is kept", self._last_good, error.strerror)

    def _signature(self) -> _Signature | None:
        file = self.file
        try:
            found = file.stat()
        except OSError:
            return None
        times_ns = (found.st_mtime_ns, found.st_ctime_ns)
        return _Signature(str(file), found.st_ino, *times_ns, found.st_size, found.st_nlink)


def _trial_error(candidate: DefinitionSet, failures: Sequence[Failure]) -> DefinitionsError:
    lines = {definition.name: definition.line for definition in candidate.definitions}
    return DefinitionsError(
        tuple(
            Problem(
                file=candidate.file,
                line=lines.get(failure.metric, 0),
                metric=failure.metric,
                message=f"fails on the live samples: {failure.message}",
            )
            for failure in failures
        )
    )
