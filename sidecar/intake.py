"""What the receiver does with each frame: check it, know its session, keep it once, see what is missing.

No sockets here. Frames go in through `take`, and `turn` commits what came and returns the subscriptions to change,
because in this protocol asking for a replay, and for a fresh hello, is a subscription (`shared.wire`).

A journal that cannot be written (a full disk, say) ends this intake with an sqlite3.Error: another one goes on with
another journal, and whatever this one had not stored is a gap like any other, which replay fills.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from shared.endpoint import live_owner_pid
from shared.remote import is_remote
from shared.wire import TOPIC_HELLO, Event, FrameError, Hello, Record, ReplayChunk, decode_record, encode
from sidecar.early_records import EarlyRecords
from sidecar.frames import check_continues, check_hello, check_record, decode_frame, is_same_trainer, scrub
from sidecar.journal import Journal
from sidecar.samples import RUN_LABEL, Labels, labels_of
from sidecar.sessions import SessionTrack, Subscription, joined
from sidecar.stored import Batch, LostRange, StoredSession

COMMIT_INTERVAL_S = 0.1
COMMIT_RECORDS = 500
CHECK_INTERVAL_S = 1.0
SETTLE_INTERVAL_S = 600.0
OWED_S = 86_400.0
"""How long after its end a trainer elsewhere may still bring what it owes."""
_log = logging.getLogger(__name__)


class Intake:
    """Everything between frames and the journal. One thread only.

    Args:
        journal: where records go.
        nonce: text that no other sidecar uses in its replay topics.
        wall_s: Unix time.
        owner_pid: who listens on a socket path, None for nobody.
        now_s: monotonic time at the start.
    """

    def __init__(
        self,
        journal: Journal,
        nonce: str,
        now_s: float,
        wall_s: Callable[[], float] = time.time,
        owner_pid: Callable[[Path], int | None] = live_owner_pid,
    ) -> None:
        self._journal = journal
        self._nonce = nonce
        self._num_requests = 0
        self._wall_s = wall_s
        self._owner_pid = owner_pid
        self._tracks: dict[str, SessionTrack] = {}
        self._early = EarlyRecords()
        self._greeted: set[str] = set()
        self._subscriptions: list[Subscription] = []
        self._batch = Batch()
        self._commit_s = now_s
        self._check_s = now_s
        self._settle_s = now_s + SETTLE_INTERVAL_S
        self._complained: set[tuple[str, str]] = set()
        self._open_books(now_s)

    def has_open_session(self, endpoint: str) -> bool:
        """Whether a session on this endpoint has not ended."""
        return any(track.endpoint == endpoint for track in self._tracks.values())

    def take(self, endpoint: str, parts: list[bytes], now_s: float) -> None:
        """Take in one frame; a frame that cannot be used is counted under its reason and otherwise ignored."""
        try:
            self._take(endpoint, parts, now_s)
        except FrameError as error:
            self._reject(endpoint, error)

    def turn(self, now_s: float) -> list[Subscription]:
        """Commit when due, look after gaps and ended sessions, and return the subscriptions to change."""
        due = len(self._batch.records) >= COMMIT_RECORDS or now_s >= self._commit_s + COMMIT_INTERVAL_S
        if due:
            self.commit(now_s)
        for track in self._tracks.values():
            if track.is_overdue(now_s):
                self._close_request(track, now_s)
            if (request := track.ask(f"{self._nonce}-{self._num_requests}", now_s)) is not None:
                self._num_requests += 1
                self._subscriptions.append(Subscription(track.endpoint, request.topic, wanted=True))
        if now_s >= self._check_s:
            self._check_s = now_s + CHECK_INTERVAL_S
            self._end_silent_sessions(now_s)
        if now_s >= self._settle_s:
            self._settle_s = now_s + SETTLE_INTERVAL_S
            self._settle_old_debts(now_s)
        changes, self._subscriptions = self._subscriptions, []
        return changes

    def commit(self, now_s: float) -> None:
        """Write everything taken in so far, all or nothing; raises sqlite3.Error."""
        batch = self._batch
        if not (batch.records or batch.counts or batch.lost or batch.ended):
            return
        self._commit_s = now_s
        self._batch = Batch()
        batch.positions |= {track.number: (track.next_seq, track.end_seq) for track in self._tracks.values()}
        self._journal.append(batch)

    def _open_books(self, now_s: float) -> None:
        """Make tracks of the sessions that the journal has as open."""
        for stored in self._journal.sessions():
            if stored.ended_s is None:
                held = self._journal.held_seqs(stored.number, stored.next_seq)
                last_s = self._journal.last_time_s(stored.number) or stored.hello.start_time_s
                # A trainer elsewhere cannot be looked at: it has its time from when it could be heard.
                silence_s = 0.0 if is_remote(stored.endpoint) else max(self._wall_s() - last_s, 0.0)
                self._tracks[stored.name] = SessionTrack(stored, held, now_s - silence_s)

    def _take(self, endpoint: str, parts: list[bytes], now_s: float) -> None:
        message = decode_frame(parts)
        if isinstance(message, ReplayChunk):
            self._take_chunk(endpoint, parts[0], message, now_s)
        elif isinstance(message, Hello):
            self._take_hello(endpoint, *scrub(message, parts[1]), now_s)
        else:
            self._take_record(endpoint, message, parts[1], now_s)

    def _take_hello(self, endpoint: str, hello: Hello, body: bytes, now_s: float) -> None:
        check_hello(hello)
        track = self._tracks.get(hello.session)
        if track is not None:
            check_continues(track.hello, hello)
        if track is None or track.endpoint != endpoint:
            track = self._accept(endpoint, hello, body, now_s)
        track.heard_s = now_s
        track.expect(hello.next_seq)
        if hello.session not in self._greeted:
            self._greeted.add(hello.session)
            _log.info(
                "trainer connected: run %s, session %s, pid %d, %d earlier records to fetch",
                *(hello.run_id, hello.session, hello.pid, max(hello.next_seq - track.next_seq, 0)),
            )
        for parts in self._early.release(endpoint):
            self.take(endpoint, parts, now_s)
        if hello.first_seq > track.next_seq:
            self._give_up(track, hello.first_seq, "ring_overrun", now_s)

    def _take_chunk(self, endpoint: str, topic: bytes, chunk: ReplayChunk, now_s: float) -> None:
        track = self._tracks.get(chunk.session)
        if track is None or track.endpoint != endpoint:
            raise FrameError("session_conflict", f"a replay of session {chunk.session} that is not at {endpoint}")
        if track.request is None or topic != track.request.topic:
            return  # the rest of an answer that was given up; it will be, or was, asked for again
        track.hear_answer(now_s)
        unreadable = []
        for seq, body in enumerate(chunk.bodies, chunk.first_seq):
            try:
                self._take_replayed(endpoint, chunk.session, body, now_s)
            except FrameError as error:
                self._reject(endpoint, error)
                # Asking again brings the same bytes again, and what came after it would wait for ever.
                if seq == track.next_seq < track.request.end and track.accept(seq):
                    unreadable.append((seq, seq + 1))
        if chunk.done:
            self._close_request(track, now_s)
        self._lose(track, joined(unreadable), "unreadable", now_s)

    def _take_replayed(self, endpoint: str, session: str, body: bytes, now_s: float) -> None:
        record = decode_record(body)
        if record.session != session:
            raise FrameError("session_conflict", f"a record of {record.session} in a replay of {session}")
        if self._take_record(endpoint, record, body, now_s):
            self._count("replayed", "")

    def _take_record(self, endpoint: str, record: Record, body: bytes, now_s: float) -> bool:
        """Keep a record unless it is already here; True when it is new."""
        track = self._tracks.get(record.session)
        if track is None:
            self._early.keep(endpoint, record, body)
            return False
        if track.endpoint != endpoint:
            raise FrameError("session_conflict", f"session {record.session} lives at {track.endpoint}")
        check_record(record, track.num_cells)
        track.heard_s = now_s
        if not track.accept(record.seq):
            return False
        self._batch.records.append((track.number, record, body))
        self._count("received", "")
        if isinstance(record, Event) and record.kind == "goodbye":
            track.say_goodbye(record.detail.get("exit_code"))
        return True

    def _accept(self, endpoint: str, hello: Hello, body: bytes, now_s: float) -> SessionTrack:
        """Begin a session. Those before it that are dead end now, so that series of both never meet."""
        for other in list(self._tracks.values()):
            alive = other.endpoint != endpoint and other.is_there(now_s, self._owner_pid)
            if alive and is_same_trainer(other.hello, hello):
                raise FrameError("session_conflict", f"{other.name} of run {hello.run_id} lives at {other.endpoint}")
            if not alive and other.name != hello.session:
                self._end(other, now_s, may_return=other.is_remote and other.endpoint != endpoint)
        for earlier in self._journal.sessions():
            if earlier.name == hello.session:
                check_continues(earlier.hello, hello)
            elif earlier.endpoint == endpoint and earlier.ended_s is not None and earlier.next_seq < earlier.end_seq:
                self._settle(earlier, now_s)
        stored = self._journal.open_session(hello, body, endpoint, self._labels(hello))
        track = SessionTrack(stored, self._journal.held_seqs(stored.number, stored.next_seq), now_s)
        self._tracks[hello.session] = track
        return track

    def _settle(self, earlier: StoredSession, now_s: float) -> None:
        """Give up what an ended session might still have brought: its place, or its time, is over."""
        hello = earlier.hello
        again = self._journal.open_session(hello, encode(hello), earlier.endpoint, earlier.labels)
        self._end(SessionTrack(again, self._journal.held_seqs(again.number, again.next_seq), now_s), now_s)

    def _settle_old_debts(self, now_s: float) -> None:
        for earlier in self._journal.sessions():
            is_owing = earlier.ended_s is not None and earlier.next_seq < earlier.end_seq
            if is_owing and self._wall_s() - (earlier.ended_s or 0.0) > OWED_S:
                self._settle(earlier, now_s)

    def _labels(self, hello: Hello) -> Labels:
        """Labels that keep this session apart from those that live beside it: none as long as it is alone."""
        pairs = {"rank": str(hello.rank)} if hello.world_size > 1 else {}
        if any(track.hello.run_id != hello.run_id for track in self._tracks.values()):
            pairs[RUN_LABEL] = hello.run_id
        return labels_of(**pairs)

    def _close_request(self, track: SessionTrack, now_s: float) -> None:
        assert track.request is not None
        self._subscriptions.append(Subscription(track.endpoint, track.request.topic, wanted=False))
        if track.close_request(now_s):
            self._subscriptions.append(Subscription(track.endpoint, TOPIC_HELLO, wanted=False))
            self._subscriptions.append(Subscription(track.endpoint, TOPIC_HELLO, wanted=True))

    def _give_up(self, track: SessionTrack, before_seq: int, reason: str, now_s: float) -> None:
        self._lose(track, track.give_up_before(before_seq), reason, now_s)

    def _lose(self, track: SessionTrack, runs: list[tuple[int, int]], reason: str, now_s: float) -> None:
        """Count and report runs of records as lost, together with the position behind them."""
        if not runs:
            return
        for first, end in runs:
            self._batch.lost.append(LostRange(track.name, first, end, reason))
            self._count("lost", reason, end - first)
        self.commit(now_s)
        for first, end in runs:
            after_s = self._journal.time_before_s(track.number, first) or track.hello.start_time_s
            before_s = self._journal.time_from_s(track.number, end) or self._wall_s()
            _log.error(
                "lost records %d to %d of session %s, between %s and %s: %s",
                *(first, end - 1, track.name, _clock(after_s), _clock(before_s), reason),
            )

    def _end_silent_sessions(self, now_s: float) -> None:
        for track in list(self._tracks.values()):
            if track.has_ended(now_s, self._owner_pid):
                self._end(track, now_s, may_return=track.is_remote and not track.has_said_goodbye)

    def _end(self, track: SessionTrack, now_s: float, *, may_return: bool = False) -> None:
        """End a session. What one that may return still owes is not lost: its next hello reopens it."""
        if track.request is not None:
            self._subscriptions.append(Subscription(track.endpoint, track.request.topic, wanted=False))
        if not track.is_complete and not may_return:
            self._give_up(track, track.end_seq, "trainer_gone", now_s)
        self._batch.positions[track.number] = (track.next_seq, track.end_seq)
        self._batch.ended.append((self._wall_s(), track.exit_code, track.number))
        self._tracks.pop(track.name, None)
        self.commit(now_s)
        how = f"exit code {track.exit_code}" if track.has_said_goodbye else "without a goodbye"
        who = (track.hello.run_id, track.name, track.hello.pid)
        _log.info("trainer left: run %s, session %s, pid %d, %s", *who, how)

    def _reject(self, endpoint: str, error: FrameError) -> None:
        self._count("rejected", error.reason)
        if (endpoint, error.reason) not in self._complained:
            self._complained.add((endpoint, error.reason))
            _log.warning("rejected a frame from %s: %s (further ones are only counted)", endpoint, error)

    def _count(self, name: str, label: str, amount: int = 1) -> None:
        key = (name, label)
        self._batch.counts[key] = self._batch.counts.get(key, 0) + amount


def _clock(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
