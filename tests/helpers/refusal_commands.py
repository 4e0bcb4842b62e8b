"""Flags of `hf-l2l` and `run_glue_l2l.py`, and arguments of `estimate`, that are refused."""

from __future__ import annotations

import importlib
import json
from typing import Any

import torch

import run_glue_l2l
from cli_models import LLAMA, written
from hf_l2l import L2LConfig, estimate
from hf_l2l.cli.main import COMMANDS, make_parser
from hf_l2l.probe.figures import HardwareFigures
from refusals import Act, Prepare, Rows, Scene, row

FIGURES = HardwareFigures("a GPU", 2**30, 1e9, 1e9, 1e9, 1e9, 1e10, {1: 1e9}, {"fp32": 1e11}, True, 1e11)
OF_A_CPU = {name: None for name in ("link_up", "link_down", "link_up_both", "link_down_both")}
CSV = "sentence,label\na,0\nb,1\n"
TRAIN = "--do_train --train_file train.csv"


# ---- hf-l2l


def _ran(words: str, **figures: Any) -> Prepare:
    def prepare(scene: Scene) -> Act:
        written(scene.folder / "model", LLAMA)
        (scene.folder / "machine.json").write_text(json.dumps({**json.loads(FIGURES.to_json()), **figures}))
        commands = [importlib.import_module(f"hf_l2l.cli.{name}").COMMAND for name in COMMANDS]
        given = words.replace("MODEL", "./model").split()
        options = make_parser(commands, set(given)).parse_args(given)
        return lambda: options.command.run(options)

    return prepare


_SIZES = "--layers 2 --hidden 64 --vocab 1e3"


PROGRAM: Rows = {
    f"`hf-l2l {words}`": _ran(words)
    for words in (
        "estimate MODEL --per_device_train_batch_size 0",
        "estimate MODEL --tokens 0",
        "estimate MODEL --devices 0",
        "estimate MODEL --hosts 2 --network 0",
        "estimate MODEL --hosts 2 --network 100",
        "estimate MODEL --ranks 4 --l2l_resident all",
        "estimate MODEL --ranks 4 --devices 2 --l2l_reduce device",
        "estimate MODEL --optim adamw",
        "estimate MODEL --params 1e9",
        f"estimate --params 0 {_SIZES}",
        f"estimate --params 1e3 {_SIZES}",
        "estimate MODEL --device-type foo",
        "estimate MODEL --device-type cpu",
        "estimate MODEL --budget 8",
        "estimate MODEL --budget 8GiB",
        "estimate MODEL --figures machine.json --probe",
        "estimate MODEL --figures nowhere.json",
        "estimate MODEL --figures machine.json --cmp fp16",
        "plan X7",
        "plan X160 --hardware a1000",
        "plan X160 --gpus 8 --pipeline 16",
        "plan X160 --pipeline 7",
        "plan X160 --gpus 1 --host-memory 64GiB",
        "plan X160 --node-size 0",
        "plan X160 --days inf",
        "plan X160 --method l2l --parallelism 3d",
        "plan X160 --measured machine.json",
        "plan X160 --measured machine.json --batch 8",
        "plan X160 --measured nowhere.json --batch 8",
        "env --device cuda",
        "inspect ./nowhere",
    )
}
PROGRAM |= {
    "`hf-l2l estimate MODEL --figures machine.json`, of a machine without an accelerator": _ran(
        "estimate MODEL --figures machine.json", **OF_A_CPU
    ),
    "`hf-l2l inspect MODEL --class Nothing`": row(_ran("inspect MODEL --class Nothing"), varies=r"5\.\d+\.\d+"),
}


# ---- estimate


def _estimated(*more: Any, **options: Any) -> Prepare:
    def prepare(scene: Scene) -> Act:
        model = scene.model()
        given = [each(scene) if callable(each) else each for each in more]
        return lambda: estimate(model, *given, **options)

    return prepare


def _made_in_steps(scene: Scene) -> Any:
    args = scene.arguments(use_cpu=True)
    scene.patch.setattr("transformers.Trainer.get_optimizer_cls_and_kwargs", lambda *_: (lambda *_: None, {}))
    return args


