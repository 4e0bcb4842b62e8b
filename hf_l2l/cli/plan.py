"""`hf-l2l plan MODEL --hardware NAME`: how to train a model on a cluster, how long that takes, and what it needs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from hf_l2l.cli.command import GOOD, Command, add_json, flag, quiet

if TYPE_CHECKING:
    from torch import nn

    from hf_l2l.cli.printed.plan_measured import Beside
    from hf_l2l.scale import Cluster, Limits, Method, Plan, TransformerShape

MOST_TOKENS = 4096
"""Tokens of a row without `--tokens`, if the config allows longer ones."""


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
    parser.add_argument(
        "--measured",
        metavar="TRACE",
        help="each layer's time in a run, from the file of --l2l_trace, beside that of the plan; with --batch",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw memory, time and offload over the size of models (.png, .pdf, .svg)"
    )
    add_json(parser)


def _as_typed(option: str) -> str:
    """What the command line calls what `hf_l2l.scale` calls `option`."""
    return flag({"devices": "gpus", "host_bytes": "host_memory"}.get(option, option))


def _run(options: argparse.Namespace) -> int:
    from hf_l2l.option_names import options_called

    with options_called(_as_typed):
        return _answered(options)


def _answered(options: argparse.Namespace) -> int:
    from hf_l2l.cli.printed.plan import show
    from hf_l2l.cli.printed.plan_figures import draw
    from hf_l2l.scale import Limits

    if options.model is None:
        raise ValueError("a plan needs a model (got none); give MODEL, such as X160 or the folder of a config.json")
    quiet()
    cluster, shape = _cluster(options), _shape(options)
    limits = Limits(options.gpus, options.batch, options.pipeline, options.tensor, not options.no_offload)
    limits.check(shape)
    beside = _beside(options, shape, cluster)
    found = _found(options, shape, cluster, limits) if beside is None else []
    if options.plot:
        draw(options.plot, options.model, shape, cluster, found, options.steps)
    show(options, shape, cluster, found, beside)
    return GOOD


def _beside(options: argparse.Namespace, shape: TransformerShape, cluster: Cluster) -> Beside | None:
    """The run of `--measured` beside the plan."""
    from hf_l2l.cli.printed.plan_measured import Beside
    from hf_l2l.report.traced_steps import traced_steps

    if options.measured is None:
        return None
    for name in ("gpus", "days", "method", "parallelism", "pipeline", "tensor", "host_memory", "no_offload"):
        if getattr(options, name):
            raise ValueError(
                f"--measured is beside layer-to-layer execution on one device, which has no {flag(name)} (got "
                f"{getattr(options, name)}); leave that out"
            )
    if options.batch is None:
        raise ValueError(
            f"--measured needs --batch, the rows of a step of that run (got {options.measured!r} alone: a trace does "
            "not have them); add --batch, and --tokens for those of a row"
        )
    return Beside(traced_steps(options.measured), shape, cluster, options.batch)


def _found(
    options: argparse.Namespace, shape: TransformerShape, cluster: Cluster, limits: Limits
) -> list[tuple[str, Plan]]:
    """Plans by time, or by devices for a wanted time.

    Raises:
        ValueError: if there is none.
    """
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
    return sorted(found, key=lambda each: (each[1].usage.degrees.devices if wants_fewest else 0, each[1].seconds))


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
    from hf_l2l.cli.printed.model_facts import facts_of
    from hf_l2l.model.stacks import find_stacks
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
    [layers] = [each.layers for each in find_stacks(model) if each.path == stack.path]
    tokens = min(facts.max_position_embeddings or MOST_TOKENS, MOST_TOKENS)
    each = stack.total.parameters // stack.num_layers
    inner = max(_intermediate(layer, width) for layer in layers)
    return TransformerShape(stack.num_layers, width, heads, tokens, inner or 4 * width, each)


def _intermediate(layer: nn.Module, width: int) -> int:
    """Elements for a token between the matrices of a layer's feedforward network: those with the width on one side,
    outside of attention, make the states on their other side, and the last one consumes them. A gated network makes
    two states of one size, by two matrices or by one. 0 if there are no such matrices."""
    others = [
        weight.shape[0] if weight.shape[1] == width else weight.shape[1]
        for name, weight in layer.named_parameters()
        if weight.dim() == 2 and width in weight.shape and "att" not in name.lower()
    ]
    return sum(others) - min(others, default=0)


COMMAND = Command(
    "plan",
    "find how to train a model on a cluster: devices, micro-batches, time and memory",
    "plan X160 --hardware a100 --days 32",
    _add_flags,
    _run,
)
