"""The update of parameters in one pass over memory: gradient to master, moments and 16-bit copy.

It takes the place of the step of torch's Adam, AdamW and SGD, and of `Lamb`, for masters in fp32 on the host: of those
with `fused=True`, whose bits it has; and of others if moments are kept in fewer bits, since no step of torch's has
those bits. It is compiled (`kernels`). Where numba cannot be imported, or its results on a few elements are not those
of torch on this machine, torch's own functional steps run on chunks that a cache holds (`chunked_pass`): the same
bits, at several times the time.

    factor x gradient (fp32, bf16, fp16)  ->  master, moments (fp32, bf16, 8 bits)  ->  copy (bf16, fp16)
"""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_l2l.compat import unhooked_step
from hf_l2l.log import logger
from hf_l2l.optim.chunked_pass import SLICE, norms_of, update_in_chunks
from hf_l2l.optim.eight_bits import exponents_like
from hf_l2l.optim.forms import ADAM, LAMB, SGD, Form, Numbers, ParameterUpdate
from hf_l2l.optim.lamb import Lamb
from hf_l2l.optim.rounded_state import Kept, exponents_of
from hf_l2l.runtime import observer, stream
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

BYTE_TIMES = {torch.float32: 1.0, torch.bfloat16: 1.4, torch.uint8: 2.2}
"""Dtype of the moments -> the time of an update for each byte, relative to that of torch's fused AdamW in fp32: what
is rounded has more arithmetic for fewer bytes."""

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


class OnePass:
    """The pass for one optimizer."""

    def __init__(self, form: Form, moments: Kept = "fp32") -> None:
        self._form = form
        self._moments = moments

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
        elements, and as they are expected."""
        master, gradient, state = update.master, update.gradient, update.state
        if master.dtype != torch.float32 or master.device != stream.HOST or not master.is_contiguous():
            return False
        if gradient.dtype not in _GRADIENTS or gradient.layout is not torch.strided or not gradient.is_contiguous():
            return False
        if update.copy is not None and not (update.copy.is_contiguous() and update.copy.shape == master.shape):
            return False
        kept = KEPT[self._moments]
        found = [state.get(key) for key in self._form.moments(update.group)]
        if not any(each is not None for each in found):
            return not self._form.counts or not state
        return (not self._form.counts or isinstance(state.get("step"), torch.Tensor)) and all(
            isinstance(each, torch.Tensor)
            and each.dtype == kept
            and each.shape == master.shape
            and each.is_contiguous()
            for each in found
        )

    @torch.no_grad()
    def run(self, updates: Sequence[ParameterUpdate]) -> None:
        """Make the updates, which it `takes`, with the threads of this thread's worker."""
        steps = [each.state["step"] for each in updates if "step" in each.state] if self._form.counts else []
        if steps:  # all at once, since each operation of torch takes some microseconds
            torch._foreach_add_(steps, 1)
        of_kinds: dict[Kind, list[_Row]] = {}
        for row in map(self._row, updates):
            of_kinds.setdefault(self._kind(row), []).append(row)
        for kind, rows in of_kinds.items():
            observer.host_works(_work_of(kind, rows))
            ENGINES.update(self._form, kind, rows)
        torch.autograd.graph.increment_version([each.master for each in updates])

    def prepare(self, group: Mapping[str, Any], gradient: torch.dtype, copy: torch.dtype | None) -> None:
        """Compile what updates of such gradients and copies need, before the first of them."""
        if self.covers(group):
            has_moments = bool(self._form.moments(group))
            kind = Kind(type(self._form).__name__, has_moments, gradient, KEPT[self._moments], copy)
            ENGINES.compiles(self._form, kind)

    def _kind(self, row: _Row) -> Kind:
        update = row.update
        copy = None if update.copy is None else update.copy.dtype
        name = type(self._form).__name__
        return Kind(name, bool(row.moments), update.gradient.dtype, KEPT[self._moments], copy)

    def _row(self, update: ParameterUpdate) -> _Row:
        """A parameter whose step has been counted; its state is made if there is none."""
        form, state, kept = self._form, update.state, KEPT[self._moments]
        keys = form.moments(update.group)
        is_first = any(state.get(key) is None for key in keys)
        if is_first:
            if form.counts:
                state["step"] = torch.tensor(1.0, dtype=torch.float32)
            state.update((key, torch.zeros_like(update.master, dtype=kept)) for key in keys)
            if kept == torch.uint8:
                state.update((exponents_of(key), exponents_like(update.master)) for key in keys)
        step = state["step"].item() if form.counts else float(1 + (not is_first))
        numbers = form.numbers(update, step, is_first=is_first)
        exponents = [state[exponents_of(key)] for key in keys] if kept == torch.uint8 else []
        return _Row(update, [state[key] for key in keys], step, numbers, exponents)


def _work_of(kind: Kind, rows: Sequence[_Row]) -> observer.HostWork:
    """What the updates in these rows, all of one kind, read and write."""
    copies = [row.update.copy for row in rows if row.update.copy is not None]
    written = [each for row in rows for each in (row.update.master, *row.moments)]
    name = kind.form.strip("_")
    slowness = BYTE_TIMES[kind.moments] if kind.has_moments else 1.0
    return observer.HostWork(
        f"the update of weights by {name}", [row.update.gradient for row in rows], [*written, *copies], slowness
    )


