"""run_glue_l2l.py on GLUE tasks and other data sets of the Hub, which a stand-in plays."""

from __future__ import annotations

import math
import socket
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf

datasets = pytest.importorskip("datasets")
evaluate = pytest.importorskip("evaluate")
pytest.importorskip("sklearn.metrics")
stats = pytest.importorskip("scipy.stats")

import run_glue_l2l
from glue_script import NAMED, Row, command, refused, trainer_of
from hf_l2l.glue import OTHER_DATA, TASKS, GlueMetric
from tiers import more

pytestmark = pytest.mark.usefixtures("datasets_cache")

NAMES = {"mnli": ["entailment", "neutral", "contradiction"], "mrpc": ["not_equivalent", "equivalent"]}
TEXTS = ("the film was good", "the food was bad", "a film was awful", "fine food")
ASKED: list[tuple[Any, ...]] = []


def split(task: str, count: int, labelled: bool) -> Any:
    """Rows as the Hub has them: an index, and a label of -1 where it is kept secret."""
    names = NAMES.get(task, ["no", "yes"])
    kind = datasets.Value("float32") if TASKS[task].regression else datasets.ClassLabel(names=names)
    labels = [i % len(names) if labelled else -1 for i in range(count)]
    columns: Row = {column: [TEXTS[i % 4] for i in range(count)] for column in TASKS[task].texts}
    features: Row = {column: datasets.Value("string") for column in columns}
    columns |= {"label": [float(x) for x in labels] if TASKS[task].regression else labels, "idx": list(range(count))}
    features |= {"label": kind, "idx": datasets.Value("int32")}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def hub(name: str, config: str | None = None, **kwargs: Any) -> Any:
    """Stands in for `datasets.load_dataset` with a Hub that has GLUE."""
    ASKED.append((name, config, kwargs))
    assert name == "nyu-mll/glue"
    assert config is not None
    parts = {"train": split(config, 12, True)}
    for kind in TASKS[config].kinds:
        parts[f"validation{kind}"] = split(config, 6 if kind != "_mismatched" else 4, True)
        parts[f"test{kind}"] = split(config, 5, False)
    return datasets.DatasetDict(parts)


@pytest.fixture
def _hub(monkeypatch: pytest.MonkeyPatch) -> None:
    ASKED.clear()
    monkeypatch.setattr(datasets, "load_dataset", hub)


@pytest.mark.usefixtures("_hub")
@pytest.mark.parametrize("task", ["mnli", "stsb", *more("mrpc")])
def test_a_task_is_trained_evaluated_and_predicted(tiny_model, tmp_path, task):
    """MNLI has two sets to evaluate, STS-B has scores."""
    limits = {"max_train_samples": 4, "max_eval_samples": 5, "max_predict_samples": 4}
    options = {"task_name": task.upper(), "do_predict": True, "pad_to_max_length": False, "max_steps": 1}
    metrics = run_glue_l2l.main(command(tiny_model, tmp_path, **options, **limits))
    assert metrics["train_samples"] == 4
    assert ASKED == [("nyu-mll/glue", task, {"cache_dir": None, "token": None})]
    expected = {f"eval_{name}" for name in TASKS[task].measures}
    if len(expected) > 1:
        expected.add("eval_combined_score")
        mean = sum(metrics[f"eval_{name}"] for name in TASKS[task].measures) / 2
        assert metrics["eval_combined_score"] == pytest.approx(mean, nan_ok=True)
    suffixes = ("", "_mm") if task == "mnli" else ("",)
    assert {f"{name}{suffix}" for name in expected for suffix in suffixes} <= metrics.keys()
    assert [metrics[f"eval_samples{suffix}"] for suffix in suffixes] == [5, 4][: len(suffixes)]

    out = tmp_path / "out"
    for suffix in suffixes:
        lines = (out / f"predict_results_{task}{suffix.replace('_', '-')}.txt").read_text().splitlines()
        rows = [line.split("\t") for line in lines]
        assert rows[0] == ["index", "prediction"] and [index for index, _ in rows[1:]] == ["0", "1", "2", "3"]
        names = NAMES.get(task, ["no", "yes"])
        assert all(np.isfinite(float(value)) if TASKS[task].regression else value in names for _, value in rows[1:])
    assert f"GLUE {task.upper()}" in (out / "README.md").read_text()


