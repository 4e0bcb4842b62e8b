"""Models whose loss is computed in chunks: loss and gradients are those of the plain model, and no logits are made."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, attach_l2l, detach_l2l
from hf_l2l.logits import chunks, deferred, heads
from hf_l2l.logits.deferred import DeferredLogits
from hf_l2l.runtime import stream
from memory_switches import forced_copies
from models import SMALL, TOLERANCE, VOCAB, attached, batch_for, gpt2, gradients, llama, relative_error, t5
from training import arguments


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 3)
    deferred._tell_once.cache_clear()
    with forced_copies():
        yield


def test_where_memory_is_shared_nothing_changes(monkeypatch):
    torch.manual_seed(0)
    model = llama()
    batch = batch_for(model)
    plain, expected = run(copy.deepcopy(model), batch)
    with monkeypatch.context() as patch:  # ends before the copies of the fixture do
        patch.setattr(stream, "shares_host_memory", lambda device: True)
        found, grads = run(attached(model), batch)
    assert type(found.logits) is torch.Tensor and torch.equal(found.loss, plain.loss)
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)


def _causal(name: str, **more: object) -> nn.Module:
    config = getattr(hf, f"{name}Config")(**{**SMALL, "num_key_value_heads": 1, **more})
    return getattr(hf, f"{name}ForCausalLM")(config)


def bloom() -> nn.Module:
    return hf.BloomForCausalLM(hf.BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=VOCAB))


def bert_mlm() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def bart() -> nn.Module:
    config = hf.BartConfig(
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        vocab_size=VOCAB,
        max_position_embeddings=32,
        dropout=0.0,
    )
    return hf.BartForConditionalGeneration(config)


MODELS = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "gemma2": lambda: _causal("Gemma2", head_dim=8, final_logit_softcapping=2.0),
    "cohere": lambda: _causal("Cohere", logit_scale=0.3),
    "granite": lambda: _causal("Granite", logits_scaling=3.0),
    "bert": bert_mlm,
    "t5": t5,
    "bart": bart,
    "bloom": bloom,
}


def run(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    found = model(**batch)
    found.loss.backward()
    return found, gradients(model)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("ubatch_size", [None, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_loss_in_chunks(name, ubatch_size, caplog):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    batch = {**batch_for(model), "num_items_in_batch": 17} if name == "llama" else batch_for(model)
    plain, expected = run(copy.deepcopy(model), batch)
    with forced_copies():
        found, grads = run(attached(model, ubatch_size=ubatch_size), batch)
    assert isinstance(found.logits, DeferredLogits) and not found.logits.deferred.is_there
    # Losses in transformers are fp32 in float64 models, too.
    assert found.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    assert relative_error(grads, expected) < TOLERANCE[torch.float32]
    assert [record for record in caplog.records if record.name == "hf_l2l" and record.levelname == "WARNING"] == []
    torch.testing.assert_close(found.logits, plain.logits, rtol=1e-10, atol=1e-12)  # afterwards, for whoever asks
    assert "needs the logits of all tokens at once" in caplog.text


def test_logits_of_the_program_are_part_of_the_graph():
    """A loss of one's own, of what the model has returned."""
    torch.manual_seed(0)
    model = llama().double()
    ids = batch_for(model, masked=False)["input_ids"]

    def loss(each: nn.Module) -> torch.Tensor:
        found = each(input_ids=ids).logits[:, :-1]
        value = nn.functional.cross_entropy(found.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        (value + found.logsumexp(-1).mean()).backward()
        return value.detach()

    plain = copy.deepcopy(model)
    assert loss(attached(model)).item() == pytest.approx(loss(plain).item(), rel=1e-12)
    assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


@pytest.mark.parametrize(
    ("options", "defers"),
    [({}, True), ({"chunked_loss": "off"}, False), ({"cmp": "bf16"}, True), ({"cmp": "fp16"}, True)],
)
def test_logits_wait_unless_told_otherwise(options, defers):
    model = llama()
    plain = copy.deepcopy(model)
    batch = batch_for(model)
    optimizer = torch.optim.SGD(model.parameters())
    attach_l2l(model, L2LConfig(**options)).wrap(optimizer)
    found, grads = run(model, batch)
    assert isinstance(found.logits, DeferredLogits) is defers
    assert found.logits.dtype == torch.float32
    expected, others = run(plain, batch)
    tolerance = 2e-2 if "cmp" in options else 1e-5
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=tolerance)
    assert relative_error(grads, others) < (0.1 if "cmp" in options else TOLERANCE[torch.float32])


def test_few_tokens_are_one_chunk_with_the_bits_of_plain_torch(monkeypatch):
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 128)
    torch.manual_seed(0)
    model = llama()
    batch = batch_for(model)
    plain, expected = run(copy.deepcopy(model), batch)
    found, grads = run(attached(model), batch)
    assert type(found.logits) is torch.Tensor and torch.equal(found.loss, plain.loss)
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)


def test_without_gradients_logits_are_there():
    model = attached(llama())
    batch = batch_for(model)
    with torch.no_grad():
        assert type(model(**batch).logits) is torch.Tensor
        with heads.loss_alone():
            found = model(**batch)
    assert isinstance(found.logits, DeferredLogits) and not found.logits.requires_grad
    ids = batch["input_ids"][:2]
    assert torch.equal(
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False),
        detach_l2l(model).generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False),
    )


class _Rows(torch.utils.data.Dataset):
    def __init__(self, model: nn.Module) -> None:
        self.batch = batch_for(model)

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.batch.items()}


@pytest.mark.parametrize("loss_alone", [True, False])
def test_an_evaluation_of_the_loss_alone_makes_no_logits(loss_alone, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = llama()
    plain = hf.Trainer(
        copy.deepcopy(model), arguments(hf.TrainingArguments, tmp_path / "a"), eval_dataset=_Rows(model)
    ).evaluate()
    kinds = []
    trainer = L2LTrainer(
        model,
        arguments(L2LTrainingArguments, tmp_path / "b"),
        eval_dataset=_Rows(model),
        compute_metrics=None if loss_alone else lambda prediction: {"count": len(prediction.predictions)},
    )
    real = heads.OutputEmbeddings._deferring
    monkeypatch.setattr(
        heads.OutputEmbeddings, "_deferring", lambda self, *args: kinds.append(type(made := real(self, *args))) or made
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)
    assert kinds == ([DeferredLogits] if loss_alone else [])


class _Scaled(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * 2


def test_a_head_of_another_kind_is_said_once(caplog):
    torch.manual_seed(0)
    model = llama().double()
    model.lm_head = _Scaled(16, VOCAB, bias=False).double()
    batch = batch_for(model)
    _, expected = run(copy.deepcopy(model), batch)
    attach_l2l(model, L2LConfig())
    for _ in range(2):
        model.zero_grad()
        found, grads = run(model, batch)
    assert type(found.logits) is torch.Tensor
    assert relative_error(grads, expected) < TOLERANCE[torch.float32]
    assert [record.getMessage() for record in caplog.records] == [
        "logits of a _Scaled are computed for all tokens at once, since it is no plain nn.Linear: "
        "22.5 KiB on the device"
    ]


def test_bad_option():
    with pytest.raises(ValueError, match=r"chunked_loss must be one of 'auto', 'off' \(got 'on'\); use 'off'"):
        L2LConfig(chunked_loss="on")
    with pytest.raises(ValueError, match=r"l2l_chunked_loss must be one of 'auto', 'off' \(got True\)"):
        L2LTrainingArguments("x", l2l_chunked_loss=True)