ESTIMATE: Rows = {
    "`estimate(model, rows=2, inputs=batch)`": _estimated(rows=2, inputs={"input_ids": torch.ones(2, 4)}),
    "`estimate(model, tokens=8)`": _estimated(tokens=8),
    "`estimate(model, host_memory=2**36)`": _estimated(host_memory=2**36),
    "`estimate(model, rows=0)`": _estimated(rows=0),
    "`estimate(model, 'serial')`": _estimated("serial"),
    "`estimate(model, L2LConfig(device_memory_budget='8GiB'))`": _estimated(L2LConfig(device_memory_budget="8GiB")),
    "`estimate(model, args)`, with an optimizer that is made in steps of its own": _estimated(_made_in_steps),
}
ESTIMATE_WARNINGS: Rows = {
    "`estimate(model, args)`, with a `device_memory_budget`": _estimated(
        lambda scene: scene.arguments(use_cpu=True, device_memory_budget="8GiB")
    )
}


# ---- run_glue_l2l.py


def _parsed(words: str, needed: bool = True, **files: str) -> Prepare:
    """The options of a command line; those that it needs in any case come first."""
    usual = "--model_name_or_path model --output_dir out --report_to none --use_cpu" if needed else ""

    def prepare(scene: Scene) -> Act:
        for name, text in {"train.csv": CSV, "empty.csv": "", "dev.json": "{}", **files}.items():
            (scene.folder / name).write_text(text)
        return lambda: run_glue_l2l.parse_options(f"{usual} {words}".split())

    return prepare


def _of_file(text: str) -> Prepare:
    return _parsed("options.json", needed=False, **{"options.json": text})


def _no_whole_checkpoint(scene: Scene) -> Act:
    (scene.folder / "out" / "checkpoint-4").mkdir(parents=True)
    return _parsed(f"{TRAIN} --resume_from_checkpoint True")(scene)


def _logging_dir(scene: Scene) -> Act:
    scene.patch.setenv("TENSORBOARD_LOGGING_DIR", "before")
    return _parsed("--logging_dir logs")(scene)


SCRIPT: Rows = {
    f"`run_glue_l2l.py {words}`": _parsed(words)
    for words in (
        "--do_trian",
        "--train_file train.csv",
        "--do_train",
        "--do_train --task_name mrpc --dataset_name imdb",
        "--do_train --dataset_config_name plain --train_file train.csv",
        "--do_train --task_name mprc",
        "--do_train --task_name mrpc --label_column verdict",
        "--do_eval --validation_file train.csv",
        f"{TRAIN} --do_eval",
        f"{TRAIN} --do_predict",
        f"{TRAIN} --test_file train.csv",
        "--do_train --train_file rows.tsv",
        "--do_train --train_file nowhere.csv",
        "--do_train --train_file empty.csv",
        f"{TRAIN} --do_eval --validation_file dev.json",
        f"{TRAIN} --text_columns a,b,c",
        f"{TRAIN} --learning_rate -1",
        f"{TRAIN} --max_steps 0",
        f"{TRAIN} --max_grad_norm -1",
        f"{TRAIN} --eval_strategy steps --eval_steps -1",
        "--simulate 8GiB",
        "--compare",
        "--compare --do_train --trainer hf",
        f"{TRAIN} --resume_from_checkpoint True",
        f"{TRAIN} --resume_from_checkpoint nowhere",
        f"{TRAIN} --output_dir train.csv",
        f"{TRAIN} --output_dir=",
        "--evaluation_strategy no --eval_strategy no",
        "--warmup_ratio 2",
        "--save_safetensors False",
        "--fp16_opt_level O2",
    )
}
SCRIPT |= {
    "`run_glue_l2l.py --do_train --train_file rows.csv`": _parsed(
        "--do_train --train_file rows.csv", **{"rows.csv": "sentence;label\na;0\n"}
    ),
    "`run_glue_l2l.py options.json`, with `[1, 2]`": _of_file("[1, 2]"),
    '`run_glue_l2l.py options.json`, with `{"trainer": ["hf"]}`': _of_file(
        '{"trainer": ["hf"], "model_name_or_path": "model", "output_dir": "out"}'
    ),
    "`--resume_from_checkpoint True`, where no checkpoint is whole": _no_whole_checkpoint,
}
SCRIPT_WARNINGS: Rows = {
    f"`run_glue_l2l.py {words}`": _parsed(words)
    for words in (f"--evaluation_strategy no {TRAIN}", "--overwrite_output_dir", "--trainer hf --stash host")
}
SCRIPT_WARNINGS["`run_glue_l2l.py --logging_dir logs`"] = _logging_dir
