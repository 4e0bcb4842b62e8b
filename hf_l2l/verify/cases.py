"""The model and the batch that checks begin with, one forward and backward of a model, and copies of the model that
run layer to layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_l2l.config import L2LConfig
from hf_l2l.hf.attach import attach_l2l
from hf_l2l.runtime import stream
from hf_l2l.verify.comparisons import Gradients
from hf_l2l.verify.family import Batch, Family

ROWS, UBATCH = 8, 2
"""Rows of the device batch and of a micro-batch."""

FEWER_ROWS = 5, 3
"""Rows of further device batches: the last micro-batch of each is smaller than the others."""


@dataclass
class Case:
    """The model of a family, with which no check trains, and a batch."""

    family: Family
    model: nn.Module
    batch: Batch

    @staticmethod
    def of(family: Family) -> Case:
        """The case of `family`, whose plain model trains.

        Raises:
            NotInThisTransformers: if the installed transformers lacks the family.
        """
        model = family.build(family.dtype)
        batch = family.batch(model, ROWS)
        train(family, copy.deepcopy(model), batch)
        return Case(family, model, batch)


_DEVICE: ContextVar[str] = ContextVar("_DEVICE", default="cpu")


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """In the block, models of `options` run on this device of torch; before and after it, on the CPU."""
    before = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(before)


def options(**given: Any) -> L2LConfig:
    """These options of `L2LConfig`, and the device that checks run on."""
    return L2LConfig(device=_DEVICE.get(), **given)


@contextmanager
def transfers(*, real: bool) -> Iterator[None]:
    """In the block, whatever goes to the CPU as the execution device, or leaves it, is a copy, as on an accelerator;
    or, if not `real`, a view, as on the CPU by default. Another device has its own memory in any case."""
    if _DEVICE.get() != "cpu":
        yield
        return
    before = stream.shares_host_memory
    stream.shares_host_memory = lambda device: not real
    try:
        yield
    finally:
        stream.shares_host_memory = before


def train(family: Family, model: nn.Module, batch: Batch) -> torch.Tensor:
    """One forward and backward; returns the loss. The generators are left as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        loss = family.loss(model(**copy.deepcopy(batch)))
        loss.backward()
    return loss.detach()


def gradients_of(model: nn.Module) -> Gradients:
    """The gradients by name; None for a parameter without one."""
    return {name: p.grad for name, p in model.named_parameters()}


def attached(model: nn.Module, **given: Any) -> nn.Module:
    """A copy of `model` that runs layer to layer with these options on the device of checks."""
    other = copy.deepcopy(model)
    attach_l2l(other, options(**given))
    return other
