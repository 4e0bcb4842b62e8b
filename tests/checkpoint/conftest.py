"""A training that nothing happens to."""

from __future__ import annotations

from typing import Any

import pytest

from saving import trained


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """It has made four steps, and saved each of them before the next one: all are in its folder."""
    return trained(tmp_path_factory.mktemp("whole"), eps_update="deferred")
