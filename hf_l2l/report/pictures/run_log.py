"""`RunLog`: what a run logged of its loss, its time and its memory.

Losses are in the state of its Trainer (`trainer_state.json`), which is the same for equal runs. What a run measures of
its machine is in rows of a file in its `output_dir`, `RUN_FILE`, which has a JSON object in each line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hf_l2l.memory.memory_report import TOTAL, Bytes

RUN_FILE = "l2l_run.jsonl"
"""Its rows have a `step`, and either the times of a log line or what the run was, with its memory report. Of two rows
of a step the later one counts, since a resumed training makes the steps after its checkpoint again."""

NOT_OF_L2L = (
    f"not in {RUN_FILE} of the output_dir: layers did not run layer to layer, or a checkpoint was moved away from it"
)
NO_LOG = "nothing was logged so far"
MEMORY_COMES_LATER = f"not yet in {RUN_FILE}: it comes with the first checkpoint or the end of the training"
MEMORY_MAY_COME = f"{MEMORY_COMES_LATER}, unless layers did not run layer to layer"


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
    """Panel ("memory", "time", "loss") -> why there is nothing to draw in it."""

    @classmethod
    def of_state(
        cls,
        state: Mapping[str, Any],
        facts: RunFacts,
        rows: Sequence[Mapping[str, Any]] = (),
        without_times: str = NOT_OF_L2L,
    ) -> RunLog:
        """Of the fields of a `TrainerState`, and the rows of the run. `without_times` says why it has no times, if it
        has none.

        Raises:
            ValueError: if it is no such state.
        """
        history = state.get("log_history")
        if not isinstance(history, list) or not all(isinstance(entry, dict) and "step" in entry for entry in history):
            raise ValueError("it has no log of a Trainer")
        losses = [(entry["step"], float(entry["loss"])) for entry in history if "loss" in entry]
        measured = {row["step"]: row for row in rows if "memory" not in row}
        logged = [entry | measured.get(entry["step"], {}) for entry in history if "loss" in entry]
        times, evaluations = list(_times(logged)), _evaluations(history)
        peaks = [entry["device_peak_bytes"] for entry in logged if "device_peak_bytes" in entry]
        steps, missing = int(state.get("global_step", 0)), {}
        memory = _last_report(rows, steps).get("memory")
        # Times are logged with losses: a run without losses does not tell whether it has times.
        is_open = not losses and without_times == NOT_OF_L2L
        if times and not any(each.upload or each.download or each.eps or each.compute for each in times):
            times, missing["time"] = [], "the step time was not logged, and nothing was waited for"
        elif not times:
            missing["time"] = _no_loss(steps) if is_open else without_times
        if memory is None:
            missing["memory"] = MEMORY_COMES_LATER if times else MEMORY_MAY_COME if is_open else without_times
        if not losses and not evaluations:
            missing["loss"] = _no_loss(steps)
            missing = missing if steps else dict.fromkeys(("memory", "time", "loss"), NO_LOG)
        return cls(
            facts,
            steps,
            None if memory is None else _memory(memory),
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


def report_row(step: int, facts: RunFacts, report: Mapping[str, Mapping[str, Bytes]]) -> dict[str, Any]:
    """The row with what a run was, and its memory up to `step`."""
    memory = {
        tier: {name: dict(size) for name, size in names.items() if size["peak"] or name == TOTAL}
        for tier, names in report.items()
    }
    return {"step": step, "facts": asdict(facts), "memory": memory}


def begin_rows(file: Path, *, goes_on: bool) -> None:
    """Get ready for the rows of a training, which goes on with those of an earlier one, or begins without any.

    Raises:
        OSError: if the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if not goes_on:
        file.unlink(missing_ok=True)
    elif file.is_file() and not file.read_bytes().endswith(b"\n"):  # the one before was killed while it wrote
        with file.open("a", encoding="utf-8") as rows:
            rows.write("\n")


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    """Write a row at the end of a `RUN_FILE`.

    Raises:
        OSError: if it cannot be written.
    """
    with file.open("a", encoding="utf-8") as rows:
        rows.write(f"{json.dumps(row)}\n")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a `RUN_FILE`; none if there is no such file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if a line is no row; the text is the reason alone.
    """
    if not file.is_file():
        return []
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # what a training that was killed has written of a row
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"line {number} of {file} is no row of a run")
        found.append(row)
    return found


def read_run(file: Path) -> RunLog:
    """Of a `trainer_state.json`, and the rows in its folder, or, for that of a checkpoint, in the folder above.

    Raises:
        ValueError: if it cannot be read, or is none; the text is the reason alone.
    """
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("it has no log of a Trainer")
        of_checkpoint = file.parent.resolve().name.startswith("checkpoint-")
        rows = read_rows((file.resolve().parent.parent if of_checkpoint else file.parent) / RUN_FILE)
        found = _last_report(rows, int(state.get("global_step", 0))).get("facts")
        facts = _guessed(state, file.parent) if found is None else RunFacts.of(found)
        return RunLog.of_state(state, facts, rows)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("it has no log of a Trainer") from error


def _last_report(rows: Sequence[Mapping[str, Any]], steps: int) -> Mapping[str, Any]:
    """The last row, up to so many steps, that says what the run was; empty if there is none."""
    return next((row for row in reversed(rows) if "memory" in row and row["step"] <= steps), {})


def _memory(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Bytes]]:
    return {
        tier: {name: {when: int(size[when]) for when in ("now", "peak")} for name, size in names.items()}
        for tier, names in found.items()
    }


def _guessed(state: Mapping[str, Any], folder: Path) -> RunFacts:
    """What a state without rows, and the model's config beside it, tell of the run."""
    rows = state.get("train_batch_size")
    config = folder / "config.json"
    names = json.loads(config.read_text(encoding="utf-8")).get("architectures") if config.is_file() else None
    return RunFacts(names[0] if names else "a model of which the run logged no name", rows=rows)


def _times(history: list[dict[str, Any]]) -> Iterator[StepTime]:
    after = 0
    for entry in history:
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
