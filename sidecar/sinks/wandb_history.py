"""What happened to the children of one run, and what follows from it for the next one."""

import random

from sidecar.sinks.wandb_protocol import Failed, Sighting
from sidecar.sinks.wandb_settings import WandbSettings


class RunHistory:
    """Since the start of the supervisor."""

    def __init__(self) -> None:
        self.served_s = float("-inf")
        self.retry_s = float("-inf")
        self.failure: Failed | None = None
        self.stopped_at_row: int | None = None
        self.is_conflict = False
        """Whether another writer was seen at work, or took the run from a child of ours."""
        self.drained = False
        """Whether a child ended in peace after handing over every row; only a look at the server proves more."""
        self.num_forgotten = 0
        """Rows that the server had and has no more."""
        self._num_failures = 0
        self._sighting: Sighting | None = None
        self._sighted_s = 0.0

    def settled(self, now_s: float, quiet_s: float) -> Sighting | None:
        """What was unexpected on the server and has not changed for long enough."""
        return self._sighting if now_s >= self._sighted_s + quiet_s else None

    def note_attached(self) -> None:
        """The server is as it should be."""
        self._sighting = None
        self.is_conflict = False
        self.num_forgotten = 0

    def note_growth(self) -> None:
        """Rows are going out."""
        self._num_failures = 0

    def note_peace(self, *, drained: bool) -> None:
        """A child ended by itself."""
        self.drained = drained
        self.failure = None
        self._num_failures = 0

    def note_failure(self, failure: Failed, now_s: float, settings: WandbSettings, *, was_attached: bool) -> None:
        """A child gave up; sets when the next one may try."""
        self.drained = False
        self.failure = failure
        if failure.sighting is not None and failure.sighting != self._sighting:
            is_growing = self._sighting is not None and self._sighting.owner == failure.sighting.owner
            self.is_conflict |= failure.reason == "contested" and (was_attached or is_growing)
            self._sighting, self._sighted_s = failure.sighting, now_s
        pause_s = min(settings.min_backoff_s * 2**self._num_failures, settings.max_backoff_s)
        self._num_failures = min(self._num_failures + 1, 30)
        if failure.reason == "refused":
            pause_s = max(pause_s, settings.refused_backoff_s)
        if failure.reason == "behind":
            pause_s = max(pause_s, settings.quiet_s / 2)
        self.retry_s = now_s + pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads restarts, hides nothing
        if failure.reason == "contested":
            self.retry_s = self._sighted_s + settings.quiet_s * random.uniform(1.0, 1.5)  # noqa: S311 - the same

    @property
    def phase(self) -> str:
        """How the sink reports the failure."""
        if self.failure is not None and self.failure.reason == "refused":
            return "refused"
        return "conflict" if self.is_conflict else "waiting"
