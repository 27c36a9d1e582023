"""The position in the data."""

from hypothesis import given
from hypothesis import strategies as st

from trainer.cursor import Cursor


@given(order=st.permutations(range(12)), cut=st.integers(0, 12))
def test_cursor_remembers_exactly_what_was_taken(order: list[int], cut: int) -> None:
    """In whatever order batches are taken, what remains is what was not."""
    cursor = Cursor()
    for index in order[:cut]:
        cursor = cursor.take(index)

    assert list(cursor.remaining(12)) == sorted(order[cut:])
    assert cursor.num_taken == cut
