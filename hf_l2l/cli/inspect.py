"""`hf-l2l inspect MODEL`: the layers of a model, what is outside them, and their bytes, from its config alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from hf_l2l.cli.command import GOOD, Command, add_json, add_model, count_text, flag, print_json, quiet

if TYPE_CHECKING:
    from hf_l2l.cli.printed.model_facts import ModelFacts, Size

SHOWN = 40
"""Modules outside the layers that the text shows; `--json` has all."""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--layer-classes",
        nargs="+",
        metavar="CLASS",
        help="the class names of the modules that are layers; without it, they are found",
    )
    add_json(parser)


def _run(options: argparse.Namespace) -> int:
    from hf_l2l.cli.printed.model_facts import facts_of
    from hf_l2l.model_source import load_shapes
    from hf_l2l.option_names import options_called

    quiet()
    model = load_shapes(options.model, model_class=options.model_class, trust_remote_code=options.trust_remote_code)
    with options_called(flag):
        facts = facts_of(model, tuple(options.layer_classes) if options.layer_classes else None)
    if options.json:
        print_json({"model": options.model, **asdict(facts)})
    else:
        print("\n".join(_lines(options.model, facts)))
    return GOOD


def _lines(name: str, facts: ModelFacts) -> Iterator[str]:
    from hf_l2l.runtime.tensors import size_text

    longest = facts.max_position_embeddings
    yield f"{name}: {facts.class_name}" + (f" ({facts.model_type})" if facts.model_type else "")
    yield f"  {_size_text(facts.total)} in {facts.dtype}" + (f", rows of up to {longest} tokens" if longest else "")
    for stack in facts.stacks:
        yield f"\nlayers at {stack.path} ({'guessed' if stack.is_guessed else 'known'}): {_size_text(stack.total)}"
        for kind in stack.kinds:
            each = " each" if kind.count > 1 else ""
            yield f"  {kind.count} x {kind.class_name}, {_size_text(kind.each)}{each}"
    if facts.largest_layer:
        largest = facts.largest_layer
        yield f"\nlargest layer: {largest.path}, {size_text(largest.bytes)} (slots on the device are sized by it)"
    yield f"\noutside the layers: {_size_text(facts.non_layer_total)}"
    for module in facts.non_layer_modules[:SHOWN]:
        tied = f", tied to {', '.join(module.tied_to)}" if module.tied_to else ""
        own = _size_text(module.own) if module.own.parameters else "no parameters of its own"
        yield f"  {module.path or '(the model itself)'}: {module.class_name}, {own}{tied}"
    if len(facts.non_layer_modules) > SHOWN:
        yield f"  and {len(facts.non_layer_modules) - SHOWN} more (--json has all)"
    yield f"\nties: {'; '.join(' = '.join(names) for names in facts.ties) or 'none'}"
    yield f"buffers: {size_text(facts.buffers.bytes)}"
    for sentence in facts.refused:
        yield f"\nrefused: {sentence}"
    for sentence in facts.notes:
        yield f"\nnote: {sentence}"


def _size_text(size: Size) -> str:
    from hf_l2l.runtime.tensors import size_text

    return f"{count_text(size.parameters)} parameters, {size_text(size.bytes)}"


COMMAND = Command(
    "inspect",
    "show the layer stacks of a model, what is outside them, ties and bytes, from its config alone",
    "inspect Qwen/Qwen2.5-7B --json",
    _add_flags,
    _run,
)
