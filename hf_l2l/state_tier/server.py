"""The EPS of a model whose masters and optimizer state are on disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from hf_l2l.compat import without_interception
from hf_l2l.config import L2LConfig
from hf_l2l.eps.host_memory import HostMemory, Progress
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.memory.host_limits import is_in_memory
from hf_l2l.memory.ledger import STATE_WINDOW
from hf_l2l.memory.memory_estimate import estimate
from hf_l2l.memory.memory_report import MemoryReport
from hf_l2l.model.stacks import find_stacks
from hf_l2l.optim.layer_optimizers import unwrapped
from hf_l2l.option_names import option
from hf_l2l.ranks.team import launched_processes, met_team
from hf_l2l.runtime.tensors import size_text, tensor_bytes
from hf_l2l.shared_eps.server import eps_type
from hf_l2l.state_tier.files import Segment, can_map
from hf_l2l.state_tier.state import StateOnDisk

try:
    import resource
except ModuleNotFoundError:  # Windows, where `can_map` is False
    pass

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


_OTHER_FILES = 512
"""Of the program: sockets, data sets, workers."""


def state_folder(asked: str | os.PathLike[str] | None) -> str:
    """The folder for state on disk; the system's one for temporary files, if none is asked for."""
    return os.path.abspath(tempfile.gettempdir() if asked is None else asked)


def check_state_tier(model: nn.Module, config: L2LConfig) -> None:
    """Check that masters can be kept where `config` says, before anything is moved; the room for optimizer state is
    checked when the optimizer is known. Warns (UserWarning) if a folder for them is in host memory.

    Raises:
        ValueError: if they cannot, with the reason.
    """
    if config.state_tier == "host":
        return
    if launched_processes() > 1:
        raise ValueError(
            f"{option('state_tier')}='disk' is for one process (got {launched_processes()} ranks of a launcher); use "
            f"{option('state_tier')}='host', where all ranks of a host have one set of masters and state"
        )
    folder = state_folder(config.state_dir)
    _check_folder(folder)
    _check_room(folder, estimate(model, config).masters, "masters")
    _make_room_for_files(model, config)


def _make_room_for_files(model: nn.Module, config: L2LConfig) -> None:
    """Raise the soft limit of open files of this process, if that is needed and allowed.

    Raises:
        ValueError: if it may not have as many as the model needs.
    """
    layers = [layer for stack in find_stacks(model, config.layer_classes) for layer in stack.layers]
    inside = {p for layer in layers for p in layer.parameters()}
    outside = sum(1 for p in model.parameters() if p not in inside)
    # A layer has a file for masters that are trained, one for others and one for state, each with its map; a parameter
    # that is in no layer as many at most.
    needed = 6 * (len(layers) + outside) + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"{option('state_tier')}='disk' opens files for each layer, here up to {needed} (got a limit of {hard}); "
            "raise it (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _check_folder(folder: str) -> None:
    asked = f"{option('state_dir')}={folder!r}"
    if not can_map():
        raise ValueError(
            f"{option('state_tier')}='disk' needs space that is allocated ahead and advice on pages (Linux), which "
            f"this system does not have (got {asked}); use {option('state_tier')}='host'"
        )
    try:
        Segment(folder, 1)
    except OSError as error:
        raise ValueError(
            f"{option('state_dir')} must be a folder in which a file can be written and mapped (got {folder!r}: "
            f"{error.strerror or error}); give a folder on a fast disk of this machine"
        ) from error
    if is_in_memory(folder):
        warnings.warn(
            f"{option('state_dir')} is in host memory ({folder!r} is a tmpfs), so that state there takes as much of "
            f"it as {option('state_tier')}='host'; give a folder on a disk",
            stacklevel=2,
        )