class _Row(NamedTuple):
    """One parameter of an update."""

    update: ParameterUpdate
    moments: list[torch.Tensor]
    step: float
    numbers: Numbers
    exponents: Sequence[torch.Tensor] = ()
    """Of moments in 8 bits."""


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

    def update(self, form: Form, kind: Kind, rows: Sequence[_Row]) -> None:
        """Update the parameters in these rows, all of this kind."""
        if self.compiles(form, kind):
            assert self._kernel is not None, "what is compiled can be called"
            update_compiled(self._kernel, form, rows)
        else:
            for row in rows:
                update_in_chunks(form, row.update, row.moments, row.step, row.numbers, row.exponents)

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


def _width() -> int:
    """Elements of the vectors of torch's kernels; the rest of a parameter is computed one by one."""
    return 8 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else 4


def update_compiled(kernel: Callable[..., None], form: Form, rows: Sequence[_Row]) -> None:
    """Update the parameters in these rows by the kernel, on the threads of this thread's worker."""
    sizes = [row.update.master.numel() for row in rows]
    slices = np.array(
        [(n, start, min(start + SLICE, size)) for n, size in enumerate(sizes) for start in range(0, size, SLICE)],
        dtype=np.int64,
    ).reshape(-1, 3)
    tensors = np.array([_addresses(row, size) for row, size in zip(rows, sizes, strict=True)], dtype=np.int64)
    keys = np.array([row.update.keys for row in rows], dtype=np.uint32)
    first = rows[0]
    moments = [each.dtype for each in first.moments] + [None, None]
    gradient, copy = first.update.gradient.dtype, None if first.update.copy is None else first.update.copy.dtype
    numbers = np.array([row.numbers for row in rows])

    def run(sums: Any, of_gradient: torch.dtype | None, of_copy: torch.dtype | None) -> None:
        counter = np.zeros(1, dtype=np.int64)
        shared = [torch.uint8 if each == torch.uint8 else None for each in moments[:2]]
        likes = [_LIKE[each] for each in (torch.float32, of_gradient, *moments[:2], *shared, of_copy)]
        tables = (counter.ctypes.data, slices, tensors, numbers, keys, _width())
        together(partial(kernel, *tables, *likes, sums), len(slices))

    if not form.has_norms:
        run(None, gradient, copy)
        return
    sums = np.zeros((len(slices), 2))
    run(sums, gradient, None)  # a copy is written by the second pass alone
    for number, row in enumerate(rows):
        numbers[number, 7] = LAMB.size(row.update, *norms_of(sums[slices[:, 0] == number]))
    run(sums[0], gradient, copy)


def _addresses(row: _Row, size: int) -> tuple[int, ...]:
    moments, exponents = ([each.data_ptr() for each in of] + [0, 0] for of in (row.moments, row.exponents))
    update, copy = row.update, 0 if row.update.copy is None else row.update.copy.data_ptr()
    return (size, update.master.data_ptr(), update.gradient.data_ptr(), *moments[:2], *exponents[:2], copy)


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
        one, other = (_trial_rows(form, kind, of_trial) for _ in range(2))
        for step in (1, 2, 3):
            for rows in (one, other):
                for number, row in enumerate(rows):
                    numbers = form.numbers(row.update, float(step), is_first=step == 1)
                    row.update.state["step"] = torch.tensor(float(step))
                    rows[number] = row._replace(step=float(step), numbers=numbers)
            update_compiled(kernel, form, one)
            for row in other:
                update_in_chunks(form, row.update, row.moments, row.step, row.numbers, row.exponents)
            found = _difference(one, other)
            if found:
                return found
    return ""


def _trial_rows(form: Form, kind: Kind, group: Mapping[str, Any]) -> list[_Row]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for size in _SIZES:
        master, gradient = (torch.randn(size, generator=generator) for _ in range(2))
        copy = None if kind.copy is None else torch.zeros(size, dtype=kind.copy)
        update = ParameterUpdate(master, gradient.to(kind.gradient), 0.7, group, {}, copy, (1, 2**32 - 2))
        moments = [torch.zeros(size, dtype=kind.moments) for _ in form.moments(group)]
        exponents = [exponents_like(master) for _ in moments if kind.moments == torch.uint8]
        rows.append(_Row(update, moments, 0.0, (0.0,) * 9, exponents))
    return rows


def _difference(one: Iterable[_Row], other: Iterable[_Row]) -> str:
    for row, same in zip(one, other, strict=True):
        names = ("masters", "copies", "first moments", "second moments")
        pairs = zip(
            (row.update.master, row.update.copy, *row.moments),
            (same.update.master, same.update.copy, *same.moments),
            strict=True,
        )
        for name, (left, right) in zip(names, pairs, strict=False):
            if left is not None and right is not None and not torch.equal(left, right):
                return f"{int((left != right).sum())} of {left.numel()} {name} of one parameter differ"
    return ""
