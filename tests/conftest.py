"""Shared fixtures: a seed for every test, and the versions in the report."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The tests never look for a Hub.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from devices import DEVICE, runs_here  # first: the simulated accelerator is enabled before any backward
from tiers import chosen

pytest.register_assert_rewrite("clients", "folded", "glue_script", "models", "plain", "runs", "training")

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState

from hf_l2l.runtime.observer import OBSERVERS

TESTS = Path(__file__).parent


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, transformers {transformers.__version__}, device {DEVICE}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What does not run on this device is not collected."""
    folder, _, below = str(collection_path.relative_to(TESTS)).partition(os.sep)
    if below or folder in (".", "helpers"):
        return None
    return None if runs_here(folder, config.args) else True


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> Iterator[Any]:
    """What does not run is not collected."""
    found = yield
    marks = [mark.name for mark in getattr(obj, "pytestmark", ())] if callable(obj) else ()
    return chosen(found, marks, collector.path.parent.name) if isinstance(found, list) else found


@pytest.fixture(scope="session")
def device() -> str:
    """Where layers run: "cpu", "sim" or "cuda"."""
    return DEVICE


@pytest.fixture(autouse=True, scope="session")
def _exact() -> Iterator[None]:
    """CUDA's kernels sum in a fixed order, and compute in full precision."""
    if DEVICE != "cuda":
        yield
        return
    kinds: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]
    before = [kind.fp32_precision for kind in kinds]
    torch.use_deterministic_algorithms(True)
    for kind in kinds:
        kind.fp32_precision = "ieee"
    yield
    torch.use_deterministic_algorithms(False)
    for kind, precision in zip(kinds, before, strict=True):
        kind.fp32_precision = precision


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_other_modules() -> Iterator[None]:
    """What is there before the first test of a module is not looked at again and again: every training of the Trainer
    begins with a collection of all garbage, which takes as long as the training of a tiny model does. It stays so for
    the modules after it: what is imported would be most of what each of them looks at. Of other modules' models
    nothing is left on the simulated accelerator, nor of its refusals to page-lock memory; and what fixtures of a
    module set of loggers ends with it."""
    gc.collect()
    if DEVICE == "sim":
        from hf_l2l.runtime import stream

        torch.sim.synchronize()
        stream.forget_refusal(torch.device("sim:0"))
        for _ in range(5):
            if not any(_held_on_sim()):
                break
            time.sleep(0.1)  # a thread lets go of what it has done last
            gc.unfreeze()  # a model may have been there when an earlier module began
            gc.collect()
    gc.freeze()
    with _levels_kept():
        yield


def _held_on_sim() -> tuple[int, int]:
    from hf_l2l.testing import page_locked_bytes

    return torch.sim.memory_allocated(), page_locked_bytes()


LOGGERS = [logging.getLogger(name) for name in ("transformers", "hf_l2l")]
"""Those whose levels the script, the command line, and `log_level` of a Trainer's arguments set."""


@contextmanager
def _levels_kept() -> Iterator[None]:
    levels = [logger.level for logger in LOGGERS]
    yield
    for logger, level in zip(LOGGERS, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """A seed for every test, and nothing chosen or watched by an earlier one: accelerate keeps its state for the
    process, transformers how much it tells, and a model that has not been collected its trace."""
    torch.manual_seed(0)
    OBSERVERS.clear()
    with _levels_kept():
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What datasets caches lies with the test, and its progress bars are not among the messages."""
    if importlib.util.find_spec("datasets") is not None:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        datasets.disable_progress_bars()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a BERT of two layers and a tokenizer that knows the words of `glue_script.ROWS`."""
    from glue_script import make_tiny_model

    return make_tiny_model(str(tmp_path_factory.mktemp("tiny_bert")))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported stays: collections of garbage look at it no more, which took a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("L2L_TEST_DEVICE=cuda needs a CUDA device, and torch finds none")
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        # The same examples in every run, however slow the machine is.
        settings.register_profile("tests", deadline=None, derandomize=True, database=None)
        settings.load_profile("tests")
    torch.set_num_threads(1)
