"""Libraries that train models: what they need, and what of their warnings is let through.

`make test-clients` runs these tests twice: on the host, and, with L2L_TEST_DEVICE=sim in the environment, on the
simulated accelerator, which stays for the life of a process.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path

import pytest

from hf_l2l.hf import preparation

FOLDER = Path(__file__).parent
LIBRARIES = ("trl", "peft", "sentence_transformers", "setfit", "lightning_fabric")

with warnings.catch_warnings():  # of what they import in turn
    warnings.simplefilter("ignore")
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is not None:  # else the tests that need it are skipped
            importlib.import_module(name)


@pytest.fixture(autouse=True)
def _weights_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: where layers run on the CPU, nobody is warned of accumulation."""
    monkeypatch.setattr(preparation, "weights_travel", lambda config: config.resident != "all")


LET_THROUGH = [
    # TRL turns it on by itself, under the name that transformers 5.23 has replaced, as peft does.
    r"ignore:`(is_)?gradient_checkpointing\w*` is deprecated:FutureWarning",
    # And so what L2L says of it is not about these tests.
    "ignore:activation checkpointing is part of L2L:UserWarning",
    # SetFit has no option for what transformers does by default, without an accelerator, too.
    "ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning",
]
"""What the libraries say about each other, and the reason why it is no matter of these tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `LET_THROUGH` pass in the tests of this folder; of several filters the last that fits decides."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            for text in LET_THROUGH:
                item.add_marker(pytest.mark.filterwarnings(text), append=False)
