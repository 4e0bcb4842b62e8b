"""Trainings that are killed, or given an error, at a call that changes their folder; nothing is measured here.

Each is a process of its own, which watches these calls: opening a file to write, `mkdir`, `rename`, `remove`, `rmdir`
and `truncate` by Python's audit events; `fsync`, `torch.save` and safetensors' `save_file`, which write beside Python,
by functions put in their place. In the middle of a file, whoever writes it, the system itself kills: RLIMIT_FSIZE.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import tqdm
import transformers as hf
from transformers.generation import utils as _generation  # noqa: F401  # loaded here, and not in each process
from transformers.models.bert.modeling_bert import BertForSequenceClassification
from transformers.trainer_utils import get_last_checkpoint

from hf_l2l import L2LTrainer, L2LTrainingArguments

VOCAB, TOKENS, ROWS = 64, 8, 24
TRAINERS: dict[str, type[hf.Trainer]] = {"Trainer": hf.Trainer, "L2LTrainer": L2LTrainer}
SAVING: dict[str, Any] = {"max_steps": 6, "save_steps": 2, "save_total_limit": 2}


@dataclass(frozen=True)
class Fault:
    """What happens at one of the calls."""

    at: int
    """Which one, from 1."""
    error: int | None = None
    """The errno of the OSError that the call raises; None: the process is killed before the call."""
    cut: int | None = None
    """The call takes place, and no file grows beyond so many bytes from then on: a write that would is what kills the
    process, or what fails with EFBIG where `error` is that."""


@dataclass(frozen=True)
class Training:
    """A training of a tiny BERT with dropout, in a process of its own."""

    trainer: str
    folder: str
    seed: int = 0
    fault: Fault | None = None
    seconds: float | None = None
    """After which it is killed, from its first step on."""
    stop_at: int | None = None
    """A step after which it stops, as if somebody had pressed a key."""
    resumes: bool = True
    """Whether it resumes from the last checkpoint, if there is one, as scripts do that are started again and again."""
    goes_on: bool = False
    """Whether it trains again, with the same trainer, after an error."""
    options: dict[str, Any] = field(default_factory=dict)
    """Training arguments beside `SAVING`."""


@dataclass
class Ended:
    """What became of it."""

    killed_by: int | None = None
    error: BaseException | None = None
    calls: list[str] = field(default_factory=list)
    """All that were watched, in their order: "open checkpoint-2/config.json"."""
    digest: str = ""
    """Of weights, optimizer, scheduler and log at the end. Dropout shows what generators gave."""
    found: Any = None
    """What `look` returned when an error had come."""


def end_of(training: Training, look: Callable[[hf.Trainer], Any] | None = None, limit: float = 120.0) -> Ended:
    """Run a training to its end in a process of its own. `look`, a function of a module, is called with the trainer
    before it starts, and again after an error.

    Raises:
        TimeoutError: if it has not ended after `limit` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])  # which is imported once, and forked for each training
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(training, look, there))
    process.start()
    there.close()
    found = Ended()
    try:
        while here.poll(limit):
            found = here.recv()
        process.kill()
    except EOFError:
        process.join(limit)
    here.close()
    if process.is_alive() or process.exitcode is None:
        raise TimeoutError(f"a training has not ended after {limit} s")
    found.killed_by = -process.exitcode if process.exitcode < 0 else None
    return found


def _run(training: Training, look: Callable[[hf.Trainer], Any] | None, there: Connection) -> None:
    gc.freeze()  # a training begins with a collection of all garbage
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    torch.set_num_threads(1)
    tqdm.tqdm.set_lock(threading.RLock())  # its own one for processes would be left over by a killed one
    os.umask(0o022)
    ended = Ended()
    trainer = trainer_of(training)
    before = look(trainer) if look is not None else None
    try:
        with watched(training.folder, training.fault, ended.calls):
            trainer.train(resume_from_checkpoint=_resumed(training))
    except Exception as error:  # noqa: BLE001  # it is the result
        ended.error = error.with_traceback(None)
        ended.error.__cause__ = ended.error.__context__ = None
        ended.found = before, look(trainer) if look is not None else None
        if training.goes_on:
            trainer.train(resume_from_checkpoint=_resumed(training))
    if ended.error is None or training.goes_on:
        ended.digest = digest_of(trainer)
    there.send(ended)
    os._exit(0)  # what the interpreter does at its end takes long


def _resumed(training: Training) -> bool:
    folders = (training.folder, training.options.get("l2l_realtime_checkpoint", training.folder))
    return training.resumes and any(os.path.isdir(each) and get_last_checkpoint(each) for each in folders)


