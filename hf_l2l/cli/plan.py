"""`hf-l2l plan MODEL --hardware NAME`: how to train a model on a cluster, how long that takes, and what it needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_l2l.cli.command import GOOD, Command, add_json, count_text, flag, print_json, quiet

if TYPE_CHECKING:
    from hf_l2l.scale import Cluster, Limits, Method, Plan, TransformerShape

MOST_TOKENS = 4096
"""Tokens of a row without `--tokens`, if the config allows longer ones."""
COLUMNS = (
    "parallelism",
    "method",
    "devices",
    "data",
    "pipe",
    "tensor",
    "batch",
    "ubatch",
    "number",
    "efficiency",
    "time",
)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    from hf_l2l.scale import HARDWARE, METHODS, PARALLELISM

    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=argparse.SUPPRESS,
        help="X160 and the like (arXiv:2106.02679, appendix B), a folder with a config.json, or a name on the Hub",
    )
    parser.add_argument("--model", metavar="MODEL", help="the same")
    parser.add_argument("--trust-remote-code", action="store_true", help="let code that comes with the model run")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of a row")
    parser.add_argument("--hardware", metavar="NAME", default="a100", help=f"{', '.join(HARDWARE)} (default: a100)")
    parser.add_argument(
        "--network",
        type=float,
        metavar="N",
        help="Gbit/s that each device sends to other nodes, and receives meanwhile",
    )
    parser.add_argument(
        "--node-size", type=int, metavar="N", help="devices of a node, the most for tensor parallelism"
    )
    parser.add_argument("--host-memory", metavar="SIZE", help="memory of a node for what is offloaded, such as 64GiB")
    parser.add_argument(
        "--host-bandwidth",
        type=float,
        metavar="N",
        help="GiB/s of a node's host memory, which bounds updates on the host (l2l)",
    )
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--gpus", type=int, metavar="N", help="the fastest plans on at most so many devices")
    wanted.add_argument("--days", type=float, metavar="D", help="the smallest clusters that train within so many days")
    parser.add_argument("--method", choices=METHODS, help="only this method")
    parser.add_argument("--parallelism", choices=PARALLELISM, help="only this kind")
    parser.add_argument("--pipeline", type=int, metavar="N", help="the degree of pipeline parallelism")
    parser.add_argument("--tensor", type=int, metavar="N", help="the degree of tensor parallelism")
    parser.add_argument("--batch", type=int, metavar="ROWS", help="most rows of a step (default: the critical batch)")
    parser.add_argument("--no-offload", action="store_true", help="nothing in host memory")
    parser.add_argument(
        "--steps", type=int, default=100_000, metavar="N", help="steps at the critical batch (default: 100000)"
    )
    add_json(parser)


def _as_typed(option: str) -> str:
    """What the command line calls what `hf_l2l.scale` calls `option`."""
    return flag({"devices": "gpus", "host_bytes": "host_memory"}.get(option, option))


def _run(options: argparse.Namespace) -> int:
    from hf_l2l.option_names import options_called

    with options_called(_as_typed):
        return _planned_or_refused(options)


def _planned_or_refused(options: argparse.Namespace) -> int:
    from hf_l2l.scale import Limits

    if options.model is None:
        raise ValueError("a plan needs a model (got none); give MODEL, such as X160 or the folder of a config.json")
    quiet()
    cluster, shape = _cluster(options), _shape(options)
    limits = Limits(options.gpus, options.batch, options.pipeline, options.tensor, not options.no_offload)
    limits.check(shape)
    found: list[tuple[str, Plan]] = []
    shown: set[object] = set()
    refused: list[str] = []
    for parallelism, method in _combinations(options):
        try:
            plan = _planned(options, shape, cluster, method, parallelism, limits)
        except ValueError as error:
            refused.append(str(error))
            continue
        usage = plan.usage  # with few devices, kinds of parallelism and methods may come to the same
        if (usage.degrees, usage.memory, usage.efficiency) not in shown:
            shown.add((usage.degrees, usage.memory, usage.efficiency))
            found.append((parallelism, plan))
    if not found:
        raise ValueError(refused[-1])  # that of the most kinds of parallelism at once
    wants_fewest = options.days is not None
    found.sort(key=lambda each: (each[1].usage.degrees.devices if wants_fewest else 0, each[1].seconds))
    if options.json:
        print_json(_as_json(options, shape, cluster, found))
    else:
        print("\n".join(_lines(options, shape, cluster, found)))
    return GOOD


def _combinations(options: argparse.Namespace) -> list[tuple[str, Method]]:
    """Kinds of parallelism with the methods that they are for; both as asked for, if both are."""
    from hf_l2l.scale import ARRANGED, PARALLELISM, Method

    if options.method and options.parallelism:
        return [(options.parallelism, Method(options.method))]
    return [
        (parallelism, method)
        for parallelism in PARALLELISM
        for method in Method
        if parallelism in ARRANGED[method]
        and options.parallelism in (None, parallelism)
        and options.method in (None, method.value)
    ]


def _planned(
    options: argparse.Namespace,
    shape: TransformerShape,
    cluster: Cluster,
    method: Method,
    parallelism: str,
    limits: Limits,
) -> Plan:
    from hf_l2l.scale import fastest, smallest

    if options.days is not None:
        return smallest(shape, cluster, options.days, method, parallelism, limits, steps=options.steps)
    return fastest(shape, cluster, method, parallelism, limits, steps=options.steps)


def _cluster(options: argparse.Namespace) -> Cluster:
    from hf_l2l.plan.planner import parse_budget
    from hf_l2l.scale import Cluster, hardware_named

    for name in ("network", "host_bandwidth"):
        value = getattr(options, name)
        if value is not None and not 0.01 <= value <= 1e6:
            raise ValueError(
                f"{flag(name)} must be from 0.01 to 1,000,000 (got {value}); leave it out for that of the hardware"
            )
    hardware = hardware_named(options.hardware)
    both_ways = None if options.network is None else 2 * options.network / 8  # as table A.1 counts
    host = None if options.host_memory is None else parse_budget(options.host_memory, "--host-memory")
    return Cluster(hardware, both_ways, options.node_size, host, options.host_bandwidth)


def _shape(options: argparse.Namespace) -> TransformerShape:
    """The shape of the model: of the paper's family, or of a config whose layers are counted without their weights."""
    from hf_l2l.scale import TransformerShape

    if options.tokens is not None and options.tokens < 1:
        raise ValueError(f"--tokens must be at least 1 (got {options.tokens}); leave it out for the model's own")
    shape = TransformerShape.named(options.model)
    if shape is None:
        shape = _of_config(options)
    return shape if options.tokens is None else shape.with_tokens(options.tokens)


