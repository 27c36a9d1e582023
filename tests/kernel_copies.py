"""Copies of the module of Triton kernels: Triton decides when a kernel is defined whether it interprets it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import trainer


def copy_of_kernels(monkeypatch: pytest.MonkeyPatch, *, interpreted: bool) -> ModuleType:
    """A copy of `trainer.kernels` that is interpreted, or one that is compiled, whatever the machine has."""
    if interpreted:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    spec = importlib.util.spec_from_file_location("copied_kernels", Path(trainer.__file__).parent / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
