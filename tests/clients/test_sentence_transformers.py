"""sentence-transformers' trainers, losses and encoders run layer to layer as they do by themselves; and the
trainer that SetFit builds itself, by a callback."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sentence_transformers", reason="`make test-clients` has it")

import numpy as np
import torch
import transformers as hf
from datasets import Dataset, Value
from sentence_transformers import SentenceTransformer as Encoder
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder import losses as cross_losses
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from torch import nn

import clients
from client_models import bert, saved, sentence
from clients import UBATCHES, check_trainer, on_sim
from hf_l2l import L2LCallback, L2LConfig, attach_l2l, detach_l2l
from hf_l2l.hf.attach import attachment_of

WIDTH = 16
DEVICE = "sim" if on_sim() else "cpu"
KINDS = SentenceTransformerTrainer, SentenceTransformerTrainingArguments
ubatches = pytest.mark.parametrize("ubatch_size", UBATCHES)


def encoder(folder: Path, *more: nn.Module, dropout: float = 0.0) -> Encoder:
    """A tiny BERT with mean pooling, on the host, where L2L wants it; a plain trainer moves it."""
    transformer = Transformer(saved(bert(hf.BertModel, dropout), folder / "bert"), max_seq_length=16)
    return Encoder(modules=[transformer, Pooling(WIDTH, "mean"), *more], device="cpu")


def pairs(count: int = 32, labels: int | None = None) -> Dataset:
    draws = random.Random(2)
    rows = [{"anchor": sentence(draws), "positive": sentence(draws)} for _ in range(count)]
    return Dataset.from_list([{**row, "label": i % labels} if labels else row for i, row in enumerate(rows)])


def softmax(model: Encoder) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # it has weights of its own
        torch.manual_seed(7)
        return losses.SoftmaxLoss(model, WIDTH, num_labels=3)


LOSSES: dict[str, Callable[[Encoder], nn.Module]] = {
    "in-batch negatives": losses.MultipleNegativesRankingLoss,
    "cached": lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
    "softmax": softmax,
    "matryoshka": lambda model: losses.MatryoshkaLoss(
        model, losses.MultipleNegativesRankingLoss(model), matryoshka_dims=[16, 8, 4]
    ),
}


def parts(folder: Path, loss: str = "in-batch negatives", dropout: float = 0.0) -> Callable[[], dict[str, Any]]:
    """What makes the model, its rows and its loss."""

    def made() -> dict[str, Any]:
        model = encoder(folder, dropout=dropout)
        rows = pairs(labels=3 if loss == "softmax" else None)
        return {"model": model, "train_dataset": rows, "loss": LOSSES[loss](model)}

    return made


@ubatches
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(tmp_path, loss, ubatch_size):
    found = check_trainer(*KINDS, tmp_path, parts(tmp_path, loss), ubatch_size)
    if loss == "softmax":
        before = softmax(found.trainer.model).classifier
        assert not torch.equal(found.weights["loss.classifier.weight"], before.weight), "it was not trained"


def test_accumulated_batches_run_one_by_one_since_their_negatives_are_in_them(tmp_path):
    accumulated = {"gradient_accumulation_steps": 2, "max_steps": 2, "per_device_train_batch_size": 4}
    with pytest.warns(UserWarning, match="4 times per step: .*Trainer has a compute_loss of its own"):
        check_trainer(*KINDS, tmp_path, parts(tmp_path), 3, **accumulated)


def test_dropout_is_that_of_the_plain_trainer(tmp_path):
    check_trainer(*KINDS, tmp_path, parts(tmp_path, dropout=0.3), None)


@ubatches
def test_learning_rates_by_name(tmp_path, ubatch_size):
    """An option of sentence-transformers alone, which makes groups of the optimizer."""
    rates = {r"embeddings": 1e-3, r"layer\.2\.output": 5e-2}
    found = check_trainer(*KINDS, tmp_path, parts(tmp_path), ubatch_size, learning_rate_mapping=rates)
    assert {group["initial_lr"] for group in found.trainer.optimizer.param_groups} == {1e-2, 1e-3, 5e-2}


@ubatches
def test_several_losses_and_an_evaluator(tmp_path, ubatch_size):
    rows, scored = pairs(), pairs(labels=2).cast_column("label", Value("float32"))
    scores = [i / len(rows) for i in range(len(rows))]

    def made() -> dict[str, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = encoder(tmp_path, Dense(WIDTH, 8), Normalize())
        return {
            "model": model,
            "train_dataset": {"first": rows, "second": scored},
            "eval_dataset": {"first": rows},
            "loss": {"first": losses.MultipleNegativesRankingLoss(model), "second": losses.CoSENTLoss(model)},
            "evaluator": EmbeddingSimilarityEvaluator(rows["anchor"], rows["positive"], scores, name="near"),
        }

    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_near_spearman_cosine"}
    check_trainer(*KINDS, tmp_path, made, ubatch_size, **saving, **best)


@ubatches
def test_a_cross_encoder(tmp_path, ubatch_size):
    rows = pairs(labels=2).cast_column("label", Value("float32"))

    def made() -> dict[str, Any]:
        model = CrossEncoder(saved(bert(num_labels=1), tmp_path / "bert"), device="cpu")
        return {"model": model, "train_dataset": rows, "loss": cross_losses.BinaryCrossEntropyLoss(model)}

    check_trainer(CrossEncoderTrainer, CrossEncoderTrainingArguments, tmp_path, made, ubatch_size)


@ubatches
def test_encode_with_an_attached_model(tmp_path, ubatch_size):
    model = encoder(tmp_path, Normalize())
    texts = pairs(5)["anchor"]
    expected = model.encode(texts)
    attach_l2l(model, L2LConfig(device=DEVICE, ubatch_size=ubatch_size))
    found = model.encode(texts, convert_to_tensor=True)
    np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=1e-5, atol=1e-6)
    assert found.device.type == DEVICE
    detach_l2l(model)
    assert np.array_equal(model.encode(texts), expected)


@ubatches
def test_predict_with_an_attached_model(tmp_path, ubatch_size):
    model = CrossEncoder(saved(bert(num_labels=1), tmp_path / "bert"), device="cpu")
    rows = [tuple(row.values()) for row in pairs(5)]
    expected = model.predict(rows)
    attach_l2l(model, L2LConfig(device=DEVICE, ubatch_size=ubatch_size))
    np.testing.assert_allclose(model.predict(rows), expected, rtol=1e-5, atol=1e-6)


# ---- SetFit


def trained(folder: Path, rows: Dataset, callbacks: list[Any]) -> tuple[Any, clients.Training]:
    """A model of SetFit, and its training."""
    from setfit import SetFitModel, Trainer, TrainingArguments

    encoder(folder).save(str(folder / "encoder"))
    clients.start_again()
    model = SetFitModel.from_pretrained(str(folder / "encoder"), device="cpu")
    few = {"batch_size": 4, "num_epochs": 1, "max_steps": 4, "logging_steps": 1, "body_learning_rate": 1e-2}
    quiet = {"report_to": "none", "save_strategy": "no", "show_progress_bar": False}
    args = TrainingArguments(str(folder / "output"), **few, **quiet)
    trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    weights = {name: p.detach().cpu().clone() for name, p in model.model_body.named_parameters()}
    inner = trainer.st_trainer
    return model, clients.Training(inner, clients.losses(inner.state.log_history), weights)


@ubatches
def test_setfit(tmp_path, ubatch_size):
    pytest.importorskip("setfit", reason="`make test-clients` has it")
    draws = random.Random(2)
    rows = Dataset.from_list([{"text": sentence(draws), "label": i % 2} for i in range(8)])
    plain, expected = trained(tmp_path / "plain", rows, [])
    found, ours = trained(tmp_path / "l2l", rows, [L2LCallback(L2LConfig(ubatch_size=ubatch_size))])
    assert attachment_of(found.model_body) is not None
    clients.assert_same(ours, expected, None if ubatch_size is None else 1e-4)
    assert not torch.equal(next(iter(ours.weights.values())), bert(hf.BertModel).embeddings.word_embeddings.weight)
    assert found.predict(rows["text"]).tolist() == plain.predict(rows["text"]).tolist()
