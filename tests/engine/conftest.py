"""Tiny models for the tests of the engine, made once per module."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.engine import truth
from tests.models_for_tests import build


@pytest.fixture(autouse=True)
def _engines_end():
    """What a test loads ends with it: its threads would keep pool and host tier for the rest of the run."""
    truth.loaded.clear()
    yield
    for llm in truth.loaded:
        llm.close()
    truth.loaded.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    @cache
    def of(arch: str) -> Path:
        return build(arch, tmp_path_factory.mktemp(arch))

    return of
