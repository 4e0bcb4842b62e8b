"""The part of `L2LTrainerMixin` that draws a run, and keeps in its state what that needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hf_l2l.devices import execution_devices
from hf_l2l.probe.rates import device_name
from hf_l2l.report.pictures.canvas import save
from hf_l2l.report.pictures.run_log import NOT_OF_L2L, RECORD, TIMES_ARE_OFF, RunFacts, RunLog, record
from hf_l2l.report.pictures.run_picture import draw_run
from hf_l2l.runtime import stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NextTrainer: Any = object  # the trainer that the mixin is combined with comes after it


class PlotMixin(_NextTrainer):  # type: ignore[misc]  # transformers ships no types
    """`plot`. With `l2l_log_times`, checkpoints and the state after a training have what the run was, and its memory
    report."""

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
        why = TIMES_ARE_OFF if not self._logs_times else NOT_OF_L2L
        if not self._streams():
            why = "not logged: the model has no layers that are streamed"
        log = RunLog.of_state(asdict(self.state), self._facts(), why)
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

    def _keep_run(self) -> None:
        """Keep what the run was, and its memory, in the state, unless equal runs are to have equal states."""
        eps = self.eps
        if eps is not None and self._logs_times and self.state.is_world_process_zero:
            self.state.stateful_callbacks[RECORD] = record(self._facts(), eps.memory_report())

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Overridden because `trainer_state.json` tells what the run was."""
        self._keep_run()
        super()._save_checkpoint(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Overridden because the state after a training tells the same, for `save_state` and `plot`."""
        self._keep_run()
        return super()._finalize_training(*args, **kwargs)

    def _load_callback_state(self) -> None:
        """Overridden because no callback has the name of what the run before this one was."""
        self.state.stateful_callbacks.pop(RECORD, None)
        super()._load_callback_state()