@pytest.mark.usefixtures("_hub")
def test_the_classic_command_of_run_glue(tiny_model, tmp_path, caplog):
    argv = f"""--model_name_or_path {tiny_model} --task_name mrpc --do_train --do_eval --max_seq_length 128
        --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 1 --output_dir {tmp_path / "out"}
        --overwrite_output_dir"""
    metrics = run_glue_l2l.main([*argv.split(), "--use_cpu"])
    assert {"train_loss", "eval_loss", "eval_accuracy", "eval_f1", "eval_combined_score"} <= metrics.keys()
    assert "--overwrite_output_dir is gone from transformers 5" in caplog.text


def renamed(model: str, folder: Path, names: list[str]) -> str:
    """The model with these classes."""
    classes = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    config = hf.AutoConfig.from_pretrained(model, **classes)
    hf.AutoModelForSequenceClassification.from_pretrained(model, config=config).save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


@pytest.mark.usefixtures("_hub")
def test_a_model_keeps_its_own_order_of_the_classes(tiny_model, tmp_path):
    """The positive class is that of the data."""
    order = ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"]  # as roberta-large-mnli has them
    trainer = trainer_of(command(renamed(tiny_model, tmp_path / "ordered", order), tmp_path, task_name="mnli"))
    assert trainer.model.config.id2label == dict(enumerate(order))
    assert trainer.train_dataset["labels"][:4] == [2, 1, 0, 2]  # entailment, neutral, contradiction, ...
    turned = renamed(tiny_model, tmp_path / "turned", ["equivalent", "not_equivalent"])
    trainer = trainer_of(command(turned, tmp_path, task_name="mrpc"))
    always_equivalent = np.array([[1.0, 0.0]] * 4)
    found = trainer.compute_metrics(hf.EvalPrediction(always_equivalent, np.array([0, 0, 0, 1])))
    assert (found["accuracy"], found["f1"]) == (0.75, pytest.approx(6 / 7))


def gives(monkeypatch: pytest.MonkeyPatch, labels: Any, names: list[str], *splits: str) -> Any:
    """Have the Hub give a data set of these labels."""
    rows = [{"text": row["sentence"], "label": label} for row, label in zip(NAMED, labels, strict=True)]
    data = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split in splits})
    found = data.cast_column("label", datasets.ClassLabel(names=names))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: found)
    return found


def test_another_data_set_of_the_hub(tiny_model, tmp_path, monkeypatch):
    """Its columns are chosen, its classes taken as numbers, and told apart by case."""
    thirds, halves = ([i % count for i in range(len(NAMED))] for count in (3, 2))
    found = gives(monkeypatch, thirds, ["bad", "fine", "good"], "train", "validation", "test")
    metrics = run_glue_l2l.main(command(tiny_model, tmp_path, dataset_name="some/data", do_predict=True))
    assert {"eval_accuracy", "eval_matthews_correlation"} <= metrics.keys() and "eval_f1" not in metrics
    assert hf.AutoConfig.from_pretrained(tmp_path / "out").id2label == {0: "bad", 1: "fine", 2: "good"}
    found = found.rename_columns({"text": "review", "label": "stars"})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: found)
    options = {"dataset_name": "some/data", "text_columns": "review", "label_column": "stars", "do_predict": True}
    trainer = trainer_of(command(tiny_model, tmp_path, **options, is_regression=True))
    assert trainer.model.config.problem_type == "regression"
    gives(monkeypatch, halves, ["Yes", "yes"], "train", "validation")
    trainer = trainer_of(command(tiny_model, tmp_path, dataset_name="some/data"))
    assert trainer.model.config.id2label == {0: "Yes", 1: "yes"}
    assert "f1" in trainer.compute_metrics(hf.EvalPrediction(np.array([[1.0, 0.0]] * 2), np.array([0, 1])))


def test_data_sets_of_the_hub_that_cannot_be_used_are_refused(tiny_model, tmp_path, monkeypatch, capsys):
    """A row without a label, and no split to evaluate."""
    argv = command(tiny_model, tmp_path, dataset_name="some/data")
    labels = [i % 2 for i in range(1, len(NAMED))]
    gives(monkeypatch, [-1, *labels], ["no", "yes"], "train", "validation")
    assert "(got -1 in some/data)" in refused(argv, capsys)
    gives(monkeypatch, [0, *labels], ["no", "yes"], "train", "test")
    assert "some/data must have the split validation" in refused(argv, capsys)


