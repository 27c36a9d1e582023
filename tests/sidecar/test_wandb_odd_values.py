"""Numbers and texts that few expect go through the real SDK and leave the rows around them as they are."""

import math

from fake_wandb import FakeWandb
from wandb_uplink import Uplink

from sidecar.sinks.wandb_run import Cursor, Row


def test_odd_values_arrive_in_their_rows(uplink: Uplink, server: FakeWandb) -> None:
    """NaN, infinities, times before others, whole numbers over 64 bits and odd keys cost no row and no order."""
    rows: list[Row] = [
        {"train/step": 1, "train/loss": math.nan, "_timestamp": 1e9},
        {"train/step": 2, "train/loss": math.inf, "train/grad_norm": -math.inf, "_timestamp": 1e9 - 10_800.0},
        {"eval/x": 2**64 - 1, "eval/\n": "a\x00\u2028", "eval/": None, "eval/b": True, "_timestamp": 0.0},
        {"train/step": 2**53 - 1, "train/loss": 1e308, "_timestamp": 1e9},
    ]
    uplink.spool.append("run", "run-session", Cursor(len(rows) - 1), rows)
    uplink.end(0)
    uplink.drive_to_idle()

    run = server.run("run")
    history = run.history
    assert [row["_step"] for row in history] == [0, 1, 2, 3]
    assert math.isnan(history[0]["train/loss"])
    assert [history[1][key] for key in ("train/loss", "train/grad_norm")] == [math.inf, -math.inf]
    assert [history[2][key] for key in ("eval/x", "eval/\n", "eval/b")] == [2.0**64, "a\x00\u2028", True]
    assert [history[3][key] for key in ("train/step", "train/loss")] == [2**53 - 1, 1e308]
    assert (run.exit_code, run.conflicts) == (0, [])
