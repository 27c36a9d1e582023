"""The way out to Weights & Biases: spool, row feeds and the supervisor of the uploading child, or none of it."""

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from sidecar.config import WandbConfig
from sidecar.database import DatabaseError
from sidecar.journal import Journal, StoredSession
from sidecar.row_feed import RowFeed
from sidecar.sinks.wandb_rows import Evaluate
from sidecar.sinks.wandb_spool import Spool
from sidecar.status import SinkStatus

SPOOL_NAME = "spool.sqlite"
