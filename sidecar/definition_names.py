"""What can be wrong with the keys of a definition, its metric name and its W&B key."""

import re
from collections.abc import Collection, Iterator, Mapping

from sidecar.definition_checks import nearest
from sidecar.definition_labels import PossibleLabels
from sidecar.definition_source import Complaint

METRIC_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
PLACEHOLDER = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_]*)\}")
PREFIX = "dflash_"
MAX_NAME_LENGTH = 128
MAX_HELP_LENGTH = 1_000
REQUIRED_KEYS = ("name", "help", "type", "expr")
CHOICES = {"type": ("gauge", "counter"), "at": ("tick", "step")}
KEYS = (*REQUIRED_KEYS, "at", "wandb")

_OF_GAUGES_NEVER = ("_total", "_bucket", "_sum", "_count", "_created", "_info")
_TYPE_WORDS = frozenset({"gauge", "counter", "histogram", "summary"})
_BASE_UNITS = {
    "seconds": "ms us ns sec secs msec usec milliseconds microseconds nanoseconds minutes hours days weeks",
    "bytes": "kb mb gb tb kib mib gib tib kilobytes megabytes gigabytes kibibytes mebibytes gibibytes bits",
    "ratio": "percent percentage pct",
    "joules": "mj kj kwh wh millijoules kilojoules",
    "watts": "mw kw milliwatts kilowatts",
    "hertz": "hz khz mhz ghz kilohertz megahertz gigahertz",
    "celsius": "fahrenheit kelvin",
}
BASE_UNIT_OF = {unit: base for base, units in _BASE_UNITS.items() for unit in units.split()}

TAKEN_KEYS = (
    "train/step",
    "train/loss",
    "train/accept_length_simulated",
    "train/learning_rate",
    "train/grad_norm",
    "train/tokens_real",
    "train/tokens_padding",
    "train/queue_wait_s",
    "train/accuracy/{position}",
    "eval/{detail}",
    "time/elapsed_s",
)
"""W&B keys that rows have without any definition."""
_WANDB_KEY = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9_.]*(/[-a-zA-Z0-9_.]+)*")


def check_keys(table: Mapping[str, object]) -> Iterator[Complaint]:
    """Check which keys a definition has and the type of their values."""
    for key, value in table.items():
        if key not in KEYS:
            remedy = nearest(key, KEYS) or f"; the keys are {', '.join(KEYS)}"
            yield Complaint(f"unknown key {key!r}{remedy}", key)
        elif not isinstance(value, str) or not value.strip():
            yield Complaint(f"{key} must be a string that is not empty", key)
        elif key in CHOICES and value not in CHOICES[key]:
            yield Complaint(f"{key} is {value!r}; it must be {' or '.join(CHOICES[key])}", key)
        elif key == "help" and len(value) > MAX_HELP_LENGTH:
            yield Complaint(f"help has {len(value)} characters, more than {MAX_HELP_LENGTH}; shorten it", key)
    for key in REQUIRED_KEYS:
        if key not in table:
            yield Complaint(f"{key} is missing; add it")


def check_name(name: str, kind: str, taken: Collection[str]) -> Iterator[Complaint]:
    """Check the name of a metric against the rules of Prometheus; `taken` are the names not to propose."""
    if not METRIC_NAME.fullmatch(name):
        yield Complaint(f"the name {name!r} is not a metric name: letters, digits and _, no digit first", "name")
        return
    if len(name) > MAX_NAME_LENGTH:
        yield Complaint(f"the name has {len(name)} characters, more than {MAX_NAME_LENGTH}; shorten it", "name")
        return
    faults = list(_name_faults(name, kind))
    if faults:
        better = _better_name(name, kind)
        remedy = f"call it {better}" if better and better not in taken else "choose another"
        yield Complaint(f"{', and '.join(faults)}; {remedy}", "name")


def _name_faults(name: str, kind: str) -> Iterator[str]:
    if not name.startswith(PREFIX):
        yield f"the name must begin with {PREFIX}"
    if name != name.lower():
        yield "the name must be in snake_case, without capitals"
    if kind == "counter" and not name.endswith("_total"):
        yield "the name of a counter ends in _total"
    if kind == "gauge" and name.endswith(_OF_GAUGES_NEVER):
        yield f"the name of a gauge must not end in {', '.join(_OF_GAUGES_NEVER)}"
    words = name.lower().split("_")
    for word in words:
        if base := BASE_UNIT_OF.get(word):
            yield f"the unit {word} is no base unit, write {base} and scale the expression"
    if words[-1] in _TYPE_WORDS:
        yield f"the name must not end in its type {words[-1]}"


def _better_name(name: str, kind: str) -> str:
    """The name with its mistakes corrected; empty when that is not a matter of letters."""
    words = [word for word in name.lower().removeprefix(PREFIX).split("_") if word]
    if any(word in BASE_UNIT_OF for word in words):
        return ""
    while words and (words[-1] in _TYPE_WORDS or f"_{words[-1]}" in _OF_GAUGES_NEVER):
        words.pop()
    if kind == "counter":
        words.append("total")
    better = PREFIX + "_".join(words)
    return better if words and METRIC_NAME.fullmatch(better) and len(better) <= MAX_NAME_LENGTH else ""


def check_wandb_key(template: str, possible: PossibleLabels) -> Iterator[Complaint]:
    """Check the template of a W&B key against W&B and against the labels that the expression can give."""
    if not _WANDB_KEY.fullmatch(PLACEHOLDER.sub("x", template)):
        yield Complaint(
            f"wandb is {template!r}; write a key like group/name or group/{{label}} of letters, digits, _ . - and /",
            "wandb",
        )
        return
    for key in TAKEN_KEYS:
        if keys_may_meet(template, key):
            yield Complaint(f"wandb is {template!r}, but rows have the key {key} already; choose another", "wandb")
            break
    for label in PLACEHOLDER.findall(template):
        if possible is not None and label not in possible:
            kept = ", ".join(sorted(possible)) or "none"
            yield Complaint(
                f"wandb has {{{label}}}, but the labels the expression keeps are: {kept}", "wandb", f"{{{label}}}"
            )


def keys_clash(one: str, other: str) -> bool:
    """Whether two templates can give the same key, or one the folder of the other's.

    A fixed key beside a filled-in one of the same depth is left to the evaluation, which knows the values.
    """
    ours, theirs = one.split("/"), other.split("/")
    if not keys_may_meet(one, other):
        return False
    return len(ours) != len(theirs) or all(
        a == b or (PLACEHOLDER.search(a) and PLACEHOLDER.search(b)) for a, b in zip(ours, theirs, strict=True)
    )


def keys_may_meet(one: str, other: str) -> bool:
    """Whether no fixed part tells two templates apart, as far as both go; what is filled in can be anything."""
    return all(_can_be_equal(a, b) for a, b in zip(one.split("/"), other.split("/"), strict=False))


def _can_be_equal(one: str, other: str) -> bool:
    if "{" not in one and "{" not in other:
        return one == other
    ours, theirs = PLACEHOLDER.split(one), PLACEHOLDER.split(other)
    begins_alike = ours[0].startswith(theirs[0]) or theirs[0].startswith(ours[0])
    return begins_alike and (ours[-1].endswith(theirs[-1]) or theirs[-1].endswith(ours[-1]))
