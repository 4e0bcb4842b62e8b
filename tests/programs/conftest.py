"""The commands run in this process, which they make quiet."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from transformers.utils import logging as of_transformers


@pytest.fixture(autouse=True)
def _as_loud_afterwards() -> Iterator[None]:
    logger = logging.getLogger("hf_l2l")
    level, verbosity = logger.level, of_transformers.get_verbosity()
    yield
    logger.setLevel(level)
    of_transformers.set_verbosity(verbosity)
    of_transformers.enable_progress_bar()