def _of_config(options: argparse.Namespace) -> TransformerShape:
    from hf_l2l.cli.model_facts import facts_of
    from hf_l2l.model_source import load_shapes
    from hf_l2l.scale import TransformerShape

    model = load_shapes(options.model, trust_remote_code=options.trust_remote_code)
    facts = facts_of(model)
    whole: Any = model.config
    config = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError(
            f"a plan is for transformers whose layers compute with all of their weights (got {options.model!r}, whose "
            "layers have experts); give the shape of a dense one"
        )
    width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if not facts.stacks or not isinstance(width, int) or not isinstance(heads, int):
        raise ValueError(
            "a plan needs a config with layers, hidden_size and num_attention_heads "
            f"(got {options.model!r} without them); give that of a transformer"
        )
    stack = max(facts.stacks, key=lambda each: each.total.parameters)
    inner = getattr(config, "intermediate_size", None)
    tokens = min(facts.max_position_embeddings or MOST_TOKENS, MOST_TOKENS)
    each = stack.total.parameters // stack.num_layers
    return TransformerShape(
        stack.num_layers, width, heads, tokens, inner if isinstance(inner, int) else 4 * width, each
    )


def time_text(seconds: float) -> str:
    """A time with the unit that fits, to two digits or more."""
    for unit, size in (("y", 365 * 86_400), ("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.2g} s"


def _lines(
    options: argparse.Namespace, shape: TransformerShape, cluster: Cluster, found: list[tuple[str, Plan]]
) -> Iterator[str]:
    hardware = cluster.hardware
    yield (
        f"{options.model}: {count_text(shape.parameters)} parameters in {shape.layers} layers of width {shape.width}, "
        f"rows of {shape.tokens} tokens; the critical batch is {shape.critical_batch:,.0f} rows"
    )
    yield (
        f"{hardware.name}: {hardware.peak_flops / 1e12:.0f} TFLOP/s and {hardware.memory_gib:g} GiB; "
        f"{options.steps:,} steps at the critical batch, or as many rows in more steps\n"
    )
    rows = [(*COLUMNS, "device GiB", "host GiB"), *(_row(parallelism, plan) for parallelism, plan in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        texts = [row[n].ljust(w) if n < 2 else row[n].rjust(w) for n, w in enumerate(widths)]
        yield "  ".join(texts).rstrip()
    yield (
        "\nDevices and links are at their peak: a real training takes longer (arXiv:2106.02679, section 5). "
        "Parameters outside the layers are not counted."
    )


def _row(parallelism: str, plan: Plan) -> tuple[str, ...]:
    from hf_l2l.scale.hardware import GIB

    usage, to = plan.usage, plan.usage.degrees
    on_host = usage.in_host_memory
    counts = (to.devices, to.data, to.pipeline, to.tensor, to.batch, to.micro_batch, to.micro_batches)
    return (
        *(parallelism, usage.method.value),
        *(f"{count:,}" for count in counts),
        *(f"{usage.efficiency.value:.2f}", time_text(plan.seconds)),
        _gib_text((usage.memory.total - on_host) / GIB),
        _gib_text(on_host / GIB) if on_host else "0",
    )


def _gib_text(size: float) -> str:
    """Three digits, or all of a number before its point."""
    return f"{size:,.0f}" if size >= 1000 else f"{size:.3g}"


def _as_json(
    options: argparse.Namespace, shape: TransformerShape, cluster: Cluster, found: list[tuple[str, Plan]]
) -> dict[str, Any]:
    from hf_l2l.scale.hardware import GIB

    plans = []
    for parallelism, plan in found:
        usage = plan.usage
        memory = usage.memory
        plans.append(
            {
                "parallelism": parallelism,
                "method": usage.method.value,
                **vars(usage.degrees),
                "batch": usage.degrees.batch,
                "devices": usage.degrees.devices,
                "efficiency": usage.efficiency.value,
                "overheads": vars(usage.efficiency),
                "seconds": plan.seconds,
                "is_offloaded": usage.is_offloaded,
                "in_host_memory": usage.in_host_memory,
                "memory": {**vars(memory), "offloadable": memory.offloadable, "resident": memory.resident},
                "offload_bandwidth": usage.offload_gib_per_s * GIB,
            }
        )
    return {
        "model": options.model,
        "shape": {**vars(shape), "parameters": shape.parameters},
        "critical_batch": shape.critical_batch,
        "hardware": vars(cluster.hardware),
        "steps": options.steps,
        "plans": plans,
    }


COMMAND = Command(
    "plan",
    "find how to train a model on a cluster: devices, micro-batches, time and memory",
    "plan X160 --hardware a100 --days 32",
    _add_flags,
    _run,
)
