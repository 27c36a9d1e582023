"""Gap bookkeeping: what is missing, when it is asked for, and what is given up."""

from hypothesis import given
from hypothesis import strategies as st
from trainer_frames import hello

from sidecar.sessions import ANSWER_TIMEOUT_S, MAX_PAUSE_S, MIN_PAUSE_S, WINDOW_RECORDS, SessionTrack
from sidecar.stored import StoredSession


def track(next_seq: int = 0, held: tuple[int, ...] = ()) -> SessionTrack:
    """A track of a session whose records below `next_seq` are stored."""
    stored = StoredSession(
        number=1,
        hello=hello(),
        endpoint="e",
        labels=(),
        next_seq=next_seq,
        end_seq=next_seq,
        ended_s=None,
        exit_code=None,
        consumed=False,
    )
    return SessionTrack(stored, held, now_s=0.0)


def test_gap_is_the_first_missing_run() -> None:
    """Islands above the watermark bound the gap, and filling it advances over them."""
    session = track(next_seq=3, held=(5, 6, 9))

    assert session.gap == (3, 5)
    assert [session.accept(seq) for seq in (3, 4, 4, 2)] == [True, True, False, False]
    assert (session.next_seq, session.gap, session.end_seq) == (7, (7, 9), 10)


def test_tail_loss_is_seen_through_the_hello() -> None:
    """A hello that knows more records than arrived opens a gap at the end."""
    session = track()
    session.accept(0)
    assert session.gap is None

    session.expect(3)

    assert session.gap == (1, 3)


def test_requests_come_one_at_a_time_in_windows() -> None:
    """A large gap is asked for window by window, the next as soon as one is filled."""
    session = track()
    session.expect(WINDOW_RECORDS + 10)
    request = session.ask("n0", 1.0)
    assert request is not None
    assert (request.first, request.end) == (0, WINDOW_RECORDS)
    assert session.ask("n1", 1.0) is None

    for seq in range(WINDOW_RECORDS):
        session.accept(seq)
    left_a_hole = session.close_request(1.5)
    following = session.ask("n1", 1.5)

    assert not left_a_hole
    assert following is not None
    assert (following.first, following.end) == (WINDOW_RECORDS, WINDOW_RECORDS + 10)


def test_unanswered_requests_are_repeated_with_growing_pauses() -> None:
    """Without an answer the pause doubles up to its limit; any progress sets it back."""
    session = track()
    session.expect(10)
    now_s, pauses = 0.0, []
    for _ in range(9):
        assert session.ask("n", now_s) is not None
        assert not session.is_overdue(now_s + ANSWER_TIMEOUT_S / 2)
        now_s += ANSWER_TIMEOUT_S
        assert session.is_overdue(now_s)
        assert session.close_request(now_s)
        asked_s = now_s
        while session.ask("n", now_s) is None:
            now_s += MIN_PAUSE_S / 2
        pauses.append(now_s - asked_s)
        session.close_request(now_s)
        now_s += 2 * MAX_PAUSE_S

    assert pauses[:1] == [MIN_PAUSE_S]
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_S


def test_giving_up_returns_exactly_the_missing_runs() -> None:
    """Records that are here are not lost, however scattered."""
    session = track(next_seq=2, held=(4, 5, 8))

    assert session.give_up_before(8) == [(2, 4), (6, 8)]
    assert (session.next_seq, session.is_complete) == (9, True)


@given(arrivals=st.lists(st.integers(0, 40), max_size=80), oldest=st.integers(0, 45))
def test_every_record_is_accepted_once_or_lost_once(arrivals: list[int], oldest: int) -> None:
    """Whatever the order and the repetitions, accepted and given-up records partition what lies below the watermark."""
    session = track()
    accepted = [seq for seq in arrivals if session.accept(seq)]
    lost = [seq for first, end in session.give_up_before(oldest) for seq in range(first, end)]

    assert sorted(accepted) == sorted(set(arrivals))
    assert sorted([*lost, *(seq for seq in accepted if seq < session.next_seq)]) == list(range(session.next_seq))
