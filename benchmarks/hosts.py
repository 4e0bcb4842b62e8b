"""Several hosts with limited bandwidth between them: the time of a step, and how much of the network's is hidden.

Hosts are network namespaces of this machine, joined by a switch; `tc` limits what each sends. Each rank trains the
same BERT on its own rows. Without a limit a step takes as long as its computing; with one, sums cross the network
during the backward, and new weights during the next forward. The formula is `hf_l2l/pipeline/hosts.py`, with the
seconds of forward and backward that were measured without a limit.

    python benchmarks/hosts.py [--hosts 2] [--ranks 1] [--mbit 0 4000 1000] [--layers 12] [--hidden 512] [--rows 4]

Needs root, `ip` and `tc`. A table for people, then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import environment
from benchmarks.ranks import bert
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.pipeline.hosts import HostsLoad, hosts_seconds

NETWORK = "10.77.0"


def run(*command: object) -> None:
    """Run a program of the system."""
    subprocess.run(list(map(str, command)), check=True)


@contextmanager
def namespaces(count: int, mbit: int) -> Iterator[list[str]]:
    """Network namespaces with the addresses 10.77.0.1 and so on, each of which sends `mbit` megabit per second at
    most; 0 is no limit."""
    names = [f"l2l-{os.getpid()}-{number}" for number in range(count)]
    switch = f"l2l-{os.getpid()}-switch"
    with ExitStack() as stack:
        for name in (switch, *names):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            if mbit:
                rate = ("rate", f"{mbit}mbit", "burst", "1mb", "latency", "1s")
                run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
        yield names


def train(args: argparse.Namespace) -> dict[str, Any]:
    """In one rank: seconds of forward, of backward, and of a whole step."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model = bert(args)
    eps = attach_l2l(model, L2LConfig(eps_update="deferred", num_threads=1))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False))
    generator = torch.Generator().manual_seed(distributed.get_rank())
    forward, backward, whole = [], [], []
    for _ in range(args.steps):
        ids = torch.randint(0, 8000, (args.rows, 64), generator=generator)
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=torch.zeros(args.rows, dtype=torch.long)).loss
        middle = time.perf_counter()
        loss.backward()
        after = time.perf_counter()
        eps.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        forward.append(middle - began)
        backward.append(after - middle)
        whole.append(time.perf_counter() - began)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.bert.encoder.layer]
    outside = sum(p.numel() for p in model.parameters()) - sum(layers)
    detach_l2l(model)
    distributed.destroy_process_group()
    times = {"forward": forward, "backward": backward, "step": whole}
    return {**{name: statistics.median(found[1:]) for name, found in times.items()}, "parameters": [*layers, outside]}


def measured(args: argparse.Namespace, mbit: int) -> dict[str, Any]:
    """The slowest rank of a training."""
    with tempfile.TemporaryDirectory() as folder, namespaces(args.hosts, mbit) as names:
        size = args.hosts * args.ranks
        where = {
            "MASTER_ADDR": f"{NETWORK}.1",
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(size),
        }
        sizes = ["--layers", args.layers, "--hidden", args.hidden, "--rows", args.rows, "--steps", args.steps]
        command = [sys.executable, __file__, "--out", folder, *map(str, sizes)]
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", names[rank // args.ranks], *command],
                env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank % args.ranks)},
            )
            for rank in range(size)
        ]
        if any([process.wait() for process in processes]):
            raise SystemExit("a rank has failed")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
        return max(found, key=lambda each: float(each["step"]))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--mbit", type=int, nargs="+", default=[4000, 2000, 1000, 500])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.out:
        (args.out / f"{os.environ['RANK']}.json").write_text(json.dumps(train(args)))
        return
    free = measured(args, 0)
    rows = []
    for mbit in args.mbit:
        found = measured(args, mbit)
        load = HostsLoad(free["forward"], free["backward"], [4 * count for count in found["parameters"]])
        formula = hosts_seconds(load, args.hosts, mbit * 1e6 / 8) + free["step"] - free["forward"] - free["backward"]
        sent = 2 * 4 * sum(found["parameters"]) * (args.hosts - 1) / args.hosts / (mbit * 1e6 / 8)
        rows.append({"mbit": mbit, **found, "formula": formula, "network": sent})
    print(
        f"without a limit: forward {free['forward']:.2f} s, backward {free['backward']:.2f}, step {free['step']:.2f}"
    )
    print("| Mbit/s of each host | network alone, s | one after the other, s | formula, s | measured, s |")
    print("|---|---|---|---|---|")
    for row in rows:
        serial = free["step"] + row["network"]
        print(f"| {row['mbit']} | {row['network']:.2f} | {serial:.2f} | {row['formula']:.2f} | {row['step']:.2f} |")
    for row in rows:
        del row["parameters"]
    print(json.dumps({"environment": environment.environment("hosts.py", sys.argv[1:]), "free": free, "rows": rows}))


if __name__ == "__main__":
    main()
