"""The part of `L2LTrainerMixin` that draws a run, and writes down what that needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_l2l.devices import execution_devices
from hf_l2l.log import logger
from hf_l2l.probe.rates import device_name
from hf_l2l.report.pictures.canvas import save
from hf_l2l.report.pictures.run_log import (
    NOT_OF_L2L,
    RUN_FILE,
    RunFacts,
    RunLog,
    append_row,
    begin_rows,
    read_rows,
    report_row,
)
from hf_l2l.report.pictures.run_picture import draw_run
from hf_l2l.runtime import stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NextTrainer: Any = object  # the trainer that the mixin is combined with comes after it


class PlotMixin(_NextTrainer):  # type: ignore[misc]  # transformers ships no types
    """`plot`, and the rows of `l2l_run.jsonl`: what a run measures of its machine is not in the Trainer's state, which
    is the same for equal runs."""

    _l2l_rows: Path | None = None
    """Where rows are written; None before a training, in other ranks than the first, and where it is impossible."""
    _l2l_is_generation: bool
    _l2l_config: Callable[[], Any]
    _streams: Callable[[], bool]

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw what the run has logged so far: memory by name, time by cause, losses. `hf-l2l plot` does the same
        from files.

        Args:
            path: a file to write the picture to, such as "run.png"; its ending names the form.

        Returns:
            matplotlib's `Figure`, which a notebook shows. What was not logged says why.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: if the file cannot be written.
        """
        why = NOT_OF_L2L if self._streams() else "not logged: the model has no layers that are streamed"
        rows = [] if self._l2l_rows is None else read_rows(self._l2l_rows)
        log = RunLog.of_state(asdict(self.state), self._facts(), rows, why)
        figure = draw_run(log, "trainer.plot()", path, "look at trainer.state.log_history")
        if path is not None:
            save(figure, "path", os.fspath(path))
        return figure

    def _facts(self) -> RunFacts:
        args, streams = self.args, self._streams()
        config = self._l2l_config() if streams else None
        devices = [args.device] if config is None else execution_devices(config.device)
        name = "" if devices[0] == stream.HOST else device_name(devices[0])
        where = ", ".join(map(str, devices))
        return RunFacts(
            type(self.model).__name__,
            sum(p.numel() for p in self.model.parameters()),
            self._train_batch_size,
            args.gradient_accumulation_steps,
            args.world_size,
            None if config is None else config.ubatch_size,
            where if name in ("", str(devices[0])) else f"{where} ({name})",
        )

    def _init_training_state(
        self, max_steps: int, steps_of_epoch: int, epochs: int, checkpoint: str | None, trial: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Overridden because each training begins without rows, or goes on with those of its checkpoint's."""
        found: tuple[int, int] = super()._init_training_state(
            max_steps, steps_of_epoch, epochs, checkpoint, trial, **kwargs
        )
        if self.is_world_process_zero():
            self._l2l_rows = Path(self._get_output_dir(trial)) / RUN_FILE
            with self._told_errors_of_rows():
                begin_rows(self._l2l_rows, goes_on=checkpoint is not None)
        return found

    @contextmanager
    def _told_errors_of_rows(self) -> Iterator[None]:
        """A training goes on without rows where they cannot be written."""
        try:
            yield
        except OSError as error:
            logger.warning(
                f"{self._l2l_rows} cannot be written ({error.strerror}): plot() will have no times and memory"
            )
            self._l2l_rows = None

    def _keep_row(self, row: Mapping[str, Any]) -> None:
        """Write down what was measured of the machine."""
        if self._l2l_rows is not None:
            with self._told_errors_of_rows():
                append_row(self._l2l_rows, row)

    def _keep_report(self) -> None:
        eps = self.eps
        if eps is not None:
            self._keep_row(report_row(self.state.global_step, self._facts(), eps.memory_report()))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Overridden because a checkpoint can be drawn, too. Those of `l2l_realtime_checkpoint` come too often."""
        if not self._l2l_is_generation:
            self._keep_report()
        super()._save_checkpoint(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Overridden to write down the memory of the whole training."""
        self._keep_report()
        return super()._finalize_training(*args, **kwargs)
