"""Layered settings: who wins, and what a mistake looks like."""

from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from shared.settings import Layer, SettingsError, assignments_layer, environment_layer, resolve, settings_of, toml_layer


class Inner(msgspec.Struct, frozen=True):
    """A section."""

    steps: Annotated[int, Meta(ge=1, description="how many")] = 5
    name: Annotated[str, Meta(description="what")] = "a"
    ids: tuple[int, ...] = ()
    cap: float | None = None


class Outer(msgspec.Struct, frozen=True):
    """All settings."""

    train: Inner = Inner()


def test_first_layer_wins() -> None:
    """Command line over environment over file over default."""
    layers = [
        assignments_layer(["train.steps=7"]),
        environment_layer(Outer, {"DFLASH_TRAIN_STEPS": "8", "DFLASH_TRAIN_NAME": "env", "DFLASH_OTHER": "1"}),
        Layer("file", {"train": {"steps": 9, "name": "file", "cap": 2}}),
    ]

    assert resolve(Outer, layers) == Outer(train=Inner(steps=7, name="env", cap=2.0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.name=/tmp/x", Inner(name="/tmp/x")),
        ("train.name=123", Inner(name="123")),
        ('train.name="q"', Inner(name="q")),
        ("train.ids=[1, 2]", Inner(ids=(1, 2))),
        ("train.cap=1e3", Inner(cap=1000.0)),
        ("train.cap=null", Inner(cap=None)),
    ],
)
def test_text_is_read_as_the_setting_wants_it(text: str, expected: Inner) -> None:
    """A value is TOML where that fits the type, else a bare string."""
    assert resolve(Outer, [assignments_layer([text])]).train == expected


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.stesp=3", r"--set: unknown key 'train.stesp'; did you mean 'train.steps'\?"),
        ("train.steps=0", r"--set: train.steps='0': Expected `int` >= 1"),
        ("train.steps=many", r"--set: train.steps='many': Expected `int`, got `str`"),
        ("train.steps", r"--set 'train.steps': expected KEY=VALUE"),
    ],
)
def test_mistakes_name_layer_key_and_remedy(assignment: str, message: str) -> None:
    """One line says where the mistake is and what was expected."""
    with pytest.raises(SettingsError, match=message):
        resolve(Outer, [assignments_layer([assignment])])


def test_toml_errors_name_the_file_and_line(tmp_path: Path) -> None:
    """Bad syntax, an unknown table and a missing file are told apart, each with the path."""
    path = tmp_path / "x.toml"
    path.write_text("[train]\nsteps = = 3\n")

    with pytest.raises(SettingsError, match=r"x\.toml: not valid TOML: .*line 2"):
        toml_layer(path)
    with pytest.raises(SettingsError, match=r"nowhere\.toml: No such file"):
        toml_layer(tmp_path / "nowhere.toml")
    path.write_text("[trian]\nsteps = 3\n")
    with pytest.raises(SettingsError, match=r"x\.toml: unknown key 'trian.steps'; did you mean 'train.steps'"):
        resolve(Outer, [toml_layer(path)])


def test_every_setting_is_described() -> None:
    """The help table is made of these."""
    assert [(s.key, s.default, s.description) for s in settings_of(Outer)][:2] == [
        ("train.steps", 5, "how many"),
        ("train.name", "a", "what"),
    ]
