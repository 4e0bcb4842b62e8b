"""Host time of the engine: microseconds of Python per layer call, per micro-batch and per optimizer step.

The layers are so small that their kernels hardly count. The device is the CPU behind the interface of a device with
streams, so that every slot, lane and event of the engine runs and nothing is waited for. What is left is the time
between kernels, which bounds small layers on a fast GPU. transformers' activation checkpointing makes the same steps
in turn. The time of a layer call is the slope over the depth of the model.

    python benchmarks/host_overhead.py [--rounds 30] [--device streams|cpu] [--profile fp32]

A table for people, then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.runtime import stream

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.environment import description, environment

PHASES = ("start", "forward", "backward", "clip", "step", "zero_grad", "first update")
"""Of a step, in order; "start" is from the call of the model to that of its first module. "first update" is from the
end of the backward until a thread in the background begins to update, beside which the rest of a step runs."""
BETWEEN = ("clip", "step", "zero_grad", "start")
"""The phases in which the device has no work of this step."""
ROWS, TOKENS, VOCAB, HIDDEN = 4, 8, 100, 32
UBATCHES = 4
BF16 = {"of": torch.bfloat16}
"""Stands for activation checkpointing of a model in bf16: small kernels in bf16 take longer on a CPU."""
CASES: dict[str, dict[str, Any] | None] = {
    "checkpointing": None,
    "fp32": {},
    "checkpointing, bf16 weights": BF16,
    "bf16": {"cmp": "bf16"},
    "fp32, 4 micro-batches": {"ubatch_size": ROWS // UBATCHES},
}
"""Name -> options of `L2LConfig`; None for transformers' activation checkpointing."""


class _Event:
    """An event of a stream that is always done."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.time_s = 0.0

    def record(self, stream: object = None) -> None:
        self.time_s = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return (other.time_s - self.time_s) * 1e3


class _Stream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        pass


class _Module(types.SimpleNamespace):
    """Stands for the module of a device, which can be a key."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def cpu_with_streams() -> None:
    """Let `hf_l2l.stream` take the CPU for a device with streams, page-locked memory and a generator of its own."""
    current, generator = _Stream(), torch.zeros(16, dtype=torch.uint8)

    @contextlib.contextmanager
    def entered(_: _Stream) -> Iterator[None]:
        yield

    module = _Module(
        Event=_Event,
        Stream=_Stream,
        stream=entered,
        current_stream=lambda device=None: current,
        cudart=lambda: None,
        device=lambda device: contextlib.nullcontext(),
        get_rng_state=lambda *device: generator.clone(),
        set_rng_state=lambda state, *device: generator.copy_(state),
    )
    stream._streams = lambda device: module  # type: ignore[assignment, return-value]
    stream.device_module = lambda device: module  # type: ignore[assignment, return-value]
    stream.shares_host_memory = lambda device: False
    stream.page_lock = lambda address, num_bytes, device: True
    stream.page_unlock = lambda address, device: None
    stream.keep_until_done = lambda device, tensors: None


def bert(layers: int) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * HIDDEN,
        vocab_size=VOCAB,
        max_position_embeddings=TOKENS,
    )
    return transformers.BertForSequenceClassification(config).train()


class Loop:
    """A model, its optimizer, and what each phase of its steps took on this thread."""

    def __init__(self, model: nn.Module, options: dict[str, Any] | None) -> None:
        self.model, self.eps = model, None
        if options is None or options is BF16:
            if options is BF16:
                model.to(torch.bfloat16)
            # transformers 5.23 renamed it.
            named = "activation_checkpointing_enable"
            getattr(model, named if hasattr(model, named) else "gradient_checkpointing_enable")()
        else:
            self.eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="deferred", **options))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if self.eps is not None:
            self.eps.wrap(self.optimizer)
        model.bert.embeddings.register_forward_pre_hook(self._note_first_module)
        self.first_module_ns = self.first_update_ns = 0
        if self.eps is not None:
            worker = self.eps.updates.worker
            worker.submit = self._noting_first_update(worker.submit)  # type: ignore[method-assign]
        ids = torch.randint(5, VOCAB, (ROWS, TOKENS))
        self.batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
        self.us: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def run(self) -> None:
        parameters = list(self.model.parameters())
        marks = [self._now()]
        loss = self.model(**self.batch).loss
        marks += [self.first_module_ns, self._now()]
        loss.backward()
        marks.append(self._now())
        if self.eps is None:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        else:
            self.eps.clip_grad_norm_(1.0)
        marks.append(self._now())
        self.optimizer.step()
        marks.append(self._now())
        self.model.zero_grad()
        marks.append(self._now())
        for phase, start, end in zip(PHASES, marks, marks[1:], strict=False):
            self.us[phase].append((end - start) * 1e-3)
        self.us["first update"].append((self.first_update_ns or marks[4]) * 1e-3 - marks[3] * 1e-3)
        self.first_update_ns = 0
        if self.eps is not None:
            self.eps.synchronize()  # beside the steps that are measured, nothing runs

    def _noting_first_update(self, submit: Callable[..., None]) -> Callable[..., None]:
        def noting(*args: Any) -> None:
            self.first_update_ns = self.first_update_ns or self._now()
            submit(*args)

        return noting

    def _note_first_module(self, *_: object) -> None:
        self.first_module_ns = self._now()

    @staticmethod
    def _now() -> int:
        return time.thread_time_ns()

    def median(self, phase: str) -> float:
        return statistics.median(self.us[phase])


