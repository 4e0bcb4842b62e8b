"""SetFit builds its trainer itself: the model of sentences runs layer to layer by a callback."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("setfit", reason="`make test-clients` has it")

import torch
import transformers as hf
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from setfit import SetFitModel, Trainer, TrainingArguments

from client_models import bert, saved, sentence
from clients import UBATCHES, Training, assert_same, losses, start_again
from hf_l2l import L2LCallback, L2LConfig
from hf_l2l.hf.attach import attachment_of


def data() -> Dataset:
    draws = random.Random(2)
    return Dataset.from_list([{"text": sentence(draws), "label": i % 2} for i in range(8)])


def trained(folder: Path, callbacks: list[Any]) -> tuple[SetFitModel, Training]:
    transformer = Transformer(saved(bert(hf.BertModel), folder / "bert"), max_seq_length=16)
    SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu").save(str(folder / "encoder"))
    start_again()
    model = SetFitModel.from_pretrained(str(folder / "encoder"), device="cpu")
    args = TrainingArguments(
        str(folder / "output"),
        batch_size=4,
        num_epochs=1,
        max_steps=4,
        body_learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        show_progress_bar=False,
    )
    trainer = Trainer(model=model, args=args, train_dataset=data(), callbacks=callbacks)
    trainer.train()
    weights = {name: p.detach().cpu().clone() for name, p in model.model_body.named_parameters()}
    inner = trainer.st_trainer
    return model, Training(inner, losses(inner.state.log_history), weights)


@pytest.mark.parametrize("ubatch_size", UBATCHES)
def test_setfit(tmp_path, ubatch_size):
    plain, expected = trained(tmp_path / "plain", [])
    config = L2LConfig(ubatch_size=ubatch_size)
    found, ours = trained(tmp_path / "l2l", [L2LCallback(config)])
    assert attachment_of(found.model_body) is not None
    assert_same(ours, expected, None if ubatch_size is None else 1e-4)
    assert not torch.equal(next(iter(ours.weights.values())), bert(hf.BertModel).embeddings.word_embeddings.weight)
    texts = data()["text"]
    assert found.predict(texts).tolist() == plain.predict(texts).tolist()
