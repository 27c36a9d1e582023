"""Which definitions are live, and how they change while the sidecar runs.

The file is the one given, else STATE_DIR/metrics.toml if it exists, else the shipped one; it is looked for anew at
each reload. A file that is refused changes nothing: the live set stays. The last accepted text is kept in the state
directory, so that a restart over a broken file still has definitions that once worked.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from shared.schema import Kind
from sidecar.definitions import SHIPPED_FILE, DefinitionsError, DefinitionSet, load

OWN_NAME = "metrics.toml"
LAST_GOOD_NAME = "metrics.last-good.toml"
_log = logging.getLogger(__name__)


def definitions_file(chosen: Path | None, state_dir: Path) -> Path:
    """The file that should be live."""
    if chosen is not None:
        return chosen
    own = state_dir / OWN_NAME
    return own if own.exists() else SHIPPED_FILE


class LiveDefinitions:
    """The live set and its file.

    Args:
        chosen: the file given by the user, None for the rule above.
        state_dir: where the last good copy is kept.
        catalogue: kinds of the raw families.
        count: called with "success" or "failure" for each reload.

    Raises:
        DefinitionsError: `chosen` is refused and nothing was ever accepted in this state directory.
    """

    def __init__(
        self, chosen: Path | None, state_dir: Path, catalogue: Mapping[str, Kind], count: Callable[[str], None]
    ) -> None:
        self._chosen = chosen
        self._state_dir = state_dir
        self._last_good = state_dir / LAST_GOOD_NAME
        self._catalogue = catalogue
        self._count = count
        self._tried = self._seen = self._signature()
        self.problem: str | None = None
        """Why the file is not what is live."""
        self.current = self._first_set()

    @property
    def file(self) -> Path:
        """The file that should be live."""
        return definitions_file(self._chosen, self._state_dir)

    def reload(self) -> str | None:
        """Swap the set for what is in the file now; when it is refused, keep the set and return the problems."""
        self._tried = self._seen = self._signature()
        try:
            self.current = self._accept(self.file)
        except DefinitionsError as error:
            self.problem = str(error)
            self._count("failure")
            _log.error("definitions not reloaded, the previous ones stay live:\n%s", error)
        else:
            self.problem = None
            self._count("success")
            _log.info("definitions reloaded: %s, digest %s", self.current.file, self.current.digest)
        return self.problem

    def has_changed(self) -> bool:
        """Whether the file changed since it was last tried, and has been at rest since the previous call."""
        seen, self._seen = self._seen, self._signature()
        return self._seen not in {None, self._tried} and self._seen == seen

    def _first_set(self) -> DefinitionSet:
        try:
            return self._accept(self.file)
        except DefinitionsError as error:
            self.problem = str(error)
            try:
                fallback = load(self._last_good, self._catalogue)
            except DefinitionsError:
                if self._chosen is not None:
                    raise error from None
                fallback = load(SHIPPED_FILE, self._catalogue)
            _log.error("definitions refused, going on with %s instead; correct the file:\n%s", fallback.file, error)
            return fallback

    def _accept(self, file: Path) -> DefinitionSet:
        accepted = load(file, self._catalogue)
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest().startswith(accepted.digest):
            draft = self._last_good.with_suffix(".tmp")
            try:
                draft.write_bytes(content)
                draft.replace(self._last_good)
            except OSError as error:
                _log.warning("%s: %s: no copy of the definitions is kept", self._last_good, error.strerror)
        return accepted

    def _signature(self) -> tuple[str, int, int, int] | None:
        file = self.file
        try:
            found = file.stat()
        except OSError:
            return None
        return str(file), found.st_mtime_ns, found.st_size, found.st_ino