def _check_room(folder: str, num_bytes: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ValueError(
            f"{option('state_dir')} must have room for {what}, {size_text(num_bytes)} (got {folder!r}, where "
            f"{size_text(free)} are free); make space, or name another folder"
        )


def eps_of(config: L2LConfig) -> Callable[..., EagerParamServer]:
    """What makes the EPS of a model: that of this process, with state in memory or on disk, or of the ranks of a
    launcher."""
    return eps_type(met_team(config.rank_timeout)) if config.state_tier == "host" else DiskEagerParamServer


class DiskEagerParamServer(EagerParamServer):
    """The EPS with masters and optimizer state on disk, of which a window is in host memory.

    Masters stay the model's parameters, and state stays the optimizer's: both can be used at any time, and what is not
    in memory is read then.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, config: L2LConfig, *, progress: Progress, **others: Any
    ) -> None:
        super().__init__(model, device, config, progress=progress, **others)
        self._is_ending, self._config = False, config
        self._known: WeakSet[torch.optim.Optimizer] = WeakSet()
        """Optimizers whose state moves to disk when it is loaded."""
        self.state = StateOnDisk(self.masters, state_folder(config.state_dir), config.state_window, progress)
        self.copies.uses = self.state
        self.updates.around = self.state.around_update
        self.updates.when_updated = self.state.keep_updated
        self.updates.always_splits = True  # one step of all layers would need all state at once
        self.updates.must_split = (
            f"{option('state_tier')}='disk' and {option('state_dir')} bring state to memory a layer at a time"
        )
        self.ledger.counts(STATE_WINDOW, self.state.window.num_bytes)
        self.state.adopt()

    def _make_memory(self, progress: Progress) -> HostMemory:
        memory = super()._make_memory(progress)
        memory.moves_masters = False  # they are uploaded through memory of one layer
        return memory

    def start_forward(self) -> None:
        """See `EagerParamServer.start_forward`; parameters that are new move to disk."""
        self.state.window.check()
        super().start_forward()
        self.state.adopt()

    def synchronize(self) -> None:
        """See `EagerParamServer.synchronize`.

        Raises:
            OSError: if the disk has failed: what it had to write may be lost.
        """
        super().synchronize()
        if not self._is_ending:
            self.state.window.check()

    def wrap(self, optimizer: OptimizerT) -> OptimizerT:
        """See `EagerParamServer.wrap`; state moves to disk.

        Raises:
            ValueError: if the disk has no room for it.
        """
        inner = unwrapped(optimizer)
        if inner not in self._known:
            need = estimate(self.model, self._config, inner).moments
            _check_room(state_folder(self._config.state_dir), need, "optimizer state")
        super().wrap(optimizer)
        if inner not in self._known:
            self._known.add(inner)
            self.state.keep_all(inner)
            self.updates.add_handle(inner, inner.register_load_state_dict_post_hook(self.state.keep_all))
        return optimizer

    def after_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        """See `EagerParamServer.after_step`; a step that was not made layer by layer may have made state."""
        super().after_step(optimizer, *args)
        if self.updates.stepped_whole:
            self.state.keep_all(optimizer)

    def _master_bytes(self) -> int:
        on_disk = self.state.on_disk
        return tensor_bytes(m.parameter for m in self.masters.on_host() if m.parameter not in on_disk)

    def _moment_bytes(self) -> int:
        return tensor_bytes(each for each in self._states_on_host())

    def _states_on_host(self) -> Iterator[torch.Tensor]:
        for optimizer in self.updates.optimizers:
            on_disk = self.state.kept_of(optimizer)
            for state in list(optimizer.state.values()):
                for each in list(state.values()):
                    if isinstance(each, torch.Tensor) and each.device.type == "cpu" and each not in on_disk:
                        yield each

    def memory_report(self) -> MemoryReport:
        """See `EagerParamServer.memory_report`."""
        self.ledger.saw(STATE_WINDOW, self.state.window.peak)
        return super().memory_report()

    def bytes_of_first_step(self) -> int:
        """See `EagerParamServer.bytes_of_first_step`; state goes to disk."""
        trained = [m for m in self.masters.on_host() if m.parameter.requires_grad and m.gradient_room is None]
        with without_interception():
            return (
                0 if any(o.state for o in self.updates.optimizers) else tensor_bytes(m.gradient_like for m in trained)
            )

    def release(self) -> list[torch.optim.Optimizer]:
        """See `EagerParamServer.release`; masters and state stay in their files, which are gone with them."""
        self._is_ending = True
        optimizers = super().release()
        try:
            self.state.window.check()
        except OSError as error:
            warnings.warn(f"weights and optimizer state may be those of an earlier step: {error}", stacklevel=3)
        self.state.release()
        return optimizers
