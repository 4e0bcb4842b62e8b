"""Layer-to-layer (L2L) training under the Hugging Face Trainer (arXiv:2002.05645).

`L2LTrainer` in the place of `Trainer` fine-tunes a model that does not fit the accelerator; `attach_l2l` does the same
for any other training loop.
"""

from __future__ import annotations

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
from hf_l2l.report.memory_estimate import estimate  # noqa: E402
from hf_l2l.runtime.worker import EngineFailedError  # noqa: E402

if TYPE_CHECKING:
    from hf_l2l.hf.trainer import L2LTrainer
    from hf_l2l.hf.training_args import L2LTrainingArguments

__all__ = [
    "EagerParamServer",
    "EngineFailedError",
    "L2LConfig",
    "L2LTrainer",
    "L2LTrainingArguments",
    "Lamb",
    "NonFiniteError",
    "attach_l2l",
    "copy_as",
    "detach_l2l",
    "estimate",
]


def __getattr__(name: str) -> Any:
    # transformers' Trainer takes seconds to import: only programs that use it wait for it.
    if name == "L2LTrainer":
        from hf_l2l.hf.trainer import L2LTrainer

        return L2LTrainer
    if name == "L2LTrainingArguments":
        from hf_l2l.hf.training_args import L2LTrainingArguments

        return L2LTrainingArguments
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
