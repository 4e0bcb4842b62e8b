"""The plan in a checkpoint: a resumed training takes the options that were chosen for the first one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hf_l2l.config import L2LConfig
from hf_l2l.log import logger
from hf_l2l.option_names import option
from hf_l2l.plan.planner import CHOSEN, Plan

PLAN_FILE = "l2l_plan.json"
_WITHOUT_EFFECT = ("device", "trace", "spill_dir", "num_threads", "state_tier", "state_dir", "state_window")
"""Options that change nothing of a plan."""


def save_plan(checkpoint: Path, plan: Plan, asked: L2LConfig) -> None:
    """Write what was chosen, and for which options."""
    content = {"asked": _asked(asked), "chosen": plan.chosen, "batches": plan.batches, "budget_bytes": plan.budget}
    (checkpoint / PLAN_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def saved_choice(checkpoint: str | os.PathLike[str] | None, asked: L2LConfig) -> Mapping[str, Any] | None:
    """The options that were chosen when the checkpoint was saved, and "batches"; None without a plan, or, as a warning
    says, for other options than those of now.

    Raises:
        ValueError: if the file of the plan is damaged, or has options that this version does not have or choose.
    """
    file = None if checkpoint is None else Path(checkpoint) / PLAN_FILE
    if file is None or not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        before, chosen, batches = dict(found["asked"]), dict(found["chosen"]), int(found["batches"])
        L2LConfig(**{**before, **chosen})
        unknown = sorted(chosen.keys() - set(CHOSEN))
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is not chosen by a plan")
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"a checkpoint must have a whole {PLAN_FILE}, of this version of hf_l2l (got {file}: {error}); remove "
            "that file to have another plan made"
        ) from None
    then, now = L2LConfig(**before), L2LConfig(**_asked(asked))
    if then == now:
        return {**chosen, "batches": batches}
    changed = [option(each.name) for each in fields(now) if getattr(then, each.name) != getattr(now, each.name)]
    logger.warning(
        "the plan of the checkpoint was made for other options (%s), and another one is made: the training goes on "
        "with sums in another order",
        ", ".join(changed),
    )
    return None


def _asked(config: L2LConfig) -> dict[str, Any]:
    """The options that are set, without those that change nothing of a plan."""
    defaults = {each.name: each.default for each in fields(L2LConfig)}
    values = asdict(config)
    return {k: v for k, v in values.items() if v != defaults[k] and k not in _WITHOUT_EFFECT}
