"""Tiny models and tokenizers with random weights for the tests of other libraries, made without the Hub."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

WORDS = [f"w{i}" for i in range(40)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "user", "assistant", ":"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """A tokenizer whose tokens are `WORDS`, with a chat template."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad", "unk", "cls", "sep", "mask", "bos", "eos"), SPECIAL, strict=False))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=fast,
        **{f"{name}_token": token for name, token in names.items()},
        model_max_length=64,
        chat_template=CHAT_TEMPLATE,
        model_input_names=["input_ids", "attention_mask"],
    )


def sentence(draws: random.Random, least: int = 3, most: int = 7) -> str:
    return " ".join(draws.choices(WORDS, k=draws.randint(least, most)))


def llama(kind: type[nn.Module] = hf.LlamaForCausalLM, **more: Any) -> nn.Module:
    """A Llama whose weights are the same at every call."""
    words = tokenizer()
    ids = {f"{name}_token_id": getattr(words, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = {**SIZES, **ids, "vocab_size": len(words), "num_key_value_heads": 1, **more}
    return _seeded(kind, hf.LlamaConfig(**config, max_position_embeddings=64))


def bert(kind: type[nn.Module] = hf.BertForSequenceClassification, dropout: float = 0.0, **more: Any) -> nn.Module:
    """A BERT whose weights are the same at every call."""
    words = tokenizer()
    config = {**SIZES, "pad_token_id": words.pad_token_id, "vocab_size": len(words), **more}
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return _seeded(kind, hf.BertConfig(**config, **drops, max_position_embeddings=64))


def _seeded(kind: type[nn.Module], config: hf.PretrainedConfig) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return kind(config)


def saved(model: nn.Module, folder: Path) -> str:
    """The folder where `model` and its tokenizer have been saved."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
