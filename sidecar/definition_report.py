"""What `check` says of a file, for people and for editors."""

import json
from pathlib import Path

from sidecar.definition_source import DefinitionsError
from sidecar.definitions import DefinitionSet


def good_line(accepted: DefinitionSet) -> str:
    """One line about a file that is accepted."""
    num_wandb = sum(definition.wandb is not None for definition in accepted.definitions)
    metrics = f"{len(accepted.definitions)} metrics, {num_wandb} of them for W&B"
    return f"{accepted.file}: {metrics}, digest {accepted.digest}: good"


def report(file: Path, outcome: DefinitionSet | DefinitionsError) -> str:
    """The outcome as JSON; lines and columns count from 1, and are 0 where there is none to name."""
    problems = outcome.problems if isinstance(outcome, DefinitionsError) else ()
    definitions = outcome.definitions if isinstance(outcome, DefinitionSet) else ()
    document = {
        "file": str(file),
        "good": isinstance(outcome, DefinitionSet),
        "digest": outcome.digest if isinstance(outcome, DefinitionSet) else "",
        "metrics": [definition.name for definition in definitions],
        "problems": [{"line": p.line, "column": p.column, "metric": p.metric, "message": p.message} for p in problems],
    }
    return json.dumps(document)
