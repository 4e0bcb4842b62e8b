"""The GLUE metrics are those of the benchmark."""

from __future__ import annotations

import math
import socket

import numpy as np
import pytest

pytest.importorskip("datasets")
evaluate = pytest.importorskip("evaluate")
pytest.importorskip("sklearn.metrics")
stats = pytest.importorskip("scipy.stats")

from hf_l2l.glue import OTHER_DATA, TASKS, GlueMetric

KEYS = {
    "cola": ["matthews_correlation"],
    "mnli": ["accuracy"],
    "mnli_matched": ["accuracy"],
    "mnli_mismatched": ["accuracy"],
    "mrpc": ["accuracy", "f1"],
    "qnli": ["accuracy"],
    "qqp": ["accuracy", "f1"],
    "rte": ["accuracy"],
    "sst2": ["accuracy"],
    "stsb": ["pearson", "spearmanr"],
    "wnli": ["accuracy"],
    "binary": ["accuracy", "f1", "matthews_correlation"],
    "multiclass": ["accuracy", "matthews_correlation"],
    "regression": ["mse", "pearson", "spearmanr"],
}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The metric of a task on references and predictions."""
    cache = tmp_path_factory.mktemp("metrics")
    made = {name: GlueMetric(name, cache_dir=str(cache)) for name in KEYS}
    return lambda name, references, predictions: made[name].compute(predictions=predictions, references=references)


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


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
    some, same = [1.0, 2.0, 4.0], [3.0] * 3
    with pytest.warns(stats.ConstantInputWarning):
        found = result("stsb", some, same)
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
