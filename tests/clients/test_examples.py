"""Examples, and blocks of the README, that need other libraries run as they are, at tiny size."""

from __future__ import annotations

import json
import random

import pytest

for library in ("trl", "peft", "sentence_transformers"):
    pytest.importorskip(library, reason="`make test-clients` has it")

import peft
import torch
import transformers as hf
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from client_models import bert, saved, sentence, tokenizer
from clients import assert_same_bits, start_again
from documents import ROOT, blocks
from examples import run_example
from hf_l2l.testing import enable_simulated_accelerator
from tiers import on_a_device
from training import settled_memory

SMALL = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--ubatch_size", "3"]
QUIET = ["--disable_tqdm", "True", "--dataloader_pin_memory", "False", "--save_strategy", "no"]


def test_sft_trl(tmp_path, datasets_cache, monkeypatch):
    run_example(monkeypatch, tmp_path, "sft_trl.py", *SMALL, *QUIET)
    hf.AutoModelForCausalLM.from_pretrained(tmp_path / "output" / "sft")


@pytest.mark.parametrize("rows", ["of the demo", "of one's own"])
def test_lora(tmp_path, datasets_cache, monkeypatch, capsys, rows):
    given = ["--model", saved(bert(), tmp_path / "model"), "--eval_strategy", "steps"]
    if rows == "of one's own":
        (tmp_path / "rows.csv").write_text("sentence,label\n" + "w1 w2,1\nw3 w4,0\n" * 10)
        given += ["--data", str(tmp_path / "rows.csv")]
    run_example(monkeypatch, tmp_path, "lora.py", *given, *SMALL, *QUIET)
    assert "eval_accuracy" in capsys.readouterr().out
    peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "output" / "lora")


@pytest.fixture
def contrastive(tmp_path, datasets_cache, monkeypatch):
    """Trains the encoder of the example, and returns the weights that it saves."""
    draws = random.Random(3)
    rows = [f"{sentence(draws, 20, 30)},{sentence(draws, 20, 30)}" for _ in range(512)]
    (tmp_path / "pairs.csv").write_text("\n".join(["anchor,positive", *rows]))

    def trained(*words: str, dropout: float = 0.0) -> dict[str, torch.Tensor]:
        model = bert(hf.BertModel, dropout, num_hidden_layers=6)
        transformer = Transformer(saved(model, tmp_path / "bert"), max_seq_length=32)
        encoder = SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu")
        encoder.save_pretrained(str(tmp_path / "encoder"))
        start_again()
        given = ["--model", str(tmp_path / "encoder"), "--pairs", str(tmp_path / "pairs.csv"), "--output", "out"]
        run_example(monkeypatch, tmp_path, "sentence_transformers_mnrl.py", *given, *words)
        return load_file(tmp_path / "out" / "model.safetensors")

    return trained


def test_a_batch_of_64_is_trained_as_by_the_plain_trainer(contrastive):
    """A whole one to the bit; one in micro-batches to rounding, without dropout, which would draw other masks."""
    plain = contrastive("--plain", "--batch", "64", dropout=0.3)
    assert_same_bits(contrastive("--batch", "64", "--ubatch", "0", dropout=0.3), plain)
    plain, found = contrastive("--plain", "--batch", "64"), contrastive("--batch", "64", "--ubatch", "16")
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-5)


@on_a_device
def test_only_layer_to_layer_a_batch_of_512_fits(contrastive):
    def peak(*words: str) -> int:
        settled_memory()
        torch.accelerator.reset_peak_memory_stats()
        contrastive(*words)
        return int(torch.accelerator.max_memory_allocated())

    streamed, plain = peak("--batch", "512"), peak("--plain", "--batch", "64")
    assert streamed < plain  # with an eighth of the pairs
    settled_memory()
    enable_simulated_accelerator(2 * plain)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            contrastive("--plain", "--batch", "512")
    finally:
        enable_simulated_accelerator(None)


def test_a_decoder_with_trl(tmp_path, datasets_cache, monkeypatch):
    [code] = [block.code for block in blocks(ROOT / "README.md", "python") if "from trl import" in block.code]
    sizes = {"vocab_size": len(tokenizer()), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
    saved(model, tmp_path / "Qwen" / "Qwen2.5-7B")
    data = tmp_path / "trl-lib" / "Capybara"
    data.mkdir(parents=True)
    talk = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4 w5"}]
    (data / "train.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 20)
    monkeypatch.chdir(tmp_path)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    after = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "output").state_dict()
    assert any(not weight.equal(before[name]) for name, weight in after.items())
