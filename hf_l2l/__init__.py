"""Layer-to-layer (L2L) training under the Hugging Face Trainer (arXiv:2002.05645).

`L2LTrainer` in the place of `Trainer` fine-tunes a model that does not fit the accelerator; `attach_l2l` does the same
for any other training loop.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from packaging.version import Version as _Version

__version__ = "0.1.0"

_SUPPORTED = {"torch": ("2.11", "2.14"), "transformers": ("5.17", "5.24")}


def _check_versions(supported: dict[str, tuple[str, str]]) -> None:
    """Raise ImportError if an installed package is outside its supported range (lowest included, end excluded)."""
    for package, (lowest, end) in supported.items():
        found = _Version(_version(package))
        if not _Version(lowest) <= found < _Version(end):
            raise ImportError(
                f"hf_l2l {__version__} needs {package} of at least {lowest} and below {end} (found {found}); install "
                f"one with: pip install '{package}>={lowest},<{end}'"
            )


_check_versions(_SUPPORTED)

from hf_l2l.config import L2LConfig  # noqa: E402  # an unsupported torch is to be refused before it is used
from hf_l2l.eps.nonfinite import NonFiniteError  # noqa: E402
from hf_l2l.eps.server import EagerParamServer  # noqa: E402
from hf_l2l.hf.attach import attach_l2l, detach_l2l  # noqa: E402
from hf_l2l.model.precision import copy_as  # noqa: E402
from hf_l2l.optim.lamb import Lamb  # noqa: E402
from hf_l2l.plan.estimate import estimate  # noqa: E402
from hf_l2l.runtime.worker import EngineFailedError  # noqa: E402

if TYPE_CHECKING:
    from hf_l2l.hf.callback import L2LCallback
    from hf_l2l.hf.trainer import L2LTrainer, L2LTrainerMixin
    from hf_l2l.hf.training_args import L2LArgumentsMixin, L2LTrainingArguments
    from hf_l2l.hf.variants import make_l2l_arguments, make_l2l_trainer

__all__ = [
    "EagerParamServer",
    "EngineFailedError",
    "L2LArgumentsMixin",
    "L2LCallback",
    "L2LConfig",
    "L2LTrainer",
    "L2LTrainerMixin",
    "L2LTrainingArguments",
    "Lamb",
    "NonFiniteError",
    "attach_l2l",
    "copy_as",
    "detach_l2l",
    "estimate",
    "make_l2l_arguments",
    "make_l2l_trainer",
]


_WITH_TRAINER = {
    "L2LArgumentsMixin": "training_args",
    "L2LCallback": "callback",
    "L2LTrainer": "trainer",
    "L2LTrainerMixin": "trainer",
    "L2LTrainingArguments": "training_args",
    "make_l2l_arguments": "variants",
    "make_l2l_trainer": "variants",
}
"""Names -> their files in `hf_l2l.hf`. Programs that do not use transformers' Trainer need not wait for its import."""


def __getattr__(name: str) -> Any:
    if name in _WITH_TRAINER:
        return getattr(import_module(f"hf_l2l.hf.{_WITH_TRAINER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
