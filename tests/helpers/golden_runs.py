"""Runs a case of `golden_cases` and keeps what it computed, as text that can be compared.

A record has some of these sections:

    bits     for each step, losses and norms as hexadecimal numbers, digests of weights, gradients and state
    options  those of the case, as the configuration has them
    bytes    peaks of memory by name, as the engine counts them, and of the device as the simulated one counts them
    copies   how many copies went up to the device and down from it, and their bytes
    logs     what the Trainer logged, of the run and of the one that went on from its first checkpoint
    files    all files that were written, and for each what must stay of it
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import safetensors.torch
import torch
import transformers as hf
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import distributed, nn

import models
import runs
from golden_cases import FIELDS, LOGS, Case, options_of, terms_of
from hf_l2l import (
    L2LConfig,
    L2LTrainer,
    L2LTrainingArguments,
    attach_l2l,
    detach_l2l,
    make_l2l_arguments,
    make_l2l_trainer,
)
from models import ROWS, VOCAB
from training import arguments

Record = dict[str, Any]
"""Section -> what was computed."""


def after_backward(model: nn.Module, eps: Any, step: int) -> None:
    """All gradients of the step are there: a test plants a fault here."""


# ---- models


def llama(layers: int = 3, *, tied: bool = True) -> Any:
    return models.llama(num_hidden_layers=layers, max_position_embeddings=64, tie_word_embeddings=tied)


class Adapted(nn.Module):
    """A frozen linear layer and a product of two small matrices that is trained, as in LoRA."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, 2, bias=False)
        self.up = nn.Linear(2, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapted(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A frozen Llama of the `dtype`, with two adapters in each layer, which are fp32."""
    model = llama().to(dtype).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    # With dropout, so that forward and recompute have to draw the same numbers.
    "bert": lambda: models.bert(0.1, num_hidden_layers=3, max_position_embeddings=16),
    "deep": lambda: llama(6),
    "llama": llama,
    "untied llama": lambda: llama(tied=False),
    "t5": lambda: models.t5(dropout=0.1),
    "albert": lambda: models.albert(3),
    "adapted": adapted,
    "adapted 16-bit base": lambda: adapted(torch.bfloat16),
}
CLASSIFIERS = ("bert", "albert")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = runs.OPTIMIZERS | {
    "fused AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-3, weight_decay=0.01),
    "fused Adam": lambda groups: torch.optim.Adam(groups, lr=1e-3, weight_decay=0.01, fused=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}


# ---- bits


def digest(value: Any) -> str:
    """A digest of a tensor, an array, or anything of them; of values, not of how they lie in memory."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            host = part.detach().to("cpu").contiguous()
            found.update(f"{host.dtype}{list(host.shape)}".encode())
            found.update(host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b"")
        elif isinstance(part, numpy.ndarray):
            found.update(f"{part.dtype}{part.shape}".encode() + part.tobytes())
        elif isinstance(part, Mapping):
            for key in part:
                add(key)
                add(part[key])
        elif isinstance(part, list | tuple):
            found.update(f"{len(part)} of".encode())
            for each in part:
                add(each)
        else:
            found.update(f"{type(part).__name__} {part!r}".encode())

    add(value)
    return found.hexdigest()[:16]


def seed() -> None:
    """Begin all generators anew, and forget what accelerate kept of an earlier case."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    if hasattr(torch, "sim"):
        torch.sim.manual_seed_all(0)


@contextlib.contextmanager
def counted_copies() -> Iterator[dict[str, int]]:
    """Inside, what is copied to and from the simulated accelerator is counted."""
    from hf_l2l.testing import sim_copies

    copy, found = sim_copies.copy, {"up": 0, "down": 0, "up bytes": 0, "down bytes": 0}
    lock = threading.Lock()  # updates download and upload in threads of their own

    def counted(source: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
        if (source.device.type == "cpu") != (target.device.type == "cpu"):
            way = "up" if source.device.type == "cpu" else "down"
            with lock:
                found[way] += 1
                found[f"{way} bytes"] += source.nbytes
        copy(source, target, *rest)

    with mock.patch.object(sim_copies, "copy", counted):
        yield found


NOT_OF_THE_CASE = ("total", "simulated device", "Python, libraries and other", "optimizer transients")
"""Names of host memory that depend on the process, or on which threads run at once."""


@contextlib.contextmanager
def observed(case: Case, record: Record, eps_of: Callable[[], Any]) -> Iterator[None]:
    """Keep peaks of memory by tier and name and, on the simulated accelerator, copies of the block."""
    is_sim = "sim" in case.where
    devices = range(torch.sim.device_count() if is_sim else 0)
    for index in devices:
        torch.accelerator.reset_peak_memory_stats(index)
    with counted_copies() if is_sim else contextlib.nullcontext() as copies:
        yield
    if is_sim:
        record["copies"] = copies
    # Of other ranks, and of eager updates, it is the threads that decide what is there at the same time.
    if "ranks" not in case.where and case.options.get("update") != "eager":
        record["bytes"] = {
            f"{tier}, {name}": size["peak"]
            for tier, names in eps_of().memory_report().items()
            for name, size in names.items()
            if size["peak"] and tier != "of which" and not (tier == "host" and name in NOT_OF_THE_CASE)
        }
        for index in devices:
            record["bytes"][f"counted on sim:{index}"] = torch.accelerator.max_memory_allocated(index)


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


# ---- a loop by hand


def loop(case: Case, folder: Path) -> Record:
    """Train by hand: several micro-steps a step, clipping, and now and then another use of the model."""
    model = MODELS[case.model]().train()
    options = dict(case.options)
    device = torch.device("sim", rank()) if "sim" in case.where else torch.device("cpu")
    count = options.pop("devices", None)
    where = {"devices": device if count is None else tuple(f"sim:{index}" for index in range(count))}
    where |= {"stash folder": folder} if options.get("stash") in ("disk", "auto") else {}
    where |= {"state folder": folder} if options.get("state") == "disk" else {}
    config = L2LConfig(**options_of({**options, **where}))
    has = terms_of(config, of_trainer=False)
    record: Record = {"options": {term: str(has.get(term)) for term in options}, "bits": []}
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(OPTIMIZERS[case.optimizer](groups_of(model, case)))
    with observed(case, record, lambda: eps):
        for step in range(case.steps):
            record["bits"].append(step_of(case, step, model, eps, optimizer, folder))
    detach_l2l(model)
    record["bits"].append({"detached": digest(model.state_dict())})
    return record


def groups_of(model: nn.Module, case: Case) -> list[Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    if not case.groups:
        return trained
    vectors = {"params": [p for p in trained if p.ndim < 2], "lr": 3e-4, "weight_decay": 0.0}
    return [{"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1}, vectors]


def batch_of(case: Case, number: int, batch_rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * batch_rank + number)
    ids = torch.randint(5, VOCAB, (ROWS, case.tokens), generator=generator)
    mask = (torch.arange(case.tokens) < case.tokens - torch.arange(ROWS)[:, None] % 4).long()
    labels = ids[:, 0] % 2 if case.model in CLASSIFIERS else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step_of(case: Case, step: int, model: Any, eps: Any, optimizer: Any, folder: Path) -> dict[str, Any]:
    """One step of the optimizer. Weights and state are read after every second one only, so that in the others the
    next forward begins while updates are under way."""
    found: dict[str, Any] = {}
    for turn in range(case.micro_steps):
        batch = batch_of(case, case.micro_steps * step + turn, rank())
        is_last = turn == case.micro_steps - 1
        cast = torch.autocast("sim" if "sim" in case.where else "cpu", torch.bfloat16, case.uses == "autocast")
        with contextlib.nullcontext() if is_last else eps.accumulate():
            with cast:
                loss = model(**batch).loss
            found[f"loss {turn + 1}"] = loss.item().hex()
            factor = float("inf") if case.uses == "inf" and step == 1 and is_last else 1.0
            (loss * (factor / case.micro_steps)).backward()
    after_backward(model, eps, step)
    if case.options.get("stash") == "disk":
        found["files of the stash"] = len(list(folder.iterdir()))
    reads = step % 2 == 1
    if reads and case.options.get("update") != "eager":  # which has used them up
        found["gradients"] = digest({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    norm = eps.clip_grad_norm_(0.1) if case.clips else eps.grad_norm()
    found["norm"] = norm.item().hex()
    optimizer.step()
    optimizer.zero_grad()
    if eps.loss_scale is not None:
        found |= {"loss scale": eps.loss_scale.value, "skipped": eps.loss_scale.skipped}
    if reads:
        found["weights"] = digest(model.state_dict())
        found["state"] = digest(optimizer.state_dict()["state"])
    if case.uses == "evaluation":
        with torch.no_grad():
            found["evaluation"] = model.eval()(**batch_of(case, 500, rank())).loss.item().hex()
    if case.uses == "generation":
        found["generation"] = generated(model.eval(), batch_of(case, 500, rank())["input_ids"])
    model.train()
    return found


def generated(model: Any, prompt: torch.Tensor) -> str:
    return digest(model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0))


# ---- the Trainer


SEQ2SEQ_ARGUMENTS = make_l2l_arguments(hf.Seq2SeqTrainingArguments)


def data_of(case: Case, count: int = 24) -> list[dict[str, Any]]:
    """Rows of one length: 3 batches an epoch, so that 4 steps go past its end."""
    ids = torch.randint(5, VOCAB, (count, case.tokens), generator=torch.Generator().manual_seed(5))
    is_class = case.model in CLASSIFIERS
    return [{"input_ids": row, "labels": row[0] % 2 if is_class else row.clone()} for row in ids]


def trainer_of(case: Case, folder: Path) -> Any:
    """A trainer that saves after every second step, evaluates if the case says when, and logs each step."""
    terms = {"budget": "off", **case.options}
    for term in ("state", "stash"):
        if terms.get(term) == "disk":
            terms[f"{term} folder"] = str(folder.parent)
    if "real-time folder" in terms:
        terms["real-time folder"] = str(folder.with_name(f"{folder.name}-{terms['real-time folder']}"))
    options = {
        "per_device_train_batch_size": ROWS // (2 if distributed.is_initialized() else 1),
        "save_strategy": "steps",
        "save_steps": 2,
        "max_grad_norm": 0.1,
        "eval_strategy": "steps" if "eval_steps" in case.arguments else "no",
        "use_cpu": "cpu" in case.where,
        **case.arguments,
        **options_of(terms, of_trainer=True),
    }
    kind: Any = L2LTrainer
    makes: Any = L2LTrainingArguments
    counts = None
    if case.trainer == "Seq2SeqTrainer":
        kind, makes = make_l2l_trainer(hf.Seq2SeqTrainer), SEQ2SEQ_ARGUMENTS
        options["predict_with_generate"] = True

        def counts(predicted: Any) -> dict[str, float]:
            tokens = predicted.predictions
            return {"tokens": float(numpy.where(tokens >= 0, tokens, 0).sum())}

    data = {"train_dataset": data_of(case), "eval_dataset": data_of(case, 10)}
    return kind(model=MODELS[case.model](), args=arguments(makes, folder, **options), compute_metrics=counts, **data)


def trainer(case: Case, folder: Path) -> Record:
    """Train by the Trainer, go on from its first checkpoint with a fresh model, and use what was trained."""
    record: Record = {"logs": [], "bits": []}
    whole = folder / "whole"
    made = trainer_of(case, whole)
    with observed(case, record, lambda: made.eps):
        made.train()
    keep_results(record, case, made, "whole")
    if rank() == 0:
        record["files"] = files_of(folder, case)
    if "save_total_limit" not in case.arguments:
        seed()
        resumed = trainer_of(case, folder / "resumed")
        resumed.train(resume_from_checkpoint=str(whole / "checkpoint-2"))
        keep_results(record, case, resumed, "resumed")
    return record


def keep_results(record: Record, case: Case, made: Any, run: str) -> None:
    """What training left behind, and what the trained model says."""
    record["logs"] += logged(made.state.log_history, run)
    found = {"weights": digest(made.model.state_dict()), "state": digest(made.optimizer.state_dict()["state"])}
    found["evaluation"] = made.evaluate()["eval_loss"].hex()
    if case.model == "llama":
        prompt = torch.stack([row["input_ids"] for row in data_of(case, 3)]).to(made.args.device)
        found["generation"] = generated(made.model, prompt)
    detach_l2l(made.model)
    record["bits"].append({**found, "detached": digest(made.model.state_dict())})


def logged(history: list[dict[str, Any]], run: str) -> list[dict[str, Any]]:
    """What the logs say, without what was measured of the machine."""
    return [{"run": run, **of_log(entry)} for entry in history]


def of_log(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: shown(entry[key]) for name, key in LOGS.items() if key in entry}


# ---- run_glue_l2l.py


def script(case: Case, folder: Path) -> Record:
    """Fine-tune and evaluate by the script, on files of a few rows."""
    from glue_script import ROWS as SENTENCES
    from glue_script import command, make_tiny_model, run_glue_l2l, write

    data = {f"{split}_file": write(folder / f"{split}.csv", SENTENCES) for split in ("train", "validation")}
    options = options_of({"budget": "off", **case.options}, of_trainer=True)
    options |= {"use_cpu": True if case.where == "cpu" else None, "max_steps": 4, "save_strategy": "steps"}
    options |= {"save_steps": 2, "logging_steps": 1, "gradient_accumulation_steps": 2, "task_name": None, **data}
    run_glue_l2l.main(command(make_tiny_model(str(folder / "model")), folder, **options))
    state = json.loads((folder / "out" / "trainer_state.json").read_text())
    return {"logs": logged(state["log_history"], "whole"), "files": files_of(folder / "out", case)}


# ---- files


def files_of(folder: Path, case: Case) -> dict[str, Any]:
    """Each file of a folder -> what must stay of it: entry -> digest or number."""
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    return {str(file.relative_to(folder)): content(file, case) for file in files}


def content(file: Path, case: Case) -> dict[str, Any]:
    """What must stay of a file."""
    if file.name in FIELDS:
        return fields_of(file, case)
    if file.suffix == ".safetensors":
        return {"tensors": digest(dict(sorted(safetensors.torch.load_file(file).items())))}
    if file.suffix in (".pt", ".pth", ".bin"):
        found = load(file)
        is_dict = isinstance(found, dict)
        return {str(name): shown(value) for name, value in found.items()} if is_dict else {"": digest(found)}
    if file.suffix == ".json":
        found = json.loads(file.read_text())
        if file.name.endswith("_results.json"):
            return of_log(found)
        return {"": digest({name: found[name] for name in sorted(found) if name not in NEVER_EQUAL})}
    # A model card, a picture and what was measured have folders and times.
    is_of_the_run = file.suffix in (".md", ".png", ".jsonl")
    return {} if is_of_the_run else {"": hashlib.sha256(file.read_bytes()).hexdigest()[:16]}


NEVER_EQUAL = ("_name_or_path", "transformers_version")
"""What a config says of folders and versions."""


def shown(value: Any) -> Any:
    """A number or a word as it is, with all bits; a digest of anything else."""
    if isinstance(value, float):
        return value.hex()
    return value if value is None or isinstance(value, bool | int | str) else digest(value)


def load(file: Path) -> Any:
    """What torch has saved, made of classes of torch, numpy, transformers, accelerate and this package only."""
    kinds = [SEQ2SEQ_ARGUMENTS]  # made by a function, so that its name is not found in a module
    for name in torch.serialization.get_unsafe_globals_in_checkpoint(file):
        module, _, last = name.rpartition(".")
        assert module.split(".")[0] in ("torch", "numpy", "transformers", "accelerate", "hf_l2l"), name
        kinds.append(getattr(importlib.import_module(module), last))
    kinds += [type(numpy.dtype(kind)) for kind in ("uint32", "int64")]
    with torch.serialization.safe_globals(kinds):
        return torch.load(file, weights_only=True)


def fields_of(file: Path, case: Case) -> dict[str, Any]:
    """The fields that must stay; of options those that the case sets, or, in a plan, all that were chosen."""
    whole = load(file) if file.suffix == ".bin" else json.loads(file.read_text())
    found: dict[str, Any] = {}
    for name, path in FIELDS[file.name].items():
        value = whole
        for part in path.split(".") if path else ():
            value = value.get(part) if isinstance(value, dict) else getattr(value, part)
        if name == "logs":
            value = digest(logged(value, ""))
        elif name == "files":
            value = ", ".join(sorted(value))
        elif name in ("options", "asked"):
            terms = terms_of(value, of_trainer=file.suffix == ".bin")
            is_set = {**terms} if file.name == "l2l_plan.json" and name == "options" else case.options
            value = {term: str(terms[term]) for term in terms if term in is_set and "folder" not in term}
        found[name] = value if isinstance(value, dict | list) else shown(value)
    return found


# ---- all of it


def run(case: Case, folder: Path) -> Record:
    """Run a case in an empty folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    if "sim" in case.where:
        from hf_l2l.testing import enable_simulated_accelerator

        enable_simulated_accelerator(devices=2 if "ranks" in case.where else int(case.options.get("devices", 1)))
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = {"loop": loop, "trainer": trainer, "script": script}[case.run](case, folder)
    if not distributed.is_initialized():
        PartialState._reset_state()
    return {"keeps": sorted(record), **record}
