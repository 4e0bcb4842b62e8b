"""Where the models and optimizers of a trainer are: attached ones stay on the host; and models that are attached
beside the trained one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.serialization import config as serialization
from transformers import PreTrainedModel

from hf_l2l.config import LAYER_COUNTS, L2LConfig
from hf_l2l.devices import execution_device
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.hf.attach import attach_new, attachment_of
from hf_l2l.hf.preparation import devices_of, is_placed, make_masters_fp32
from hf_l2l.model.precision import computing_dtype
from hf_l2l.model.stacks import find_stacks
from hf_l2l.option_names import options_of_the_trainer
from hf_l2l.ranks.team import has_values_that_count, process_group_size
from hf_l2l.shared_eps.server import SharedEagerParamServer
from hf_l2l.state_tier.server import DiskEagerParamServer


def attach_companion(model: nn.Module, config: L2LConfig) -> EagerParamServer:
    """Attach a model that runs beside a trained one for inference only, such as a reference model.

    Its weights keep their dtypes, since nothing updates them, and are streamed; the trace has the trained model alone.

    Raises:
        ValueError: as `attach_l2l`.
    """
    classes = companion_classes(model, config)
    streamed: dict[str, Any] = {"resident": "none", "resident_update": "device", **dict.fromkeys(LAYER_COUNTS, 0)}
    streamed["device_memory_budget"] = None
    return attach_new(model, replace(config, trace=None, layer_classes=classes, **streamed), trains=False)


def companion_classes(model: nn.Module, config: L2LConfig) -> tuple[str, ...] | None:
    """The classes of a companion's layers: those that `config` names for the trained model, if it has them all."""
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return config.layer_classes if names.issuperset(config.layer_classes or ()) else None


def bind_companions(model: nn.Module, companions: Sequence[nn.Module], config: L2LConfig) -> None:
    """Attach those of `companions` that are not attached any more, and have them detached with `model`."""
    attached = attachment_of(model)
    assert attached is not None
    attached.companions = list(companions)
    for companion in companions:
        if attachment_of(companion) is None:
            attach_companion(companion, config)


