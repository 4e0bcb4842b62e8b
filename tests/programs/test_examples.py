"""Examples run as they are, at tiny size; those with other libraries in `tests/clients`."""

from __future__ import annotations

import re

import transformers as hf

from examples import run_example


def test_raw_loop(tiny_model, tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.csv"
    rows.write_text("sentence,label\n" + "a good movie,1\na bad movie,0\n" * 8)
    words = ["--model", tiny_model, "--data", str(rows), "--batch", "8", "--ubatch", "3", "--epochs", "2"]
    run_example(monkeypatch, tmp_path, "raw_loop.py", *words)
    assert len(re.findall(r"epoch \d step \d loss 0\.\d+", capsys.readouterr().out)) == 4
    hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "output" / "raw_loop")


def test_seq2seq(tmp_path, monkeypatch, capsys):
    words = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--ubatch_size", "3", "--disable_tqdm", "True"]
    more = ["--dataloader_pin_memory", "False", "--per_device_eval_batch_size", "60", "--generation_max_length", "3"]
    run_example(monkeypatch, tmp_path, "seq2seq.py", *words, *more)
    assert "test_loss" in capsys.readouterr().out
