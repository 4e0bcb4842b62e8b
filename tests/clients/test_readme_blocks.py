"""Blocks of the README that need other libraries run as they are, with a model and rows from a folder."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("trl", reason="`make test-clients` has it")

import transformers as hf

from client_models import saved, tokenizer
from documents import ROOT, blocks


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
