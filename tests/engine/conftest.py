"""Tiny models for the tests of the engine, made once per module."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.models_for_tests import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    @cache
    def of(arch: str) -> Path:
        return build(arch, tmp_path_factory.mktemp(arch))

    return of
