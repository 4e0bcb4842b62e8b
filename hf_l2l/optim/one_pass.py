"""The update of parameters in one pass over memory: gradient to master, moments and 16-bit copy.

It takes the place of the step of torch's Adam, AdamW and SGD, and of `Lamb`, for masters in fp32 on the host: of those
with `fused=True`, whose bits it has; and of others if moments are kept in fewer bits, since no step of torch's has
those bits. It is compiled (`kernels`). Where numba cannot be imported, or its results on a few elements are not those
of torch on this machine, torch's own functional steps run on chunks (`chunked_pass`): the same
bits, at several times the time.

    factor x gradient (fp32, bf16, fp16)  ->  master, moments (fp32, bf16, 8 bits)  ->  copy (bf16, fp16)
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hf_l2l.compat import unhooked_step
from hf_l2l.log import logger
from hf_l2l.optim.chunked_pass import SLICE, norms_of, update_in_chunks
from hf_l2l.optim.eight_bits import exponents_like
from hf_l2l.optim.forms import ADAM, LAMB, SGD, Form, Numbers, ParameterUpdate
from hf_l2l.optim.lamb import Lamb
from hf_l2l.optim.rounded_state import Kept, exponents_of, random_table
from hf_l2l.runtime import observer
from hf_l2l.runtime.worker import together

KEPT: dict[Kept, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
"""How moments are kept."""

_LIKE: dict[torch.dtype | None, Any] = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.uint8: np.empty(0, np.uint8),
    None: None,
}
"""What tells `kernels` the dtype of a tensor."""

BYTE_TIMES = {torch.float32: 1.15, torch.bfloat16: 2.1, torch.uint8: 3.1}
"""Dtype of the moments -> the time of an update for each byte that it reads or writes, relative to that of torch's
fused AdamW on one flat tensor in fp32 (28 bytes): what is rounded has more arithmetic for fewer bytes. Of the rows of
`benchmarks/eps_cpu.py`, with one thread on two cores with AVX512."""


def relative_time(gradient: torch.dtype, moments: Kept, copy: torch.dtype | None) -> float:
    """The time of an update of Adam per parameter, with a copy in this dtype, relative to that of torch's fused AdamW
    in fp32."""
    kept = KEPT[moments]
    num_bytes = gradient.itemsize + 2 * (4 + 2 * kept.itemsize) + (0 if copy is None else copy.itemsize)
    return BYTE_TIMES[kept] * num_bytes / 28


_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)

WITHOUT_NUMBA = "the optimizer's update on the host is not compiled, and takes several times as long ({why}); {remedy}"


class Kind(NamedTuple):
    """What a kernel is compiled for."""

    form: str
    """Name of the class of the form."""
    has_moments: bool
    gradient: torch.dtype
    moments: torch.dtype
    copy: torch.dtype | None


def form_of(optimizer: torch.optim.Optimizer) -> Form | None:
    """How `optimizer` is computed in one pass, by the function that makes its steps; None for other optimizers."""
    step = unhooked_step(type(optimizer))
    known: tuple[tuple[type[torch.optim.Optimizer], Form], ...] = (
        (torch.optim.Adam, ADAM),
        (torch.optim.SGD, SGD),
        (Lamb, LAMB),
    )
    return next((form for kind, form in known if step is unhooked_step(kind)), None)


class Pieces(Protocol):
    """The pieces of a parameter whose gradient is still arriving, and whose new values are waited for."""

    ends: Sequence[int]
    """The end of each, in elements: multiples of `CHUNK`, but for the last one."""

    def before(self, number: int) -> None:
        """Wait until the gradient of this piece, and of those before it, is there."""

    def after(self, number: int) -> None:
        """The master and its copy have their new values in this piece."""


class OnePass:
    """The pass for one optimizer."""

    def __init__(self, form: Form, moments: Kept = "fp32") -> None:
        self._form = form
        self._moments = moments
        self._kept = KEPT[moments]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, moments: Kept = "fp32") -> OnePass | None:
        """That of `optimizer`, whose moments are kept so; None if its steps are no others than its own."""
        form = form_of(optimizer)
        return None if form is None else cls(form, moments)

    def covers(self, group: Mapping[str, Any]) -> bool:
        """Whether it computes a group with these hyper-parameters."""
        has_our_bits = self._moments != "fp32" or self._form.is_ours or bool(group.get("fused"))
        return has_our_bits and self._form.covers(group)

    def takes(self, update: ParameterUpdate) -> bool:
        """Whether it computes this update of a group that it `covers`: all tensors are dense, in the order of their
        elements, and as they are expected. The update gets the moments that there are."""
        master, gradient, state, copy = update.master, update.gradient, update.state, update.copy
        if master.dtype is not torch.float32 or not master.is_cpu or not master.is_contiguous():
            return False
        if gradient.dtype not in _GRADIENTS or gradient.layout is not torch.strided or not gradient.is_contiguous():
            return False
        shape = master.shape
        if copy is not None and not (copy.is_contiguous() and copy.shape == shape):
            return False
        counts, keys = self._form.counts, self._form.moments(update.group)
        moments = [found for key in keys if (found := state.get(key)) is not None]
        if not moments:
            return not counts or not state
        if len(moments) < len(keys) or (counts and not _is_count(state.get("step"))):
            return False
        for found in moments:
            if not isinstance(found, torch.Tensor) or found.dtype is not self._kept or found.shape != shape:
                return False
            if not found.is_contiguous():
                return False
        update.moments = moments
        if self._kept is torch.uint8:
            update.exponents = [state[exponents_of(key)] for key in keys]
        return True

    def run(self, updates: Sequence[ParameterUpdate], pieces: Pieces | None = None) -> None:
        """Make the updates, which it `takes`, with the threads of this thread's worker; that of a single parameter
        piece by piece, if there are `pieces`."""
        numbers: dict[tuple[int, float, float], Numbers] = {}
        for update in updates:
            self._begin(update, numbers)
        if pieces is None:
            self._make(updates)
        elif self._form.has_norms:  # which are of the whole parameter
            pieces.before(len(pieces.ends) - 1)
            self._make(updates)
        else:
            [update] = updates
            for number, (begin, end) in enumerate(itertools.pairwise((0, *pieces.ends))):
                pieces.before(number)
                self._make([update.part(begin, end)])
                pieces.after(number)
        torch.autograd.graph.increment_version([update.master for update in updates])

    def _make(self, updates: Sequence[ParameterUpdate]) -> None:
        of_dtypes: dict[tuple[bool, torch.dtype, torch.dtype | None], list[ParameterUpdate]] = {}
        for update in updates:
            copy = None if update.copy is None else update.copy.dtype
            of_dtypes.setdefault((bool(update.moments), update.gradient.dtype, copy), []).append(update)
        for (has_moments, gradient, copy), some in of_dtypes.items():
            kind = Kind(type(self._form).__name__, has_moments, gradient, self._kept, copy)
            if observer.HOST_LISTENERS:
                observer.host_works(_work_of(kind, some))
            ENGINES.update(self._form, kind, some)

    def prepare(self, group: Mapping[str, Any], gradient: torch.dtype, copy: torch.dtype | None) -> None:
        """Compile what updates of such gradients and copies need, before the first of them."""
        if self.covers(group):
            has_moments = bool(self._form.moments(group))
            ENGINES.compiles(self._form, Kind(type(self._form).__name__, has_moments, gradient, self._kept, copy))

    def _begin(self, update: ParameterUpdate, known: dict[tuple[int, float, float], Numbers]) -> None:
        """Make the state, if there is none, and the numbers of the step, which most parameters share."""
        form, state = self._form, update.state
        if not update.moments and (keys := form.moments(update.group)):
            if form.counts:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
            update.moments = [torch.zeros_like(update.master, dtype=self._kept) for _ in keys]
            state.update(zip(keys, update.moments, strict=True))
            if self._kept is torch.uint8:
                update.exponents = [exponents_like(update.master) for _ in keys]
                state.update(zip(map(exponents_of, keys), update.exponents, strict=True))
            update.step = 1.0
        else:
            update.step = state["step"].item() + 1.0 if form.counts else 2.0
        of = (id(update.group), update.factor, update.step)
        numbers = known.get(of)
        if numbers is None:
            numbers = known[of] = form.numbers(update.group, update.factor, update.step)
        update.numbers = numbers


def _is_count(value: Any) -> bool:
    """Whether this is a number of steps as torch's optimizers keep it."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32 and value.is_cpu and value.numel() == 1


