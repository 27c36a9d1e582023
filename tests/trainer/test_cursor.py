"""The position in the data."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from trainer.cursor import Cursor


@given(order=st.permutations(range(12)), cut=st.integers(0, 12))
def test_cursor_remembers_exactly_what_was_taken(order: list[int], cut: int) -> None:
    """In whatever order batches are taken, what remains is what was not."""
    cursor = Cursor()
    for index in order[:cut]:
        cursor = cursor.take(index)

    assert list(islice(cursor.remaining(), 12 - cut)) == sorted(order[cut:])
    assert cursor.num_taken == cut


@given(order=st.permutations(range(12)), cut=st.integers(0, 12), num_ranks=st.integers(1, 4))
def test_processes_share_what_remains(order: list[int], cut: int, num_ranks: int) -> None:
    """Each remaining batch falls to exactly one process, and to the same one whatever was taken before."""
    cursor = Cursor()
    for index in order[:cut]:
        cursor = cursor.take(index)
    shares = [list(islice(cursor.remaining(rank, num_ranks), 12)) for rank in range(num_ranks)]

    assert sorted(index for share in shares for index in share if index < 12) == sorted(order[cut:])
    assert all(index % num_ranks == rank for rank, share in enumerate(shares) for index in share)
