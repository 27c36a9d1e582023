"""Where an upload goes on, for every way in which spool and server may differ."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.sinks.wandb_lookup import ServerRun
from sidecar.sinks.wandb_position import Position, position
from sidecar.sinks.wandb_protocol import GiveUp
from sidecar.sinks.wandb_run import Cursor, Row, owner_name
from sidecar.sinks.wandb_spool import Spool

OURS = "ours"


def rows_of(session: str, seqs: Iterable[int]) -> list[Row]:
    """One row for each of these records."""
    return [{"_record": f"{session}:{seq}", "x": seq} for seq in seqs]


def spool_with(path: Path, *sessions: tuple[str, list[int]], ended: bool = True) -> Spool:
    """A spool with the rows of these sessions of one run."""
    spool = Spool(path / "spool.db")
    for session, seqs in sessions:
        spool.append("run", session, Cursor(max(seqs, default=-1)), rows_of(session, seqs))
        if ended:
            spool.finish("run", session, 0)
    return spool


def server_with(num_lines: int, last_record: str, owner: str = "") -> ServerRun:
    """A server whose rows are dense."""
    return ServerRun(num_lines=num_lines, last_step=num_lines - 1, last_record=last_record, owner=owner)


SEQS = st.lists(st.booleans(), min_size=1, max_size=40).map(lambda flags: [i for i, flag in enumerate(flags) if flag])


@given(before=SEQS.filter(bool), now=SEQS, num_sent=st.integers(1, 40))
def test_rows_after_the_last_record_follow(before: list[int], now: list[int], num_sent: int) -> None:
    """Whatever rows other definitions gave: those of later records follow with the next steps, and no others."""
    sent = before[:num_sent]
    with TemporaryDirectory() as directory:
        spool = spool_with(Path(directory), ("s", now))
        place = position(spool, "run", server_with(len(sent), f"s:{sent[-1]}"), len(sent), OURS)

    assert now[place.next_row :] == [seq for seq in now if seq > sent[-1]]
    assert place.base_step + place.next_row == len(sent)


@given(num_sent=st.integers(1, 40), num_stale=st.integers(0, 39))
def test_stale_last_row_does_not_matter(num_sent: int, num_stale: int) -> None:
    """With the same definitions the place is exact also when the server shows an older last row than it has."""
    shown = max(num_sent - 1 - num_stale, 0)
    server = ServerRun(num_lines=num_sent, last_step=shown, last_record=f"s:{shown}")
    with TemporaryDirectory() as directory:
        spool = spool_with(Path(directory), ("s", list(range(40))))
        place = position(spool, "run", server, num_sent, OURS)

    assert place == Position(0, num_sent)


def test_sessions_follow_each_other(tmp_path: Path) -> None:
    """The last row may be of any session of the run; a session that gave no row before its record counts too."""
    spool = spool_with(tmp_path, ("a", [1, 2]), ("b", [7, 8]), ("c", [3]))
    places = [
        position(spool, "run", server_with(5, record), 5, OURS).next_row for record in ("a:2", "b:7", "b:5", "c:9")
    ]

    assert places == [2, 3, 2, 5]


def test_rows_of_unknown_sessions_stay_before_ours(tmp_path: Path) -> None:
    """Rows that say nothing, or that come from a session this spool never had, are followed by all of ours."""
    spool = spool_with(tmp_path, ("a", [0, 1]))

    assert position(spool, "run", server_with(5, "elsewhere:9"), 5, OURS) == Position(5, 0)
    assert position(spool, "run", server_with(5, ""), 5, OURS) == Position(5, 0)


def test_place_waits_for_a_spool_that_is_being_made_anew(tmp_path: Path) -> None:
    """While the record that the server has last may still become a row, nothing is sent."""
    spool = spool_with(tmp_path, ("a", [0, 1]), ended=False)
    with pytest.raises(GiveUp, match="being made anew"):
        position(spool, "run", server_with(5, "a:4"), 5, OURS)
    spool.append("run", "a", Cursor(5), rows_of("a", [2, 3, 4, 5]))

    assert position(spool, "run", server_with(5, "a:4"), 5, OURS) == Position(0, 5)


def test_usual_place_is_what_the_server_expects(tmp_path: Path) -> None:
    """Our own run, as we left it or further: the step that the server expects says it, behind rows of others too."""
    spool = spool_with(tmp_path, ("a", list(range(10))))
    spool.set_base_step("run", 30)
    spool.set_confirmed("run", 4, 34)

    assert position(spool, "run", server_with(36, "", OURS), 36, OURS) == Position(30, 6)


def test_new_run_begins_with_the_first_row(tmp_path: Path) -> None:
    """A run that the server does not know, or knows no more, gets every row from step 0 on."""
    spool = spool_with(tmp_path, ("a", list(range(10))))
    fresh = position(spool, "run", None, 0, OURS)
    spool.set_base_step("run", 30)
    spool.set_confirmed("run", 4, 34)

    assert [fresh, position(spool, "run", None, 0, OURS)] == [Position(0, 0), Position(0, 0)]


def test_name_of_a_spool_belongs_to_its_place(tmp_path: Path) -> None:
    """The name stays when the spool is replaced, and another directory has another one, a copied one included."""
    (tmp_path / "a").mkdir()
    name = owner_name(tmp_path / "a" / "spool.db")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "spool.id").write_bytes((tmp_path / "a" / "spool.id").read_bytes())
    names = [owner_name(tmp_path / place / "spool.db") for place in ("a", "b")]

    assert names[0] == name
    assert names[1] != name