def _work_of(kind: Kind, updates: Sequence[ParameterUpdate]) -> observer.HostWork:
    """What these updates, all of one kind, read and write."""
    copies = [each.copy for each in updates if each.copy is not None]
    changed = [tensor for each in updates for tensor in (each.master, *each.moments)]
    slowness = BYTE_TIMES[kind.moments] if kind.has_moments else 1.0
    name, gradients = kind.form.strip("_"), [each.gradient for each in updates]
    return observer.HostWork(f"the update of weights by {name}", gradients, changed, copies, slowness)


class _Failing:
    """A block of numba's code, which may raise anything: typing errors, or what a damaged file makes of unpickling."""

    error: Exception | None = None

    def __enter__(self) -> _Failing:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return isinstance(error, Exception)


class Engines:
    """What makes updates of a kind: the compiled kernel, or torch on chunks."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kernel: Any = None
        self._is_compiled: dict[Kind, bool] = {}
        self._has_warned = False

    def update(self, form: Form, kind: Kind, updates: Sequence[ParameterUpdate]) -> None:
        """Make these updates, all of this kind."""
        if self.compiles(form, kind):
            assert self._kernel is not None, "what is compiled can be called"
            update_compiled(self._kernel, form, updates)
        else:
            for update in updates:
                update_in_chunks(form, update)

    def compiles(self, form: Form, kind: Kind) -> bool:
        """Whether updates of a kind are compiled. The first call compiles them, and compares the bits of a few
        elements with those of torch."""
        found = self._is_compiled.get(kind)
        if found is None:
            with self._lock:
                found = self._is_compiled.get(kind)
                if found is None:
                    found = self._is_compiled[kind] = self._try(form, kind)
        return found

    def _try(self, form: Form, kind: Kind) -> bool:
        if self._kernel is None:
            try:
                self._kernel = imported_kernel()
            except ImportError as error:
                self._warn(str(error), "install numba, which has wheels for this Python on most machines")
                return False
        differs = ""
        with _Failing() as first:
            differs = trial(self._kernel, form, kind)
        if first.error is not None:  # maybe of numba's cache on disk, which may be damaged
            for file in Path(self._kernel.stats.cache_path).glob("kernels.update-*"):
                file.unlink(missing_ok=True)
            with _Failing() as second:
                differs = trial(self._kernel, form, kind)
            if second.error is not None:
                self._warn(
                    f"numba raised {type(second.error).__name__}: {second.error}", "install another version of numba"
                )
                return False
        if differs:
            logger.info(
                "updates of %s are computed by torch, in chunks: compiled ones have other bits on this machine (%s)",
                kind,
                differs,
            )
        return not differs

    def _warn(self, why: str, remedy: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(WITHOUT_NUMBA.format(why=why, remedy=remedy), stacklevel=2)


ENGINES = Engines()
_CACHE: tempfile.TemporaryDirectory[str] | None = None
"""The folder for compiled code, if no other one can be written."""


def imported_kernel() -> Callable[..., None]:
    """The compiled kernel.

    Raises:
        ImportError: if numba is not there, or cannot be used.
    """
    import numba

    try:
        module = import_module("hf_l2l.optim.kernels")
    except RuntimeError:  # no folder for its cache on disk can be written: beside the file, or of the user
        global _CACHE  # until the process ends
        _CACHE = tempfile.TemporaryDirectory(prefix="hf_l2l-numba-", ignore_cleanup_errors=True)
        numba.config.CACHE_DIR = _CACHE.name
        module = import_module("hf_l2l.optim.kernels")
    kernel: Callable[..., None] = module.update
    return kernel


@cache
def _width() -> int:
    """Elements of the vectors of torch's kernels; the rest of a parameter is computed one by one."""
    return 8 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else 4


