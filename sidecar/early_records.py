"""Records that overtook the hello which explains them: kept for a moment, not many, and handed back when it comes."""

from shared.wire import FrameError, Record
from sidecar.frames import topic_of

MAX_RECORDS = 100
MAX_RECORD_BYTES = 64 * 1024


class EarlyRecords:
    """Frames by endpoint, in order of arrival."""

    def __init__(self) -> None:
        self._frames: dict[str, list[list[bytes]]] = {}

    def keep(self, endpoint: str, record: Record, body: bytes) -> None:
        """Keep a record of a session that has not said hello; raises FrameError when there are too many."""
        frames = self._frames.setdefault(endpoint, [])
        if len(frames) >= MAX_RECORDS or len(body) > MAX_RECORD_BYTES:
            raise FrameError("no_hello", f"session {record.session} has not said hello")
        frames.append([topic_of(record), body])

    def release(self, endpoint: str) -> list[list[bytes]]:
        """The frames of an endpoint; they are forgotten here."""
        return self._frames.pop(endpoint, [])
