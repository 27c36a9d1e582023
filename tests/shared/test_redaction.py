"""Which settings are kept and shown, and which are not."""

import pytest

from shared.redaction import without_secrets
from trainer.config import TrainerConfig

SECRET = [
    "api_key",
    "wandb.api_key",
    "apiKey",
    "token",
    "hf_token",
    "hfToken",
    "HF_TOKEN",
    "hub-token",
    "password",
    "db.passwd",
    "client_secret",
    "AWS_SECRET_ACCESS_KEY",
    "ssh_private_key",
    "http.auth",
    "x.credentials",
    "secret.value",
    "bearer",
    "proxy.Authorization",
    "key_passphrase",
]


@pytest.mark.parametrize("key", SECRET)
def test_secret_by_its_name_is_dropped(key: str) -> None:
    """Whatever a name gives away as secret is left out, key and value."""
    assert without_secrets({key: "x", "train.steps": 4}) == {"train.steps": 4}


def test_every_setting_of_the_trainer_is_kept() -> None:
    """Nothing of the trainer's own is taken for a secret: token counts, ids and directories of keys are none."""
    config = TrainerConfig().flat()

    assert without_secrets(config) == config
    assert "telemetry.keys" in config
    assert "drafter.mask_token_id" in config


def test_user_and_password_in_an_address_are_hidden() -> None:
    """An address keeps its host and path."""
    config = {"data.path": "https://user:pw@host/x@y", "git": "see ssh://git@host and http://h:1/p", "n": 3}

    assert without_secrets(config) == {
        "data.path": "https://***@host/x@y",
        "git": "see ssh://***@host and http://h:1/p",
        "n": 3,
    }