@lru_cache(maxsize=2**10)
def _slices_of(sizes: tuple[int, ...]) -> Any:
    """The slices of parameters with so many elements, of which each has at least one; not to be written to."""
    slices = [
        (number, start, min(start + SLICE, size))
        for number, size in enumerate(sizes)
        for start in range(0, max(size, 1), SLICE)
    ]
    return np.array(slices, dtype=np.int64)


def update_compiled(kernel: Callable[..., None], form: Form, updates: Sequence[ParameterUpdate]) -> None:
    """Make these updates by the kernel, on the threads of this thread's worker."""
    slices = _slices_of(tuple([update.master.numel() for update in updates]))
    tensors = np.array([_row(update, counts=form.counts) for update in updates], dtype=np.int64)
    numbers = np.array([update.numbers for update in updates])
    first = updates[0]
    moments = [*(each.dtype for each in first.moments), None, None][:2]
    gradient, copy = first.gradient.dtype, None if first.copy is None else first.copy.dtype
    table = None if moments[0] in (None, torch.float32) else random_table()

    def run(sums: Any, of_copy: torch.dtype | None) -> None:
        shared = [torch.uint8 if each is torch.uint8 else None for each in moments]
        likes = [_LIKE[each] for each in (torch.float32, gradient, *moments, *shared, of_copy)]
        tables = (np.zeros(1, dtype=np.int64), slices, tensors, numbers, table, _width())
        together(partial(kernel, *tables, *likes, sums), len(slices))

    if not form.has_norms:
        run(None, copy)
        return
    sums = np.zeros((len(slices), 2))
    run(sums, None)  # a copy is written by the second pass alone
    for number, update in enumerate(updates):
        numbers[number, 7] = LAMB.size(update.group, *norms_of(sums[slices[:, 0] == number]))
    run(sums[0], copy)


