"""What `L2LTrainer` measures of the steps before a log with a training loss, and what of it the log has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_l2l.ranks.team import Team
from hf_l2l.report.timeline import Timeline
from hf_l2l.runtime import stream


def log_entries(timeline: Timeline, tokens: int | None) -> dict[str, float | str]:
    """What was measured of the steps since the last log; without steps since then there is nothing.

    `device_peak_bytes` is what the allocator of the device has held at most since the process began, or since the
    program has called `torch.accelerator.reset_peak_memory_stats()`, which is left to the program. It is absent
    where layers run on the CPU.

    Args:
        timeline: of the engine.
        tokens: tokens of the inputs of these steps, of all ranks; None if the inputs are not tokens.
    """
    averages = timeline.averages()
    if averages is None:
        return {}
    entries: dict[str, float | str] = {
        "l2l_wait_upload_s": averages.upload_s,
        "l2l_wait_download_s": averages.download_s,
        "l2l_wait_eps_s": averages.eps_s,
        "l2l_step_s": averages.step_s,
        "l2l_bound": averages.bound,
    }
    if tokens is not None:
        entries["l2l_tokens_per_s"] = tokens / (averages.steps * averages.step_s)
    usage = stream.memory_in_use(timeline.device)
    if usage is not None:
        entries["device_peak_bytes"] = usage[1]
    return entries


def shown(measured: Mapping[str, float | str], *, on_device: bool, all_times: bool) -> dict[str, float | str]:
    """What of it the log has: `l2l_tokens_per_s`, and on a device `l2l_device_peak_gib` and `l2l_exposed`, the share
    of a step in which the device waited for the link, the host or a disk; with `all_times`, the times behind that."""
    entries: dict[str, float | str] = {}
    if "l2l_tokens_per_s" in measured:
        entries["l2l_tokens_per_s"] = measured["l2l_tokens_per_s"]
    if "device_peak_bytes" in measured:
        entries["l2l_device_peak_gib"] = float(measured["device_peak_bytes"]) / 2**30
    if on_device:
        waits = sum(float(measured[f"l2l_wait_{cause}_s"]) for cause in ("upload", "download", "eps"))
        entries["l2l_exposed"] = min(1.0, waits / max(float(measured["l2l_step_s"]), 1e-9))
    if all_times:
        of_link = () if on_device else ("l2l_wait_upload_s", "l2l_wait_download_s")
        entries |= {name: measured[name] for name in _TIMES if name not in of_link}
    return entries


_TIMES = ("l2l_step_s", "l2l_wait_upload_s", "l2l_wait_download_s", "l2l_wait_eps_s", "l2l_bound")


class TokenCount:
    """Counts the tokens of training steps, padding included, as transformers does for `num_input_tokens_seen`."""

    def __init__(self) -> None:
        self._count: int | None = 0
        self._team: Team | None = None

    @property
    def count(self) -> int | None:
        """Since the last `restart`, of all ranks; None if the inputs are not tokens."""
        return self._count if self._count is None or self._team is None else self._team.counted

    def add(self, inputs: Any, name: str, team: Team | None) -> None:
        """Count those of a batch whose tokens are called `name`; the ranks of `team` add up theirs in their steps."""
        self._team = team
        tokens = inputs.get(name) if isinstance(inputs, Mapping) else None  # some trainers get lists of rows
        if self._count is not None and isinstance(tokens, torch.Tensor) and not tokens.is_floating_point():
            self._count += tokens.numel()
            if team is not None:
                team.counts += tokens.numel()
        else:
            self._count = None

    def restart(self) -> None:
        """Count from 0 again."""
        self._count = 0
        if self._team is not None:
            self._team.counted = 0
