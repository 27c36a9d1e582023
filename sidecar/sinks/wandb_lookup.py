"""Asks W&B what it has of a run, in between and beside the upload itself.

The upload tells us nothing: `run.log` returns before anything is sent, and wandb gives up for good behind our back. One
small query says how many rows have arrived, which was the last one, and whose spool they came from. It is the query
with which wandb itself resumes a run, and it goes through wandb's own connection: same key, same proxy.
"""

import json

import msgspec
import wandb
from wandb.apis.public.service_api import ServiceApi
from wandb.sdk import wandb_setup
from wandb.sdk.lib.service.service_connection import WandbApiFailedError
from wandb.sdk.mailbox.mailbox import MailboxClosedError

from sidecar.sinks.wandb_run import RECORD_KEY

CLAIM_KEY = "sidecar.spool"
"""Key in the configuration of a W&B run that names the spool which writes it."""
_QUERY = """
query RunResumeStatus($project: String, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) {
    bucket(name: $name, missingOk: true) { name state historyLineCount historyTail config }
  }
}
"""


class LookupFailedError(Exception):
    """No answer, or none that can be used. `refused`: the server said no, and waiting alone will not change that."""

    def __init__(self, text: str, *, refused: bool) -> None:
        super().__init__(text)
        self.refused = refused


class ServerRun(msgspec.Struct, frozen=True, kw_only=True):
    """What W&B has of a run. The last row may be an older one: the server answers it from a cache."""

    num_lines: int
    last_step: int | None = None
    last_record: str = ""
    owner: str = ""
    state: str = ""


class Lookup:
    """Looks up one run. Uses the wandb-core process that the upload uses.

    Args:
        project: where the run is.
        entity: empty for the account's own.
        timeout_s: for one answer.
    """

    def __init__(self, project: str, entity: str, timeout_s: float) -> None:
        self._variables = {"project": project, "entity": entity or None}
        self._timeout_s = timeout_s
        self._base_url = wandb_setup.singleton().settings.base_url
        self._api = ServiceApi(wandb_setup.singleton().settings, timeout=timeout_s)

    def find(self, run_id: str) -> ServerRun | None:
        """The run, None when W&B has none of this name; raises LookupFailedError."""
        try:
            return self._api.execute_graphql(_QUERY, self._variables | {"name": run_id}, parse=_server_run)
        except WandbApiFailedError as error:
            if error.response is None:
                text = f"{self._base_url} gave no usable answer within {self._timeout_s:g} s"
                raise LookupFailedError(text, refused=False) from error
            text = f"{self._base_url}: {' '.join(str(error).split())}"
            raise LookupFailedError(text, refused=error.response.http_status > 0) from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise LookupFailedError(f"{self._base_url} answered something else: {error}", refused=False) from error
        except (MailboxClosedError, ConnectionError, TimeoutError, wandb.Error) as error:
            raise LookupFailedError(f"wandb-core is gone: {error}", refused=False) from error


class _Bucket(msgspec.Struct):
    historyLineCount: int | None = None  # noqa: N815 - the server's name
    historyTail: str | None = None  # noqa: N815 - the server's name
    config: str | None = None
    state: str | None = None


class _Model(msgspec.Struct):
    bucket: _Bucket | None = None


class _Data(msgspec.Struct):
    model: _Model | None


def _server_run(text: str) -> ServerRun | None:
    model = msgspec.json.decode(text, type=_Data).model
    if model is None or (bucket := model.bucket) is None:
        return None
    lines = msgspec.json.decode(bucket.historyTail or "[]", type=list[str] | None) or []
    last = json.loads(lines[-1]) if lines else {}
    config = msgspec.json.decode(bucket.config or "{}", type=dict[str, object] | None) or {}
    claim = config.get(CLAIM_KEY)
    step, record = last.get("_step"), last.get(RECORD_KEY)
    return ServerRun(
        num_lines=bucket.historyLineCount or 0,
        last_step=step if isinstance(step, int) else None,
        last_record=record if isinstance(record, str) else "",
        owner=str(claim.get("value", "")) if isinstance(claim, dict) else "",
        state=bucket.state or "",
    )