def _row(update: ParameterUpdate, *, counts: bool) -> tuple[int, ...]:
    """The row of a parameter in the table that the kernel reads."""
    master, moments, exponents, copy = update.master, update.moments, update.exponents, update.copy
    return (
        master.numel(),
        master.data_ptr(),
        update.gradient.data_ptr(),
        moments[0].data_ptr() if moments else 0,
        moments[1].data_ptr() if len(moments) > 1 else 0,
        exponents[0].data_ptr() if exponents else 0,
        exponents[1].data_ptr() if len(exponents) > 1 else 0,
        0 if copy is None else copy.data_ptr(),
        update.state["step"].data_ptr() if counts else 0,
        int(update.step),
        *update.keys,
    )


# ---- the trial

_SIZES = (31, 39)
"""Elements of two parameters: with all kinds of vectors, and of what is left over at the end."""
_GROUPS: dict[str, dict[str, Any]] = {
    "_Adam": {"betas": (0.9, 0.999), "eps": 1e-8, "maximize": False, "decoupled_weight_decay": True},
    "_Sgd": {"momentum": 0.9, "dampening": 0.1, "nesterov": True, "maximize": True},
    "_Lamb": {"betas": (0.9, 0.999), "eps": 1e-6},
}


def trial(kernel: Callable[..., None], form: Form, kind: Kind) -> str:
    """What differs between updates of a few elements by the kernel and by torch; empty if no bit does.

    Raises:
        Exception: if the kernel cannot be compiled.
    """
    group = {"lr": 1e-3, "weight_decay": 0.01, **_GROUPS[kind.form]}
    if not kind.has_moments:
        group |= {"momentum": 0, "nesterov": False}
    groups = [group, {**group, "weight_decay": 0.0}]
    if kind.form == "_Adam":
        groups.append({**group, "decoupled_weight_decay": False})
    for of_trial in groups:
        one, other = (_trial_updates(form, kind, of_trial) for _ in range(2))
        for step in (1.0, 2.0, 3.0):
            for update in (*one, *other):
                update.step, update.numbers = step, form.numbers(of_trial, update.factor, step)
            update_compiled(kernel, form, one)
            for update in other:
                update_in_chunks(form, update)
            found = _difference(one, other)
            if found:
                return found
    return ""


def _trial_updates(form: Form, kind: Kind, group: Mapping[str, Any]) -> list[ParameterUpdate]:
    generator = torch.Generator().manual_seed(0)
    updates = []
    for size in _SIZES:
        master, gradient = (torch.randn(size, generator=generator) for _ in range(2))
        copy = None if kind.copy is None else torch.zeros(size, dtype=kind.copy)
        state = {"step": torch.tensor(0.0)}
        update = ParameterUpdate(master, gradient.to(kind.gradient), 0.7, group, state, copy, (1, 2**32 - 2))
        update.moments = [torch.zeros(size, dtype=kind.moments) for _ in form.moments(group)]
        update.exponents = [exponents_like(master) for _ in update.moments if kind.moments == torch.uint8]
        updates.append(update)
    return updates


def _difference(one: Iterable[ParameterUpdate], other: Iterable[ParameterUpdate]) -> str:
    names = ("masters", "copies", "first moments", "second moments")
    for update, same in zip(one, other, strict=True):
        of_both = ((each.master, each.copy, *each.moments) for each in (update, same))
        for name, left, right in zip(names, *of_both, strict=False):
            if left is not None and right is not None and not torch.equal(left, right):
                return f"{int((left != right).sum())} of {left.numel()} {name} of one parameter differ"
    return ""
