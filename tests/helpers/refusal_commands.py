"""Flags of `hf-l2l` and `run_glue_l2l.py`, and arguments of `estimate`, that are refused."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import torch

import run_glue_l2l
from cli_models import LLAMA, written
from hf_l2l import L2LConfig, estimate
from hf_l2l.cli.main import COMMANDS, _parser
from hf_l2l.probe.figures import HardwareFigures
from refusals import Act, Case, Prepare, Scene

FIGURES = HardwareFigures("a GPU", 2**30, 1e9, 1e9, 1e9, 1e9, 1e10, {1: 1e9}, {"fp32": 1e11}, True, 1e11)
OF_A_CPU = {name: None for name in ("link_up", "link_down", "link_up_both", "link_down_both")}
CSV = "sentence,label\na,0\nb,1\n"


# ---- hf-l2l


def _ran(*words: str, figures: Mapping[str, Any] | None = None, model: str = "./model") -> Prepare:
    def prepare(scene: Scene) -> Act:
        written(scene.folder / "model", LLAMA)
        (scene.folder / "machine.json").write_text(json.dumps({**json.loads(FIGURES.to_json()), **(figures or {})}))
        commands = [importlib.import_module(f"hf_l2l.cli.{name}").COMMAND for name in COMMANDS]
        given = [model if word == "MODEL" else word for word in words]
        options = _parser(commands, set(given)).parse_args(given)
        return lambda: options.command.run(options)

    return prepare


def _of_program(*words: str, **more: Any) -> Case:
    return Case(f"`hf-l2l {' '.join(words)}`", _ran(*words, **more))


PROGRAM = [
    _of_program("estimate", "MODEL", "--per_device_train_batch_size", "0"),
    _of_program("estimate", "MODEL", "--tokens", "0"),
    _of_program("estimate", "MODEL", "--devices", "0"),
    _of_program("estimate", "MODEL", "--hosts", "2", "--network", "0"),
    _of_program("estimate", "MODEL", "--hosts", "2", "--network", "100"),
    _of_program("estimate", "MODEL", "--ranks", "4", "--l2l_resident", "all"),
    _of_program("estimate", "MODEL", "--ranks", "4", "--devices", "2", "--l2l_reduce", "device"),
    _of_program("estimate", "MODEL", "--optim", "adamw"),
    _of_program("estimate", "MODEL", "--params", "1e9"),
    _of_program("estimate", "--params", "0", "--layers", "2", "--hidden", "64", "--vocab", "1e3"),
    _of_program("estimate", "--params", "1e3", "--layers", "2", "--hidden", "64", "--vocab", "1e3"),
    _of_program("estimate", "MODEL", "--device-type", "foo"),
    _of_program("estimate", "MODEL", "--device-type", "cpu"),
    _of_program("estimate", "MODEL", "--budget", "8"),
    _of_program("estimate", "MODEL", "--budget", "8GiB"),
    _of_program("estimate", "MODEL", "--figures", "machine.json", "--probe"),
    _of_program("estimate", "MODEL", "--figures", "nowhere.json"),
    _of_program("estimate", "MODEL", "--figures", "machine.json", "--cmp", "fp16"),
    Case(
        "`hf-l2l estimate MODEL --figures machine.json`, of a machine without an accelerator",
        _ran("estimate", "MODEL", "--figures", "machine.json", figures=OF_A_CPU),
    ),
    _of_program("plan", "X7"),
    _of_program("plan", "X160", "--hardware", "a1000"),
    _of_program("plan", "X160", "--gpus", "8", "--pipeline", "16"),
    _of_program("plan", "X160", "--pipeline", "7"),
    _of_program("plan", "X160", "--gpus", "1", "--host-memory", "64GiB"),
    _of_program("plan", "X160", "--node-size", "0"),
    _of_program("plan", "X160", "--days", "inf"),
    _of_program("plan", "X160", "--method", "l2l", "--parallelism", "3d"),
    _of_program("plan", "X160", "--measured", "machine.json"),
    _of_program("plan", "X160", "--measured", "machine.json", "--batch", "8"),
    _of_program("plan", "X160", "--measured", "nowhere.json", "--batch", "8"),
    _of_program("env", "--device", "cuda"),
    _of_program("inspect", "MODEL", "--class", "Nothing")._replace(varies=r"5\.\d+\.\d+"),
    Case("`hf-l2l inspect ./nowhere`", _ran("inspect", "MODEL", model="./nowhere")),
]


# ---- estimate


def _estimated(*more: Any, **options: Any) -> Prepare:
    def prepare(scene: Scene) -> Act:
        model = scene.model()
        given = [each(scene) if callable(each) else each for each in more]
        return lambda: estimate(model, *given, **options)

    return prepare


def _of_estimate(**options: Any) -> Case:
    typed = ", ".join(f"{name}={'batch' if name == 'inputs' else value}" for name, value in options.items())
    return Case(f"`estimate(model, {typed})`", _estimated(**options))


def _made_in_steps(scene: Scene) -> Any:
    args = scene.arguments(use_cpu=True)
    scene.patch.setattr("transformers.Trainer.get_optimizer_cls_and_kwargs", lambda *_: (lambda *_: None, {}))
    return args


ESTIMATE = [
    _of_estimate(rows=2, inputs={"input_ids": torch.ones(2, 4)}),
    _of_estimate(tokens=8),
    _of_estimate(host_memory=2**36)._replace(typed="`estimate(model, host_memory=2**36)`"),
    _of_estimate(rows=0),
    Case("`estimate(model, 'serial')`", _estimated("serial")),
    Case(
        "`estimate(model, L2LConfig(device_memory_budget='8GiB'))`", _estimated(L2LConfig(device_memory_budget="8GiB"))
    ),
    Case("`estimate(model, args)`, with an optimizer that is made in steps of its own", _estimated(_made_in_steps)),
]


# ---- run_glue_l2l.py


def _parsed(*words: str, files: Mapping[str, str] | None = None, needed: bool = True) -> Prepare:
    """The options of a command line; those that it needs in any case come first."""
    usual = ["--model_name_or_path", "model", "--output_dir", "out", "--report_to", "none", "--use_cpu"]

    def prepare(scene: Scene) -> Act:
        for name, text in {"train.csv": CSV, "empty.csv": "", "dev.json": "{}", **(files or {})}.items():
            (scene.folder / name).write_text(text)
        given = [*(usual if needed else []), *words]
        return lambda: run_glue_l2l.parse_options(given)

    return prepare


def _no_whole_checkpoint(scene: Scene) -> Act:
    (scene.folder / "out" / "checkpoint-4").mkdir(parents=True)
    return _parsed(*TRAIN, "--resume_from_checkpoint", "True")(scene)


def _of_script(*words: str, **more: Any) -> Case:
    return Case(f"`run_glue_l2l.py {' '.join(words)}`", _parsed(*words, **more))


def _of_file(text: str) -> Prepare:
    return _parsed("options.json", files={"options.json": text}, needed=False)


TRAIN = ("--do_train", "--train_file", "train.csv")
SCRIPT = [
    _of_script("--do_trian"),
    Case("`run_glue_l2l.py options.json`, with `[1, 2]`", _of_file("[1, 2]")),
    _of_script("--train_file", "train.csv"),
    _of_script("--do_train"),
    _of_script("--do_train", "--task_name", "mrpc", "--dataset_name", "imdb"),
    _of_script("--do_train", "--dataset_config_name", "plain", "--train_file", "train.csv"),
    _of_script("--do_train", "--task_name", "mprc"),
    _of_script("--do_train", "--task_name", "mrpc", "--label_column", "verdict"),
    _of_script("--do_eval", "--validation_file", "train.csv"),
    _of_script(*TRAIN, "--do_eval"),
    _of_script(*TRAIN, "--do_predict"),
    _of_script(*TRAIN, "--test_file", "train.csv"),
    _of_script("--do_train", "--train_file", "rows.tsv"),
    _of_script("--do_train", "--train_file", "nowhere.csv"),
    _of_script("--do_train", "--train_file", "empty.csv"),
    _of_script(*TRAIN, "--do_eval", "--validation_file", "dev.json"),
    _of_script("--do_train", "--train_file", "rows.csv", files={"rows.csv": "sentence;label\na;0\n"}),
    _of_script(*TRAIN, "--text_columns", "a,b,c"),
    _of_script(*TRAIN, "--learning_rate", "-1"),
    _of_script(*TRAIN, "--max_steps", "0"),
    _of_script(*TRAIN, "--max_grad_norm", "-1"),
    _of_script(*TRAIN, "--eval_strategy", "steps", "--eval_steps", "-1"),
    Case(
        '`run_glue_l2l.py options.json`, with `{"trainer": ["hf"]}`',
        _of_file('{"trainer": ["hf"], "model_name_or_path": "model", "output_dir": "out"}'),
    ),
    _of_script("--simulate", "8GiB"),
    _of_script("--compare"),
    _of_script("--compare", "--do_train", "--trainer", "hf"),
    _of_script(*TRAIN, "--resume_from_checkpoint", "True"),
    _of_script(*TRAIN, "--resume_from_checkpoint", "nowhere"),
    Case("`--resume_from_checkpoint True`, where no checkpoint is whole", _no_whole_checkpoint),
    _of_script(*TRAIN, "--output_dir", "train.csv"),
    _of_script(*TRAIN, "--output_dir="),
    _of_script("--evaluation_strategy", "no", "--eval_strategy", "no"),
    _of_script("--warmup_ratio", "2"),
    _of_script("--save_safetensors", "False"),
    _of_script("--fp16_opt_level", "O2"),
]


def _with_a_budget(scene: Scene) -> Any:
    return scene.arguments(use_cpu=True, device_memory_budget="8GiB")


def _logging_dir(scene: Scene) -> Act:
    scene.patch.setenv("TENSORBOARD_LOGGING_DIR", "before")
    return _parsed("--logging_dir", "logs")(scene)


ESTIMATE_WARNINGS = [Case("`estimate(model, args)`, with a `device_memory_budget`", _estimated(_with_a_budget))]
SCRIPT_WARNINGS = [
    _of_script("--evaluation_strategy", "no", *TRAIN),
    Case("`run_glue_l2l.py --logging_dir logs`", _logging_dir),
    _of_script("--overwrite_output_dir"),
    _of_script("--trainer", "hf", "--stash", "host"),
]
