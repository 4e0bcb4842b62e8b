"""What can be told before the first step about whether the batches of a step may run as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_l2l.compat import mixes_rows
from hf_l2l.config import L2LConfig
from hf_l2l.option_names import option

_OWN = ("transformers.", "hf_l2l.")
"""Modules whose methods of a Trainer are known."""


def why_not_folded(trainer: Any, config: L2LConfig) -> str | None:
    """The reason why `trainer`, one of transformers, must run the batches of a step one by one; None if it is not
    known to have to. `config` are the options that its model is attached with."""
    args, model = trainer.args, trainer.model
    if getattr(args, "l2l_merge_accumulation", "auto") == "off":
        return "l2l_merge_accumulation='off'"
    if getattr(args, "world_size", 1) > 1:
        return "with several ranks, gradients are added after each batch of all of them"
    method = own_method(trainer)
    if method is not None:
        return f"{method}, which may do something else with all rows at once"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func may compute something else of all rows at once"
    if args.label_smoothing_factor:
        return "label_smoothing_factor makes the Trainer compute the loss, and not the model"
    if getattr(args, "neftune_noise_alpha", None) is not None:
        return "the noise of neftune_noise_alpha depends on the longest row of a batch"
    if not trainer.model_accepts_loss_kwargs:
        return f"the loss of a {type(model).__name__} is a mean over each batch: it takes no num_items_in_batch"
    if getattr(trainer, "loss_is_scaled_for_ga", None) is False:
        return "loss_is_scaled_for_ga=False says that the loss is a mean over each batch"
    if config.resident == "all":
        return "nothing of a model whose layers are all resident travels"
    if config.kept_graphs:
        return f"{option('kept_graphs')} would keep the graphs of all batches at once"
    if any(_depends_on_longest_row(getattr(module, "config", None)) for module in model.modules()):
        return "its rotary positions depend on the longest row of a batch"
    norm = next((name for name, module in model.named_modules() if mixes_rows(module)), None)
    if norm is not None:
        return f"{norm} normalizes over the rows of each batch"
    if _returns_router_logits(model):
        return "the model adds an auxiliary loss of its routers, a mean over each batch (output_router_logits)"
    return None


def own_method(trainer: Any, names: Sequence[str] = ("compute_loss", "training_step")) -> str | None:
    """Says which class of `trainer` computes the loss, or trains with a batch, in a method of its own; None if none
    does."""
    for name in names:
        owner = _replaced_by(trainer, name)
        if owner is not None:
            return f"{owner} has a {name} of its own"
    return None


def _replaced_by(trainer: Any, name: str) -> str | None:
    """The class that has a method `name` of its own; None if all are known ones."""
    if name in vars(trainer):
        return "this trainer"
    for kind in type(trainer).__mro__:
        if name in vars(kind) and not str(getattr(vars(kind)[name], "__module__", "")).startswith(_OWN):
            return str(kind.__name__)
    return None


_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the length of the call."""


def _depends_on_longest_row(config: Any) -> bool:
    def says_so(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        kinds = (value.get("rope_type"), value.get("type"))
        return any(kind in _BY_LENGTH for kind in kinds) or any(map(says_so, value.values()))

    return any(says_so(getattr(config, name, None)) for name in ("rope_parameters", "rope_scaling"))


def _returns_router_logits(model: Any) -> bool:
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "output_router_logits", False) is True for config in configs)
