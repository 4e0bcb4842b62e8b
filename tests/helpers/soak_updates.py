"""Random training programs: deferred and eager updates have the bits of serial ones, on the CPU.

A program is a number of optimizer steps, each of some backwards over the sum of some losses, with forwards in between
whose graphs are thrown away and evaluations without a graph. The seed decides it, and the options with it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from hf_l2l import L2LConfig, attach_l2l
from memory_switches import forced_copies
from models import Toy, batch_for
from runs import OPTIMIZERS, Run, assert_same_run, groups_of, run_of
from soak import page

ROWS = 8


class Backward(NamedTuple):
    """One micro-step: forwards whose losses are summed before the backward, those without one, and those without a
    graph."""

    forwards: int
    thrown_away: int
    evaluations: int


class Program(NamedTuple):
    """One training."""

    steps: list[list[Backward]]
    layers: int
    times: int
    """How often the layers are called in one forward, as those of ALBERT are."""
    optimizer: str
    max_norm: float
    """0 does not clip."""
    copies: bool
    """Host and device share no memory."""
    keeps_gradients: bool
    """They are set to zero, and not to None, between steps."""
    options: dict[str, Any]
    """Of `L2LConfig`."""

    def modes(self) -> list[str]:
        """What is compared with serial updates: eager ones clip nothing and need no loss scale."""
        is_eager = self.max_norm == 0.0 and self.options["cmp"] != "fp16"
        return ["deferred", "eager"] if is_eager else ["deferred"]


def program_of(seed: int) -> Program:
    """A seed always gives the same one."""
    draw = random.Random(seed)
    cmp = draw.choice((None, None, "bf16", "fp16"))
    options: dict[str, Any] = {
        "cmp": cmp,
        "ubatch_size": draw.randint(1, ROWS),
        "stash": draw.choice(("device", "host")),
        "num_threads": draw.randint(1, 2),
        "prefetch": draw.random() < 0.8,
        "gradient_slots": draw.randint(1, 2),
        "grad_dtype": draw.choice(("fp32", "16bit")) if cmp else "fp32",
        "moment_dtype": draw.choice(("fp32", "fp32", "bf16")),
    }
    if cmp:
        options["host_copies"] = draw.choice(("kept", "per_sweep"))
    if cmp == "fp16":
        options["loss_scale_init"] = 2.0 ** draw.choice((10, 16, 24))
    steps = [
        [
            Backward(draw.randint(1, 3), draw.choice((0, 0, 1, 2)), draw.choice((0, 0, 1)))
            for _ in range(draw.randint(1, 4))
        ]
        for _ in range(draw.randint(1, 5))
    ]
    return Program(
        steps=steps,
        layers=draw.randint(1, 4),
        times=draw.randint(1, 3),
        optimizer=draw.choice(list(OPTIMIZERS)),
        max_norm=draw.choice((0.0, 0.0, 0.5)),
        copies=draw.random() < 0.5,
        keeps_gradients=draw.random() < 0.3,
        options=options,
    )


def trained(program: Program, mode: str) -> Run:
    """What this training leaves behind, with losses and norms."""
    model = Toy(program.layers, calls=program.times)
    torch.manual_seed(11)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode, layer_classes=("Block",), **program.options))
    optimizer = eps.wrap(OPTIMIZERS[program.optimizer](groups_of(model)))
    logged: list[Any] = []
    model.train()
    for number, step in enumerate(program.steps):
        for turn, backward in enumerate(step):
            batch = batch_for(model, masked=False, seed=10 * number + turn)
            with eps.accumulate() if turn < len(step) - 1 else nullcontext():
                losses = [model(**batch).loss for _ in range(backward.forwards + backward.thrown_away)]
                with torch.no_grad():
                    logged += [model(**batch).loss.item() for _ in range(backward.evaluations)]
                torch.stack(losses[: backward.forwards]).sum().backward()
            logged += [loss.item() for loss in losses]
        norm = eps.clip_grad_norm_(program.max_norm) if program.max_norm else eps.grad_norm()
        logged.append(repr(norm.item()))  # one that is no number equals none
        optimizer.step()
        optimizer.zero_grad(set_to_none=not program.keeps_gradients)
    if eps.loss_scale is not None:
        logged.append([eps.loss_scale.value, eps.loss_scale.skipped])
    return run_of(model, optimizer, logged)


def run(seed: int) -> dict[str, Any]:
    """One program under every mode that it may have."""
    program, failure = program_of(seed), None
    with forced_copies() if program.copies else nullcontext():
        try:
            serial = trained(program, "serial")
            for mode in program.modes():
                assert_same_run(trained(program, mode), serial)
        except (AssertionError, RuntimeError, ValueError) as error:
            failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'bits differ'}"
    backwards = [backward for step in program.steps for backward in step]
    sums = {name: sum(getattr(each, name) for each in backwards) for name in ("forwards", "thrown_away")}
    counted = {"steps": len(program.steps), "backwards": len(backwards), **sums}
    return {"program": program._asdict(), "modes": program.modes(), **counted, "failure": failure}


def document(rows: list[dict[str, Any]]) -> str:
    """Programs by precision and optimizer."""
    words = f"""
{len(rows)} programs, seeds 0 to {len(rows) - 1}. Weights, the optimizer's state, losses and norms of
deferred updates, and of eager ones where nothing is clipped or scaled, are compared with those of
serial updates, bit for bit. Each program has its own accumulation, losses that share a backward,
forwards that are thrown away, micro-batch size, stash, dtypes, and calls of each layer."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["program"]["options"]["cmp"] or "fp32", row["program"]["optimizer"]].append(row)
    counted = ("steps", "backwards", "forwards", "thrown_away")
    lines = []
    for key, group in sorted(groups.items()):
        eager, failed = ("eager" in row["modes"] for row in group), (row["failure"] is not None for row in group)
        sums = (sum(row[name] for row in group) for name in counted)
        lines.append((*key, len(group), sum(eager), *sums, sum(failed)))
    head = ("precision", "optimizer", "programs", "with eager", *counted[:3], "thrown away", "failed")
    return page("Random training programs under every `eps_update`, on the CPU", words, head, lines)
