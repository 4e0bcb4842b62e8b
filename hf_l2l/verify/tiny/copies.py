"""Makes the tiny copy of a config: from the family of its type, with what switches behaviour in the config; or, for a
type without a family, from the config itself with tiny sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_l2l.model_source import shapes_of
from hf_l2l.verify.cases import FEWER_ROWS
from hf_l2l.verify.families import GROUPS
from hf_l2l.verify.family import Family, class_named
from hf_l2l.verify.results import Caught
from hf_l2l.verify.tiny.fields import TOKEN_IDS, Fields, fields_of, merged, shrunk, switches
from hf_l2l.verify.tiny.heads import head_of

MOST_PARAMETERS = 5_000_000
"""Of a tiny copy: one with more has sizes that are not known."""

REFUSALS = "L2L|layer to layer|stack of layers"
"""What the engine says when it refuses a model."""

MAY_BE_FP32 = "fields of the config may have it compute in fp32"


@dataclass(frozen=True)
class TinyCopy:
    """A tiny model like another one."""

    family: Family
    """The model, and its batches."""
    of_family: str | None
    """The family of the compatibility check that it begins with; None if the config itself was made small."""
    carried: tuple[str, ...]
    """Fields of the config that the copy takes over from it, beside those that agree anyway."""
    left_out: tuple[str, ...]
    """Fields that do not fit the copy."""
    notes: tuple[str, ...]


def tiny_copy(config: Any, class_name: str) -> TinyCopy:
    """The tiny copy of a config and a class of transformers.

    Raises:
        ValueError: if no batch is known for the class, or no tiny copy of the config trains; one sentence with what
            was tried.
    """
    alike = [f for group in GROUPS.values() for f in group if f.config_class == type(config).__name__]
    same = _nearest([family for family in alike if family.model_class == class_name], config)
    head = head_of(class_name, config)
    if same is not None:
        return _of_family(same, same.name, config, ())
    if head is not None and alike:
        other = replace(alike[0], model_class=class_name, batch=head.batch, loss=head.loss, generates=head.generates)
        return _of_family(other, alike[0].name, config, ())
    if head is not None:
        made = Family(class_name, class_name, type(config).__name__, {}, head.batch, head.loss, head.generates)
        return _of_config(made, config)
    if alike:
        note = f"no batch is known for a {class_name}: checked as a {alike[0].model_class} of the same config"
        return _of_family(alike[0], alike[0].name, config, (note,))
    raise ValueError(
        f"a batch must be known for the class of the model (got {class_name}, whose head or inputs are not); choose "
        "another one with --class, such as AutoModel, or compare the model in a test of your own"
    )


def _nearest(families: Sequence[Family], config: Any) -> Family | None:
    """The family whose config is switched most like this one, the first of several; None without any."""
    if len(families) < 2:
        return families[0] if families else None
    fields = fields_of(config)
    return min(families, key=lambda family: len(switches(fields, fields_of(_config_of(family)))))


def _config_of(family: Family) -> Any:
    return class_named(family.config_class)(**copy.deepcopy(dict(family.sizes)))


def _of_family(family: Family, name: str, config: Any, notes: tuple[str, ...]) -> TinyCopy:
    family = replace(family, refused="|".join(filter(None, (family.refused, REFUSALS))))
    plain = failure(family, may_draw=True)
    if plain is not None:
        raise ValueError(
            f"a tiny copy must train without L2L (a {family.model_class} with the sizes of the family {name!r} does "
            f"not: {plain}); choose another class with --class"
        )
    draws = failure(family) is not None  # as much as the checks of families know
    found = switches(fields_of(config), fields_of(_config_of(family)))
    carried = dict(found)
    if failure(_with(family, found.values()), may_draw=draws) is not None:
        carried = {}
        for each, value in found.items():
            if failure(_with(family, [*carried.values(), value]), may_draw=draws) is None:
                carried[each] = value
    left_out = tuple(each for each in found if each not in carried)
    return TinyCopy(_with(family, carried.values()) if carried else family, name, tuple(carried), left_out, notes)


def _with(family: Family, given: Iterable[Fields]) -> Family:
    """The family with these arguments of its config, and the tolerance for those that no one has tried."""
    sizes = dict(family.sizes)
    for each in given:
        sizes = merged(sizes, each)
    return replace(family, sizes=sizes, fp32=family.fp32 or MAY_BE_FP32)


def _of_config(family: Family, config: Any) -> TinyCopy:
    family = replace(family, refused=REFUSALS, fp32=MAY_BE_FP32)
    special = TOKEN_IDS if config.is_encoder_decoder else {}  # which many of them need, and some configs lack
    tried = []
    for told, bold in (("all sizes that have known names", False), ("all that have the name of a size", True)):
        made = replace(family, sizes={**special, **shrunk(fields_of(config), bold=bold)})
        for dtype in (torch.float64, torch.float32):
            for random in ("", "its training draws random numbers"):
                attempt = replace(made, dtype=dtype, random=random)
                why = failure(attempt)
                if why is None:
                    return TinyCopy(attempt, None, tuple(attempt.sizes), (), ())
                tried.append(f"{told}, in {str(dtype).removeprefix('torch.')}: {why}")
    first, last = tried[0], tried[-1]
    raise ValueError(
        f"the config must have sizes that can be made small (tried {first}; at last {last}); its type, "
        f"{config.model_type}, has no family in the compatibility check, so compare the model in a test of your own"
    )


def failure(family: Family, *, may_draw: bool = False) -> str | None:
    """Why the tiny model is of no use, None if it trains: an error without L2L, too many parameters, a loss that is
    not finite, or, unless it `may_draw`, random numbers in its training."""
    found = ""
    with (caught := Caught(plain=True)):
        found = _tried(family, may_draw)
    return caught.result.text if caught.result is not None else found or None


def _tried(family: Family, may_draw: bool) -> str:
    count = sum(p.numel() for p in shapes_of(_config_of(family), model_class=family.model_class).parameters())
    if count > MOST_PARAMETERS:
        return f"it still has {count} parameters"
    model = family.build(family.dtype)
    batch = family.batch(model, FEWER_ROWS[0])
    losses = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loss = family.loss(model(**batch))
        losses.append(float(loss.detach()))
    if not all(map(math.isfinite, losses)):
        return f"its loss is {losses[0]}"
    if losses[0] != losses[1] and not may_draw:
        return "its training draws random numbers"
    loss.backward()
    return ""