# ---- the metrics


KEYS = {
    **dict.fromkeys(("mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte", "sst2", "wnli"), ["accuracy"]),
    **dict.fromkeys(("mrpc", "qqp"), ["accuracy", "f1"]),
    "cola": ["matthews_correlation"],
    "stsb": ["pearson", "spearmanr"],
    "binary": ["accuracy", "f1", "matthews_correlation"],
    "multiclass": ["accuracy", "matthews_correlation"],
    "regression": ["mse", "pearson", "spearmanr"],
}


@pytest.fixture
def result(tmp_path):
    """The metric of a task on references and predictions."""
    return lambda name, references, predictions: GlueMetric(name, cache_dir=str(tmp_path)).compute(
        predictions=predictions, references=references
    )


near = partial(pytest.approx, rel=1e-12, abs=1e-12)


def test_every_task_and_kind_of_data_is_there_with_the_keys_of_the_benchmark(result):
    for name, keys in KEYS.items():
        found = result(name, [0, 1, 0, 1], [0, 1, 1, 1])
        assert list(found) == keys and all(type(value) is float for value in found.values())
    assert {*TASKS, *OTHER_DATA, "mnli_matched", "mnli_mismatched"} == set(KEYS)
    with pytest.raises(ValueError, match="choose one of cola, mnli, "):
        GlueMetric("mnli_mm")


def test_two_classes(result):
    """Of which 1 is the positive one, also where a class does not occur."""
    for references, predictions, accuracy, f1, matthews in (
        # 2 true positives, 1 false negative, 1 false positive, 4 true negatives
        ([1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0], 6 / 8, 4 / 6, (2 * 4 - 1) / math.sqrt(3 * 3 * 5 * 5)),
        ([1, 1, 1], [1, 1, 1], 1.0, 1.0, 0.0),
        ([0, 1, 1, 1], [1, 1, 1, 1], 0.75, 6 / 7, 0.0),
        ([0, 1], [1, 0], 0.0, 0.0, -1.0),
    ):
        expected = {"accuracy": near(accuracy), "matthews_correlation": near(matthews)}
        assert result("binary", references, predictions) == {**expected, "f1": near(f1)}
        assert result("multiclass", references, predictions) == expected
        assert result("cola", references, predictions) == {"matthews_correlation": near(matthews)}
        assert result("mrpc", references, predictions) == {"accuracy": near(accuracy), "f1": near(f1)}


def test_scores(result):
    """Equal values share the mean of their ranks. A correlation of something constant, or of a single pair, is nan."""
    references, predictions = np.array([1.0, 2.0, 2.0, 5.0]), np.array([0.5, 1.0, 4.0, 3.0])
    expected = {
        "pearson": near(np.corrcoef(references, predictions)[0, 1]),
        "spearmanr": near(np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 4, 3])[0, 1]),
    }
    assert result("stsb", references, predictions) == expected
    mse = ((references - predictions) ** 2).mean()
    assert result("regression", references, predictions) == {"mse": near(mse), **expected}
    with pytest.warns(stats.ConstantInputWarning):
        found = result("stsb", [1.0, 2.0, 4.0], [3.0] * 3)
    assert all(math.isnan(value) for value in found.values())
    assert all(math.isnan(value) for value in result("stsb", [2.0], [1.0]).values())


def test_batches_arrays_and_lists_are_the_same_and_neither_the_network_nor_a_file_is_used(tmp_path, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket, "socket", refuse)
    metric = GlueMetric("regression", cache_dir=str(tmp_path))
    assert isinstance(metric, evaluate.Metric)
    references, predictions = np.array([0, 1, 1, 0, 1], np.float32), np.array([0, 1, 0, 1, 1], np.float32)
    whole = metric.compute(predictions=predictions, references=references)
    assert metric.compute(predictions=predictions.tolist(), references=references.tolist()) == whole
    for part in (slice(0, 2), slice(2, 5)):
        metric.add_batch(predictions=predictions[part], references=references[part])
    assert metric.compute() == whole
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
