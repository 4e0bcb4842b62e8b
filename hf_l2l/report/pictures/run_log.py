"""`RunLog`: what a run logged of its loss, its time and its memory, from the state of its Trainer.

The state is that of `trainer_state.json`: its `log_history` has losses, waits and the device's peak, and the entry
`RECORD` of its `stateful_callbacks` what the run was, with its memory report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hf_l2l.memory.memory_report import TOTAL, Bytes

RECORD = "L2LRun"
"""The name under which the state keeps what the run was. No callback has it: it is not restored."""

TIMES_ARE_OFF = "not logged: l2l_log_times=False"
NOT_OF_L2L = "not logged: l2l_log_times=False, or layers that did not run layer to layer"
NO_LOG = "nothing was logged so far"
MEMORY_COMES_LATER = "not in this state: it is there from the first checkpoint or the end of the training on"
MEMORY_MAY_COME = f"{MEMORY_COMES_LATER}, unless l2l_log_times=False or layers did not run layer to layer"


@dataclass(frozen=True)
class RunFacts:
    """What a run trained, and on what."""

    model: str
    """The name of its class."""
    parameters: int | None = None
    rows: int | None = None
    """Of a device batch."""
    accumulated: int = 1
    """Device batches of a step."""
    ranks: int = 1
    ubatch_size: int | None = None
    device: str = ""
    """Those that layers ran on, with the name of the first."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> RunFacts:
        """Of what `asdict` made."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in names})

    def lines(self) -> tuple[str, str]:
        """The title of a picture, and what belongs below it."""
        size = "" if self.parameters is None else f", {_count_text(self.parameters)} parameters"
        batches = f", {self.accumulated} of them a step" if self.accumulated > 1 else ""
        ranks = f", on each of {self.ranks} ranks" if self.ranks > 1 else ""
        ubatch = "" if self.ubatch_size is None else f", ubatch_size={self.ubatch_size}"
        batch = "" if self.rows is None else f"device batch of {self.rows} row{'s' * (self.rows != 1)}"
        about = [f"{batch}{ubatch}{batches}{ranks}" if batch else "", self.device and f"on {self.device}"]
        return f"{self.model}{size}", "; ".join(filter(None, about))


@dataclass(frozen=True)
class StepTime:
    """Mean seconds per optimizer step, of the steps after `after` up to `step`; None for what was not logged."""

    after: int
    step: int
    upload: float
    download: float
    eps: float
    compute: float | None
    """The rest of a step."""


@dataclass(frozen=True)
class RunLog:
    """What there is to draw of a run; what is not there has its reason in `missing`."""

    facts: RunFacts
    steps: int
    memory: Mapping[str, Mapping[str, Bytes]] | None
    """Tier -> name -> bytes, as in `MemoryReport`, without names that never had any."""
    device_peak: int | None
    """What the allocator of the device has held at most, in bytes."""
    times: list[StepTime]
    losses: list[tuple[int, float]]
    """Of steps: the mean since the one before."""
    evaluations: dict[str, list[tuple[int, float]]]
    """Of each data set, losses by step."""
    missing: dict[str, str]
    """Panel ("memory", "time", "loss") -> why it is empty."""

    @classmethod
    def of_state(cls, state: Mapping[str, Any], facts: RunFacts, without_times: str = NOT_OF_L2L) -> RunLog:
        """Of the fields of a `TrainerState`. `without_times` says why it has no times, if it has none.

        Raises:
            ValueError: if it is no such state.
        """
        history = state.get("log_history")
        if not isinstance(history, list) or not all(isinstance(entry, dict) and "step" in entry for entry in history):
            raise ValueError("it has no log of a Trainer")
        losses = [(entry["step"], float(entry["loss"])) for entry in history if "loss" in entry]
        record, times = record_of(state), list(_times(history))
        peaks = [entry["device_peak_bytes"] for entry in history if "device_peak_bytes" in entry]
        evaluations = _evaluations(history)
        steps, missing = int(state.get("global_step", 0)), {}
        # Times are logged with losses: a run without losses does not tell whether it has times.
        is_open = not losses and without_times == NOT_OF_L2L
        if not times:
            missing["time"] = _no_loss(steps) if is_open else without_times
        if "memory" not in record:
            missing["memory"] = MEMORY_COMES_LATER if times else MEMORY_MAY_COME if is_open else without_times
        if not losses and not evaluations:
            missing["loss"] = _no_loss(steps)
            missing = missing if steps else dict.fromkeys(("memory", "time", "loss"), NO_LOG)
        return cls(
            facts,
            steps,
            _memory(record["memory"]) if "memory" in record else None,
            max(peaks, default=None),
            times,
            losses,
            evaluations,
            missing,
        )

    @property
    def why_no_training_loss(self) -> str:
        """Why `losses` is empty; empty if it is not."""
        return "" if self.losses else _no_loss(self.steps)

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`: with None for numbers that are not finite, which JSON does not have."""
        found: dict[str, Any] = _finite(asdict(self))
        return found


def record_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state says of its run: `facts` and `memory`; empty if it says nothing."""
    found = (state.get("stateful_callbacks") or {}).get(RECORD, {})
    record: dict[str, Any] = found.get("attributes", {})
    return record


def record(facts: RunFacts, report: Mapping[str, Mapping[str, Bytes]]) -> dict[str, Any]:
    """What a state keeps of a run under the name `RECORD`, in the form of a callback's state."""
    memory = {
        tier: {name: dict(size) for name, size in names.items() if size["peak"] or name == TOTAL}
        for tier, names in report.items()
    }
    return {"args": {}, "attributes": {"facts": asdict(facts), "memory": memory}}


def read_run(file: Path) -> RunLog:
    """Of a `trainer_state.json`.

    Raises:
        ValueError: if it cannot be read, or is none; the text is the reason alone.
    """
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("it has no log of a Trainer")
        found = record_of(state).get("facts")
        facts = _guessed(state, file.parent) if found is None else RunFacts.of(found)
        return RunLog.of_state(state, facts)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("it has no log of a Trainer") from error


def _memory(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Bytes]]:
    return {
        tier: {name: {when: int(size[when]) for when in ("now", "peak")} for name, size in names.items()}
        for tier, names in found.items()
    }


def _guessed(state: Mapping[str, Any], folder: Path) -> RunFacts:
    """What a state without a record, and the model's config beside it, tell of the run."""
    rows = state.get("train_batch_size")
    config = folder / "config.json"
    names = json.loads(config.read_text(encoding="utf-8")).get("architectures") if config.is_file() else None
    return RunFacts(names[0] if names else "a model of which the run logged no name", rows=rows)


def _times(history: list[dict[str, Any]]) -> Iterator[StepTime]:
    after = 0
    for entry in history:
        if "loss" not in entry:
            continue
        step, before, after = entry["step"], after, entry["step"]
        if "l2l_wait_upload_s" in entry and step > before:
            upload, download, eps = (float(entry[f"l2l_wait_{cause}_s"]) for cause in ("upload", "download", "eps"))
            whole = entry.get("l2l_step_s")
            rest = None if whole is None else max(0.0, whole - upload - download - eps)
            yield StepTime(before, step, upload, download, eps, rest)


def _evaluations(history: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in history:
        for name, value in entry.items():
            if name.startswith("eval_") and name.endswith("_loss"):
                found.setdefault(name, []).append((entry["step"], float(value)))
    return found


def _no_loss(steps: int) -> str:
    return f"no training loss was logged in {steps} step{'s' * (steps != 1)}; set logging_steps"


def _finite(value: Any) -> Any:
    """`value` with None for each number in it that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _count_text(count: int) -> str:
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
