"""What state on disk costs: steps with `state_tier="disk"` and "host", and what the estimate says of them.

    python benchmarks/state_tier.py [--steps 4] [--layers 16] [--hidden 1024] [--window 4] [--rows 1] [--tokens 16]
                                    [--update eager] [--disk-only]

A line for people, then one JSON document as the last one. With few tokens, the disk bounds the step, which then takes
the bytes that the estimate has, at the rates that the disk had in this run. `--disk-only` is for state that this
machine's memory cannot hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import environment
from hf_l2l import L2LConfig, attach_l2l, estimate
from hf_l2l.memory.host_limits import own_bytes
from hf_l2l.probe.disk import disk_rates
from hf_l2l.sizing.disk import disk_seconds

_WARMUP = 2
"""Steps: the first one makes the state, and the second one learns what follows what."""
_PROBED = 512 * 2**20
_WATCHED_S = 0.1
"""Between two looks at the memory of the process."""


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="that are measured")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--update", default="serial", help="when layers are updated (eps_update)")
    parser.add_argument("--disk-only", action="store_true", help="train with state on disk alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--probed", type=int, default=_PROBED, help="bytes with which the disk is measured")
    parser.add_argument("--folder", help="on the disk that is measured; the system's temporary folder without it")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1 (got {options.steps})")
    return options


def model_of(options: argparse.Namespace) -> hf.LlamaForCausalLM:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=1024,
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 64,
            num_key_value_heads=options.hidden // 64,
        )
    )


def most_memory(of: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `of` returns, and the most memory without mapped files that this process has had meanwhile, in bytes."""
    most, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(_WATCHED_S):
            most[0] = max(most[0], own_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        found = of()
    finally:
        is_over.set()
        thread.join()
    return {**found, "anonymous": most[0]}


def one_training(tier: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Seconds of a step, and what passed through the window, beside what the estimate says of both."""
    model = model_of(options)
    own = {"state_tier": "disk", "state_dir": folder, "state_window": options.window} if tier == "disk" else {}
    config = L2LConfig(device=options.device, eps_update=options.update, **own)
    optimizer = torch.optim.AdamW(model.parameters())
    expected = estimate(model, config, optimizer)
    eps: Any = attach_l2l(model, config)
    eps.wrap(optimizer)
    ids = torch.randint(0, 1024, (options.rows, options.tokens), device=options.device)

    def train() -> dict[str, Any]:
        start, before = 0.0, (0, 0)
        for step in range(_WARMUP + options.steps):
            if step == _WARMUP:
                eps.synchronize()
                start = time.perf_counter()
                before = (eps.state.window.bytes_read, eps.state.window.bytes_written) if own else before
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        eps.synchronize()
        return {"step_s": (time.perf_counter() - start) / options.steps, "before": before}

    found = most_memory(train)
    before = found.pop("before")
    if own:
        window = eps.state.window
        read, written = (
            (now - then) / options.steps
            for now, then in zip((window.bytes_read, window.bytes_written), before, strict=True)
        )
        found |= {"window": window.peak, "read": read, "written": written, "expected": expected}
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the document."""
    options = parsed(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        in_memory = None if options.disk_only else one_training("host", options, folder)
        rates = [disk_rates(Path(folder), options.probed)]
        on_disk = one_training("disk", options, folder)
        rates.append(disk_rates(Path(folder), options.probed))
    expected = on_disk.pop("expected")
    seconds = [disk_seconds(expected, each) for each in rates]
    needed = expected.host_bytes + expected.on_disk - expected.state_window
    result = {
        "host": in_memory,
        "needed_in_memory": needed,
        "disk": on_disk,
        "estimate": {"on_disk": expected.on_disk, **expected.state_traffic._asdict(), "seconds": seconds},
        "rates": [each._asdict() for each in rates],
        "options": {name: str(value) for name, value in vars(options).items()},
        "environment": environment.environment("state_tier.py", sys.argv[1:] if arguments is None else arguments),
    }
    mib = 2**20
    of_memory = f"{in_memory['step_s']:.3f} s in memory, " if in_memory else ""
    print(
        f"{expected.on_disk / mib:,.0f} MiB of state: step {of_memory}"
        f"{on_disk['step_s']:.3f} s on disk through {on_disk['window'] / mib:,.0f} MiB, "
        f"{expected.state_window / mib:,.0f} expected; a step read {on_disk['read'] / mib:,.0f} MiB and wrote "
        f"{on_disk['written'] / mib:,.0f}, {expected.state_traffic.read / mib:,.0f} and "
        f"{expected.state_traffic.written / mib:,.0f} expected, which take {seconds[0]:.3f} s at the rates before, "
        f"{seconds[1]:.3f} s at those after; the process has had {on_disk['anonymous'] / mib:,.0f} MiB at most beside "
        f"the window, and with state in memory it needs {needed / mib:,.0f}"
    )
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