def leave_models_where_they_are(trainer: Any, config: Callable[[], L2LConfig], companions: list[nn.Module]) -> None:
    """Make the accelerator of `trainer` move no attached model, and no optimizer of one, to the device.

    A further model that it prepares for evaluation, such as a reference model, is attached with `config`, and added to
    `companions`; unless it has no layers, or the program has put it on the device itself.
    """
    # Weak references: in a cycle, processes of data loaders would end only when garbage is collected, and slowly.
    own, accelerator, kind = weakref.ref(trainer), weakref.proxy(trainer.accelerator), type(trainer.accelerator)
    made, device = weakref.WeakMethod(config), trainer.args.device

    @options_of_the_trainer()
    def attach_beside(model: nn.Module) -> None:
        options = made()
        assert options is not None
        wanted = options()
        if find_stacks(model, companion_classes(model, wanted)) and not is_placed(model, device):
            attach_companion(model, wanted)
            companions.append(model)

    def model_where_it_is(
        model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        trainer = own()
        is_other = trainer is not None and model is not trainer.model
        if evaluation_mode and is_other and attachment_of(model) is None:
            attach_beside(model)
        is_attached = attachment_of(model) is not None
        placed = False if is_attached else device_placement
        # The EPS adds the gradients of ranks: a model that is prepared for evaluation is not wrapped for that.
        unwrapped = evaluation_mode or (is_attached and process_group_size() > 1)
        prepared: nn.Module = kind.prepare_model(
            accelerator, model, device_placement=placed, evaluation_mode=unwrapped
        )
        return prepared

    def optimizer_where_it_is(optimizer: Any, device_placement: bool | None = None) -> Any:
        trainer = own()
        placed = device_placement if trainer is None or attachment_of(trainer.model) is None else False
        return kind.prepare_optimizer(accelerator, optimizer, device_placement=placed)

    trainer.accelerator.prepare_model = model_where_it_is
    trainer.accelerator.prepare_optimizer = optimizer_where_it_is


if TYPE_CHECKING:
    from transformers import Trainer as _Next
else:
    _Next = object  # the trainer that the mixin is combined with comes after it


_serialization: Any = serialization  # whose functions torch adds without types


class _OneProcess:
    """Arguments of a Trainer that trains alone, and the same otherwise."""

    world_size = 1

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


class AsOneDeviceMixin(_Next):  # type: ignore[misc]  # transformers ships no types
    """What a Trainer does for `DataParallel` if there are several devices: one batch here, one model, one loss."""

    args: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Overridden because other trainers, as those of TRL, refuse several devices at their end of this, which with
        them means `DataParallel`: the devices are counted afterwards."""
        self._count: int | None = None
        """How many devices the layers run on; None without layers."""
        self._is_made = False
        self._until_the_loop = ExitStack()
        super().__init__(*args, **kwargs)
        self._is_made = True
        if self._count is not None:
            self._tell_count()
            self._train_batch_size = self.args.train_batch_size  # all that the Trainer has computed of their number

    def _use_devices(self, asked: Any) -> None:
        """Make batches as large as if each of the devices `asked` for had one, as with any Trainer; under a launcher,
        any Trainer has one batch per process."""
        devices = devices_of(self.args, asked)
        self._count = len(devices) if self.args.world_size == 1 else 1
        self._tell_count()

    def _tell_count(self) -> None:
        assert self._count is not None
        if max(self.args.n_gpu, self._count) > 1:  # 0 is its count where devices are not CUDA's
            self.args._n_gpu = self._count if self._is_made else 1

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Overridden for the end of what `_hp_search_setup` begins, also if the training fails before its loop."""
        with self._until_the_loop:
            return super().train(*args, **kwargs)

    def _hp_search_setup(self, *args: Any, **kwargs: Any) -> None:
        """Overridden because `debug="underflow_overflow"`, which is looked at between this and the loop, is refused
        for the replicas of `DataParallel`."""
        super()._hp_search_setup(*args, **kwargs)
        self._until_the_loop.enter_context(self._one_device())

    def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Overridden because batches are those of all devices again."""
        self._until_the_loop.close()
        return super()._inner_training_loop(batch_size, *args, **kwargs)

    def _wrap_model(self, *args: Any, **kwargs: Any) -> Any:
        """Overridden because `DataParallel` would copy the model to each device."""
        with self._one_device():
            return super()._wrap_model(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Overridden because the loss of a device's rows is multiplied by the devices, where it is a sum over all."""
        with self._one_device():
            return super().compute_loss(*args, **kwargs)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Overridden because the items of a batch are divided by the devices."""
        with self._one_device():
            return super()._get_num_items_in_batch(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Overridden because gradients of several ranks are in memory of all of them, and each is scaled by one. Where
        losses with parameters of their own are trained, too, transformers clips those of the model alone."""
        eps = self._eps_of_ranks()
        own = self.model.parameters()
        return super()._clip_grad_norm(model) if eps is None else eps.clip_norm_of(own, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Overridden for the same reason: transformers clips there, too, to a norm without limit."""
        eps = self._eps_of_ranks() if grad_norm is None else None
        if eps is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        return eps.clip_norm_of(self.model.parameters(), float("inf"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """Overridden because the masters of a model that was loaded in 16 bits are saved in fp32, and because ranks
        after the first load no weights that they drop when the model is attached."""
        config = self._asked_config()
        if attachment_of(self.model) is None and self._streams():
            if computing_dtype(config.cmp, execution_device(config.device)) is not None:
                make_masters_fp32(self.model)
            # What else a checkpoint has, as adapters, is not in the parameters alone.
            if not has_values_that_count() and isinstance(self.model, PreTrainedModel):
                return
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Overridden because transformers loads the optimizer's state to the device of each of several processes,
        which has no room for it. Each maps the file, and copies what it owns: the host could not hold all of it once
        for each rank. Nor could it where state is on disk: that is copied a layer at a time."""
        attached = attachment_of(self.model)
        maps = attached is not None and isinstance(attached.eps, DiskEagerParamServer)
        if self._eps_of_ranks() is None:
            with _serialization.patch("load.mmap", True) if maps else nullcontext():
                super()._load_optimizer_and_scheduler(checkpoint)
            return
        args = self.args
        self.args = _OneProcess(args)
        try:
            with _serialization.patch("load.mmap", True):
                super()._load_optimizer_and_scheduler(checkpoint)
        finally:
            self.args = args

    def _eps_of_ranks(self) -> SharedEagerParamServer | None:
        attached = attachment_of(self.model)
        eps = None if attached is None else attached.eps
        return eps if isinstance(eps, SharedEagerParamServer) else None

    @contextmanager
    def _one_device(self) -> Iterator[None]:
        before = self.args.n_gpu
        if before < 2 or self._count is None:
            yield
            return
        self.args._n_gpu = 1
        try:
            yield
        finally:
            self.args._n_gpu = before
