"""Settings from several layers: command line over environment over file over preset over default.

A program describes its settings as nested msgspec Structs whose leaves are `Annotated[type, Meta(description=...)]`;
a key is the dotted path of a leaf (`train.steps`). Every layer is checked as it is merged, so that an error names the
layer, the key and the remedy, and nothing is read from the environment anywhere else.
"""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

C = TypeVar("C", bound=msgspec.Struct)


class SettingsError(ValueError):
    """A setting that is unknown, of the wrong type or out of range; the message is meant for the user."""


class Setting(msgspec.Struct, frozen=True):
    """One leaf of a settings type: its dotted key, declared type, default and description."""

    key: str
    type: Any
    default: Any
    description: str


class Layer(msgspec.Struct, frozen=True):
    """Values from one place. `values` is nested tables, or dotted keys to text when `as_text`."""

    name: str
    values: Mapping[str, Any]
    as_text: bool = False


def settings_of(config_type: type[msgspec.Struct], prefix: str = "") -> Iterator[Setting]:
    """Yield every leaf of a settings type in declaration order."""
    hints = get_type_hints(config_type, include_extras=True)
    for field in msgspec.structs.fields(config_type):
        declared = hints[field.name]
        bare = (
            get_args(declared)[0]
            if get_origin(declared) is not None and hasattr(declared, "__metadata__")
            else declared
        )
        key = prefix + field.name
        if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
            yield from settings_of(bare, key + ".")
            continue
        metas = [m for m in getattr(declared, "__metadata__", ()) if isinstance(m, msgspec.Meta)]
        description = next((m.description for m in metas if m.description), "")
        default = field.default if field.default is not msgspec.NODEFAULT else None
        yield Setting(key, declared, default, description)


def resolve(config_type: type[C], layers: Sequence[Layer]) -> C:
    """Merge layers, the first one winning, and convert the result; raises SettingsError."""
    known = {setting.key: setting for setting in settings_of(config_type)}
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        values = layer.values if layer.as_text else dict(_flatten(layer.values, known))
        for key, value in values.items():
            if key not in known:
                raise SettingsError(f"{layer.name}: unknown key {key!r}{nearest(key, known)}")
            merged[key] = _convert(layer, known[key], value)
    try:
        return msgspec.convert(_nest(merged), config_type)
    except msgspec.ValidationError as error:
        raise SettingsError(str(error)) from error


def toml_layer(path: Path, name: str | None = None) -> Layer:
    """Read a TOML file as a layer; raises SettingsError naming the file and, for bad syntax, the line."""
    try:
        return Layer(name or str(path), tomllib.loads(path.read_text()))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error


def assignments_layer(assignments: Sequence[str], name: str = "--set") -> Layer:
    """Read `key=value` arguments as a layer; raises SettingsError for one without '='."""
    values = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise SettingsError(f"{name} {assignment!r}: expected KEY=VALUE, for example train.steps=200")
        values[key.strip()] = text
    return Layer(name, values, as_text=True)


def environment_layer(config_type: type[msgspec.Struct], environ: Mapping[str, str], prefix: str = "DFLASH_") -> Layer:
    """Read DFLASH_SECTION_KEY variables of known settings as a layer; other variables are not ours."""
    names = {prefix + s.key.replace(".", "_").upper(): s.key for s in settings_of(config_type)}
    return Layer("environment", {key: environ[name] for name, key in names.items() if name in environ}, as_text=True)


def nearest(word: str, candidates: Sequence[str] | Mapping[str, Any]) -> str:
    """A `; did you mean ...?` for the end of an error message, or nothing."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _flatten(table: Mapping[str, Any], known: Mapping[str, Setting], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, Mapping) and key not in known:
            yield from _flatten(value, known, key + ".")
        else:
            yield key, value


def _convert(layer: Layer, setting: Setting, value: Any) -> Any:  # noqa: ANN401 - a leaf of any type
    try:
        if not layer.as_text:
            return msgspec.convert(value, setting.type)
        return _convert_text(value, setting)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{layer.name}: {setting.key}={value!r}: {error}{_choices(setting)}") from error


def _choices(setting: Setting) -> str:
    """For a setting that takes one of a few words: which they are."""
    declared = get_args(setting.type)[0] if hasattr(setting.type, "__metadata__") else setting.type
    return f"; it must be {' or '.join(map(str, get_args(declared)))}" if get_origin(declared) is Literal else ""


def _convert_text(text: str, setting: Setting) -> Any:  # noqa: ANN401 - a leaf of any type
    """Read text as a TOML value if that fits the type, else as a bare string (`path=/x`, `name=123`)."""
    try:
        return msgspec.convert(tomllib.loads(f"x = {text}")["x"], setting.type)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError):
        return msgspec.convert(text, setting.type, strict=False)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, leaf = key.split(".")
        table = nested
        for name in tables:
            table = table.setdefault(name, {})
        table[leaf] = value
    return nested