def trainer_of(training: Training) -> hf.Trainer:
    """The trainer, with weights and rows that are the same at every call."""
    torch.manual_seed(3)
    config = hf.BertConfig(
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
        **{"vocab_size": VOCAB, "max_position_embeddings": TOKENS},
    )
    ids = torch.randint(5, VOCAB, (ROWS, TOKENS)).tolist()
    rows = [{"input_ids": row, "labels": int(row[0] > VOCAB // 2)} for row in ids]
    kind = TRAINERS[training.trainer]
    own = {"device_memory_budget": "off", "l2l_log_times": False} if issubclass(kind, L2LTrainer) else {}
    args = (L2LTrainingArguments if own else hf.TrainingArguments)(
        **{
            **own,
            "output_dir": training.folder,
            "seed": training.seed,
            "per_device_train_batch_size": 4,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **SAVING,
            **training.options,
        }
    )
    model = BertForSequenceClassification(config)
    made = kind(model=model, args=args, train_dataset=rows, eval_dataset=rows[:4])
    if training.stop_at is not None:
        made.add_callback(_StopAt(training.stop_at))
    if training.seconds is not None:
        made.add_callback(_KilledAfter(training.seconds))
    return made


class _StopAt(hf.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class _KilledAfter(hf.TrainerCallback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A signal's own action, without a handler: it ends the process at whatever instruction it is.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)


def digest_of(trainer: hf.Trainer) -> str:
    """Of all that two equal trainings have in common, to the bit."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, each in sorted(value.items(), key=str):
                digest.update(str(key).encode())
                add(each)
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            digest.update(repr(value).encode())

    add(trainer.model.state_dict())
    add(getattr(trainer.optimizer, "optimizer", trainer.optimizer).state_dict())
    add(trainer.lr_scheduler.state_dict())
    add([entry for entry in trainer.state.log_history if "train_runtime" not in entry])
    return digest.hexdigest()


# ---- the calls

_EVENTS = {"open": 0, "os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.truncate": None}
"""Audit events -> where among their arguments the folder's descriptor is, for the first path."""
WRITERS = ("open", "save", "safe_save_file")
"""Names of the calls that write a file."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def cuts(calls: list[str], checkpoint: Path) -> list[Fault]:
    """Within each file that is written: at its first byte, and in its middle. `checkpoint` is a whole one."""
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    named = [(at, call.split(" ", 1)) for at, call in enumerate(calls, 1)]
    opened = [(at, Path(path).name) for at, (name, path) in named if name in WRITERS and Path(path).name in sizes]
    return [Fault(at, cut=cut) for at, name in opened for cut in (0, sizes[name] // 2)]


@contextmanager
def watched(folder: str, fault: Fault | None, calls: list[str]) -> Iterator[None]:
    """Name the calls that change `folder` in `calls`, and have one of them fail. Once in a process: an audit hook
    stays until its end, and so do the functions."""
    count, lock, is_on = itertools.count(1), threading.Lock(), [True]

    def called(name: str, path: Any) -> None:
        text = os.fsdecode(path)
        if not is_on[0] or not os.path.abspath(text).startswith(folder):
            return
        with lock:
            number = next(count)
            calls.append(f"{name} {os.path.relpath(text, folder)}")
        if fault is not None and number == fault.at:
            _fail(fault, text)

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and is_on[0]:
            path, at = arguments[0], _EVENTS[event]
            if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
                return
            if isinstance(path, int):
                path = _path_of(path)
            elif event != "open" and at is not None and arguments[at] >= 0:
                path = os.path.join(_path_of(arguments[at]), os.fsdecode(path))
            called(event.removeprefix("os."), path)

    def announced(made: Callable[..., Any], name: str, at: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = args[at]
            called(name, _path_of(path) if isinstance(path, int) else path)
            return made(*args, **kwargs)

        return call

    for owner, name, at in ((os, "fsync", 0), (torch, "save", 1), (hf.modeling_utils, "safe_save_file", 1)):
        setattr(owner, name, announced(getattr(owner, name), name, at))
    if fault is not None and fault.error is None:  # else Python ignores the signal, so that the write fails
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    sys.addaudithook(heard)
    try:
        yield
    finally:
        is_on[0] = False
        if fault is not None and fault.cut is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _fail(fault: Fault, path: str) -> None:
    if fault.cut is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.cut, resource.RLIM_INFINITY))
    elif fault.error is not None:
        raise OSError(fault.error, os.strerror(fault.error), path)
    else:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the signal comes when the call returns, at the latest


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
