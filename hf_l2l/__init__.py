"""Layer-to-layer (L2L) training under the Hugging Face Trainer (arXiv:2002.05645).

`L2LTrainer` in the place of `Trainer` fine-tunes a model that does not fit the accelerator; `attach_l2l` does the same
for any other training loop.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from packaging.version import Version as _Version

from hf_l2l.version import __version__ as __version__

TESTED = {"torch": ("2.11", "2.13"), "transformers": ("5.17", "5.23")}
"""The lowest version of each package that works, and the highest one that was tested."""
_TESTED_PYTHON = (3, 13)


def check_versions(tested: dict[str, tuple[str, str]], python: tuple[int, ...] = sys.version_info[:2]) -> None:
    """Raise ImportError if an installed package is too old, and warn once of what is newer than what was tested."""
    newer, remedies = [], []
    for package, (lowest, highest) in tested.items():
        found = _Version(_version(package))
        if found < _Version(lowest):
            raise ImportError(
                f"hf_l2l {__version__} needs {package} {lowest} or newer (found {found}); install one with: "
                f"pip install '{package}>={lowest}'"
            )
        if found.release[:2] > _Version(highest).release:
            newer.append(f"{package} {found} (tested: {lowest} to {highest})")
            remedies.append(f"pip install '{package}=={highest}.*'")
    if python > _TESTED_PYTHON:
        highest = ".".join(map(str, _TESTED_PYTHON))
        newer.append(f"Python {'.'.join(map(str, python))} (tested: 3.11 to {highest})")
        remedies.append(f"use Python {highest}")
    _warn_once(", ".join(newer), ", and ".join(remedies))


@cache
def _warn_once(newer: str, remedy: str) -> None:
    if newer:
        warnings.warn(
            f"hf_l2l {__version__} has not been tested with {newer}; it will be tried. If something fails: {remedy}",
            stacklevel=4,
        )


if TYPE_CHECKING:
    from hf_l2l.config import L2LConfig
    from hf_l2l.eps.nonfinite import NonFiniteError
    from hf_l2l.eps.server import EagerParamServer
    from hf_l2l.hf.attach import attach_l2l, detach_l2l
    from hf_l2l.hf.callback import L2LCallback
    from hf_l2l.hf.trainer import L2LTrainer, L2LTrainerMixin
    from hf_l2l.hf.training_args import L2LArgumentsMixin, L2LTrainingArguments
    from hf_l2l.hf.variants import make_l2l_arguments, make_l2l_trainer
    from hf_l2l.loading import load_once
    from hf_l2l.model.precision import copy_as
    from hf_l2l.noise.growth import L2LBatchGrowth
    from hf_l2l.optim.lamb import Lamb
    from hf_l2l.ranks.peers import RankFailedError
    from hf_l2l.runtime.worker import EngineFailedError
    from hf_l2l.sizing.estimate import estimate

__all__ = [
    "EagerParamServer",
    "EngineFailedError",
    "L2LArgumentsMixin",
    "L2LBatchGrowth",
    "L2LCallback",
    "L2LConfig",
    "L2LTrainer",
    "L2LTrainerMixin",
    "L2LTrainingArguments",
    "Lamb",
    "NonFiniteError",
    "RankFailedError",
    "attach_l2l",
    "copy_as",
    "detach_l2l",
    "estimate",
    "load_once",
    "make_l2l_arguments",
    "make_l2l_trainer",
]


_PLACES = {
    "EagerParamServer": "eps.server",
    "EngineFailedError": "runtime.worker",
    "L2LArgumentsMixin": "hf.training_args",
    "L2LBatchGrowth": "noise.growth",
    "L2LCallback": "hf.callback",
    "L2LConfig": "config",
    "L2LTrainer": "hf.trainer",
    "L2LTrainerMixin": "hf.trainer",
    "L2LTrainingArguments": "hf.training_args",
    "Lamb": "optim.lamb",
    "NonFiniteError": "eps.nonfinite",
    "RankFailedError": "ranks.peers",
    "attach_l2l": "hf.attach",
    "copy_as": "model.precision",
    "detach_l2l": "hf.attach",
    "estimate": "sizing.estimate",
    "load_once": "loading",
    "make_l2l_arguments": "hf.variants",
    "make_l2l_trainer": "hf.variants",
}
"""Names -> their modules, which are imported when a name is first used: programs that do not use transformers' Trainer
need not wait for its import, and the commands `hf-l2l --help` and `hf-l2l env` for none."""


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        check_versions(TESTED)  # a torch that is too old is to be refused before it is used
        globals()[name] = found = getattr(import_module(f"hf_l2l.{_PLACES[name]}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
