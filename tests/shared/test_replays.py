"""Replays are fair and bounded: whoever asks for everything delays others by a share, and is remembered for little."""

from shared.replays import MAX_ASKERS, MAX_PER_ASKER, Replays
from shared.ring import CHUNK_BYTES, Ring
from shared.wire import ReplayRequest


def full_ring(num_chunks: int = 10) -> Ring:
    """A ring of records each of which makes a chunk."""
    ring = Ring(max_bytes=2**30)
    for _ in range(num_chunks):
        ring.append(b"x" * CHUNK_BYTES)
    return ring


def request(nonce: str, first: int = 0, end: int = 2**52) -> ReplayRequest:
    """A request of session s1."""
    return ReplayRequest(session="s1", first=first, end=end, nonce=nonce)


def answered(replays: Replays, ring: Ring) -> list[tuple[str, int, bool]]:
    """All answers until nothing is open: nonce, first record, whether it was the last part."""
    answers = []
    while (answer := replays.next_chunk(ring)) is not None:
        topic, chunk = answer
        answers.append((topic.rsplit(b"/", 1)[1].decode(), chunk.first_seq, chunk.done))
    return answers


def test_askers_take_turns() -> None:
    """An asker with one small request waits for one chunk of each other asker, not for all that they want."""
    replays = Replays()
    for number in range(MAX_PER_ASKER):
        replays.add("greedy", request(f"g{number}"))
    replays.add("honest", request("h", 3, 5))

    answers = answered(replays, full_ring())

    assert [answer for answer in answers if answer[0] == "h"] == [("h", 3, False), ("h", 4, True)]
    assert [index for index, (nonce, *_) in enumerate(answers) if nonce == "h"] == [1, 3]
    assert {nonce for nonce, _, done in answers if done} == {"h", *(f"g{n}" for n in range(MAX_PER_ASKER))}


def test_what_one_asker_and_all_together_have_open_is_bounded() -> None:
    """Thousands of requests of one asker, or of many, are forgotten, not remembered."""
    replays = Replays()
    for number in range(5_000):
        replays.add("greedy", request(f"n{number}"))
    assert len(replays) == MAX_PER_ASKER
    for number in range(5_000):
        replays.add(f"asker{number}", request("n"))

    assert len(replays) == MAX_PER_ASKER + MAX_ASKERS - 1


def test_a_request_is_answered_once_however_often_it_is_made() -> None:
    """The same topic again changes nothing."""
    replays = Replays()
    replays.add("a", request("n", 0, 2))
    replays.add("a", request("n", 0, 2))

    assert answered(replays, full_ring()) == [("n", 0, False), ("n", 1, True)]


def test_only_who_asked_or_left_cancels() -> None:
    """An unsubscription of somebody else changes nothing; the end of a connection, which has no name, does."""
    replays = Replays()
    replays.add("a", request("n"))
    replays.cancel("b", request("n").topic)
    assert len(replays) == 1

    replays.cancel(None, request("n").topic)

    assert answered(replays, full_ring()) == []
    assert len(replays) == 0