def measured(rounds: int, depths: tuple[int, int]) -> dict[str, dict[str, float]]:
    """Case -> microseconds: of a layer call forward and backward, and of each phase of a step without layers."""
    loops = {(name, depth): Loop(bert(depth), options) for name, options in CASES.items() for depth in depths}
    for turn in range(rounds + 3):
        for loop in list(loops.values()) if turn % 2 else reversed(list(loops.values())):
            loop.run()
        if turn == 2:  # the first ones are not counted
            for loop in loops.values():
                loop.us = {phase: [] for phase in PHASES}
    found: dict[str, dict[str, float]] = {}
    for name in CASES:
        low, high = (loops[name, depth] for depth in depths)
        slopes = {phase: (high.median(phase) - low.median(phase)) / (depths[1] - depths[0]) for phase in PHASES}
        found[name] = {
            **{f"layer {phase}": slopes[phase] for phase in PHASES},
            **{f"rest {phase}": low.median(phase) - depths[0] * slopes[phase] for phase in PHASES},
            "step": sum(high.median(phase) for phase in PHASES[:-1]),
            "first update": low.median("first update") + (24 - depths[0]) * slopes["first update"],
            "between": sum(low.median(phase) + (24 - depths[0]) * slopes[phase] for phase in BETWEEN),
        }
    return found


def table(found: dict[str, dict[str, float]], depth: int) -> str:
    lines = [("microseconds", *found)]
    rows = {
        "a layer, forward": "layer forward",
        "a layer, backward": "layer backward",
        "a layer, clip": "layer clip",
        "a layer, optimizer.step()": "layer step",
        "a layer, zero_grad": "layer zero_grad",
        "beside the layers, forward": "rest forward",
        "beside the layers, backward": "rest backward",
        f"a step of {depth} layers": "step",
        "between two steps of 24 layers": "between",
        "of it until the first update begins": "first update",
    }
    lines += [(label, *(f"{case[key]:,.0f}" for case in found.values())) for label, key in rows.items()]
    plain = {name: found["checkpointing, bf16 weights" if "bf16" in name else "checkpointing"] for name in found}
    for label, keys in (("layer calls", ("layer forward", "layer backward")), ("a step", ("step",))):
        shares = [sum(map(found[name].get, keys)) / sum(map(plain[name].get, keys)) for name in found]
        lines.append((f"{label}, over checkpointing", *(f"x {share:.2f}" for share in shares)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join((line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))))
        for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="measured steps of each case")
    parser.add_argument("--depths", type=int, nargs=2, default=(4, 12), help="layers of the two models of each case")
    parser.add_argument("--device", choices=("streams", "cpu"), default="streams")
    parser.add_argument("--profile", choices=[name for name in CASES if "checkpointing" not in name])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    where = environment("host_overhead.py", sys.argv[1:])  # first: it asks what devices there are
    if options.device == "streams":
        cpu_with_streams()
    if options.profile is not None:
        loop, profile = Loop(bert(options.depths[1]), CASES[options.profile]), cProfile.Profile()
        for turn in range(3 + options.rounds):
            profile.runcall(loop.run) if turn >= 3 else loop.run()
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    found = measured(options.rounds, tuple(options.depths))
    print(table(found, options.depths[1]))
    print(description(where))
    print(json.dumps({"microseconds": found, "environment": where}))


if __name__ == "__main__":
    main()
