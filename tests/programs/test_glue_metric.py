"""The GLUE metrics are those of the benchmark: written out here with numpy."""

from __future__ import annotations

import math
import socket

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("datasets")
evaluate = pytest.importorskip("evaluate")
pytest.importorskip("sklearn.metrics")
stats = pytest.importorskip("scipy.stats")

from hf_l2l.glue import OTHER_DATA, TASKS, GlueMetric
from tiers import times

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
FEW = settings(max_examples=times(8, 40), deadline=None)


def pairs(values: st.SearchStrategy, min_size: int) -> st.SearchStrategy:
    """References and predictions of one length."""
    rows = st.lists(st.tuples(values, values), min_size=min_size, max_size=30)
    return rows.map(lambda chosen: tuple(np.array(column) for column in zip(*chosen, strict=True)))


TWO_CLASSES = pairs(st.integers(0, 1), 1)
FOUR_CLASSES = pairs(st.integers(0, 3), 1)
SCORES = pairs(st.integers(-40, 40).map(lambda sevenths: sevenths / 7), 3)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The metric of a task on references and predictions."""
    cache = tmp_path_factory.mktemp("metrics")
    made = {name: GlueMetric(name, cache_dir=str(cache)) for name in KEYS}
    return lambda name, references, predictions: made[name].compute(predictions=predictions, references=references)


# ---- formulas


def accuracy(t: np.ndarray, p: np.ndarray) -> float:
    return sum(a == b for a, b in zip(t, p, strict=True)) / len(t)


def f1(t: np.ndarray, p: np.ndarray) -> float:
    tp, fp, fn = ((t == 1) & (p == 1)).sum(), ((t == 0) & (p == 1)).sum(), ((t == 1) & (p == 0)).sum()
    return 2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 0.0


def confusion(t: np.ndarray, p: np.ndarray, classes: int) -> np.ndarray:
    counts = np.zeros((classes, classes))
    np.add.at(counts, (t, p), 1)
    return counts


def matthews_of_two(t: np.ndarray, p: np.ndarray) -> float:
    (tn, fp), (fn, tp) = confusion(t, p, 2).tolist()
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return (tp * tn - fp * fn) / below if below else 0.0


def matthews(t: np.ndarray, p: np.ndarray) -> float:
    """Of any number of classes: the correlation of the two matrices of class indicators."""
    counts = confusion(t, p, 4)
    rows, columns, total = counts.sum(1), counts.sum(0), counts.sum()
    below = math.sqrt((total**2 - rows @ rows) * (total**2 - columns @ columns))
    return (np.trace(counts) * total - rows @ columns) / below if below else 0.0


def pearson(t: np.ndarray, p: np.ndarray) -> float:
    t, p = t - t.mean(), p - p.mean()
    return (t @ p) / math.sqrt((t @ t) * (p @ p))


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Equal values share the mean of the places that they take."""
    return np.array([(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values])


def spearman(t: np.ndarray, p: np.ndarray) -> float:
    return pearson(average_ranks(t), average_ranks(p))


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


# ---- names


def test_every_task_and_kind_of_data_is_there_with_the_keys_of_the_benchmark(result):
    for name, keys in KEYS.items():
        found = result(name, [0, 1, 0, 1], [0, 1, 1, 1])
        assert list(found) == keys and all(type(value) is float for value in found.values())
    assert {*TASKS, *OTHER_DATA, "mnli_matched", "mnli_mismatched"} == set(KEYS)
    assert [name for name, task in TASKS.items() if task.regression] == ["stsb"]
    assert [name for name, task in TASKS.items() if task.kinds != ("",)] == ["mnli"]
    assert TASKS["mnli"].kinds == ("_matched", "_mismatched")
    for name in ("ax", "MRPC", "default", "mnli_mm"):
        with pytest.raises(ValueError, match="choose one of cola, mnli, "):
            GlueMetric(name)


# ---- values


@FEW
@given(TWO_CLASSES)
def test_two_classes_by_formula(result, columns):
    expected = {"accuracy": near(accuracy(*columns)), "f1": near(f1(*columns))}
    assert result("mrpc", *columns) == result("qqp", *columns) == expected
    matthews_correlation = near(matthews_of_two(*columns))
    assert result("binary", *columns) == {**expected, "matthews_correlation": matthews_correlation}
    assert result("cola", *columns) == {"matthews_correlation": matthews_correlation}


@FEW
@given(FOUR_CLASSES)
def test_many_classes_by_formula(result, columns):
    expected = {"accuracy": near(accuracy(*columns)), "matthews_correlation": near(matthews(*columns))}
    assert result("multiclass", *columns) == expected
    assert result("mnli", *columns) == {"accuracy": near(accuracy(*columns))}


@FEW
@given(SCORES)
def test_scores_by_formula(result, columns):
    assume(all(len(set(column)) > 1 for column in columns))
    expected = {"pearson": near(pearson(*columns)), "spearmanr": near(spearman(*columns))}
    assert result("stsb", *columns) == expected
    mse = sum((a - b) ** 2 for a, b in zip(*columns, strict=True)) / len(columns[0])
    assert result("regression", *columns) == {"mse": near(mse), **expected}


@pytest.mark.parametrize(
    ("references", "predictions", "accuracy", "f1", "matthews"),
    [
        pytest.param([0, 0, 0], [0, 0, 0], 1.0, 0.0, 0.0, id="all negative"),
        pytest.param([1, 1, 1], [1, 1, 1], 1.0, 1.0, 0.0, id="all positive"),
        pytest.param([0, 0, 0, 0], [0, 1, 0, 0], 0.75, 0.0, 0.0, id="one class in the references"),
        pytest.param([0, 1, 1, 1], [1, 1, 1, 1], 0.75, 6 / 7, 0.0, id="one class predicted"),
        pytest.param([0, 0], [1, 1], 0.0, 0.0, 0.0, id="another class each"),
        pytest.param([0, 1], [1, 0], 0.0, 0.0, -1.0, id="all wrong"),
        pytest.param([1], [1], 1.0, 1.0, 0.0, id="one row"),
    ],
)
def test_classes_at_the_edge(result, references, predictions, accuracy, f1, matthews):
    assert result("binary", references, predictions) == {
        "accuracy": accuracy,
        "f1": near(f1),
        "matthews_correlation": matthews,
    }
    assert result("multiclass", references, predictions) == {"accuracy": accuracy, "matthews_correlation": matthews}


@pytest.mark.parametrize("columns", [([1.0, 2.0, 4.0], [3.0] * 3), ([3.0] * 3, [1.0, 2.0, 4.0]), ([3.0] * 3,) * 2])
def test_a_correlation_of_something_constant_is_nan(result, columns):
    with pytest.warns(stats.ConstantInputWarning):
        found = result("stsb", *columns)
    assert all(math.isnan(value) for value in found.values())
    found = GlueMetric("stsb").compute(predictions=[1.0], references=[2.0])  # a single pair has none
    assert all(math.isnan(value) for value in found.values())


# ---- as a metric of evaluate


@pytest.mark.parametrize("name", ["mrpc", "regression"])
def test_batches_arrays_and_lists_are_the_same(name, tmp_path):
    metric = GlueMetric(name, cache_dir=str(tmp_path))
    assert isinstance(metric, evaluate.Metric)
    kind = np.float32 if name == "regression" else np.int64
    references, predictions = np.array([0, 1, 1, 0, 1], kind), np.array([0, 1, 0, 1, 1], kind)
    whole = metric.compute(predictions=predictions, references=references)
    assert metric.compute(predictions=predictions.tolist(), references=references.tolist()) == whole
    for part in (slice(0, 2), slice(2, 5)):
        metric.add_batch(predictions=predictions[part], references=references[part])
    assert metric.compute() == whole


def test_neither_the_network_nor_a_file_is_used(tmp_path, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket, "socket", refuse)
    metric = GlueMetric("mrpc", cache_dir=str(tmp_path))
    metric.add_batch(predictions=[0, 1], references=[1, 1])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert metric.compute() == {"accuracy": 0.5, "f1": near(2 / 3)}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
