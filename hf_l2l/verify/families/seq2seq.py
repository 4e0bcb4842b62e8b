"""Encoder-decoders of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_l2l.verify.families.decoders import FP32_MASK, FP32_NORM, FP32_ROUTER
from hf_l2l.verify.families.text_encoders import BERT
from hf_l2l.verify.family import TOKENS, VOCAB, Family, MakeBatch, pair

SPECIAL: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 2}
BART: Mapping[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "forced_eos_token_id": None,
    **SPECIAL,
}
T5: Mapping[str, Any] = {
    "d_model": 16,
    "d_ff": 24,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": VOCAB,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_T5GEMMA: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "sliding_window": 4,
    **{k: v for k, v in SPECIAL.items() if k != "decoder_start_token_id"},
}


def _seq2seq(
    name: str,
    stem: str,
    *,
    sizes: Mapping[str, Any] = BART,
    batch: MakeBatch | None = None,
    fp32: str = "",
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Family:
    """A family whose classes are called `stem` and something."""
    head = more.pop("head", "ForConditionalGeneration")
    made = batch or pair()
    return Family(name, stem + head, stem + "Config", {**sizes, **more}, made, generates=True, fp32=fp32, dtype=dtype)


ENCODER_DECODERS = (
    _seq2seq("t5", "T5", sizes=T5, fp32=FP32_NORM),
    _seq2seq("t5-gated", "T5", sizes=T5, fp32=FP32_NORM, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    _seq2seq("mt5", "MT5", sizes=T5, fp32=FP32_NORM),
    _seq2seq("umt5", "UMT5", sizes=T5, fp32=FP32_NORM),
    _seq2seq("longt5", "LongT5", sizes=T5, fp32=FP32_NORM, local_radius=3, encoder_attention_type="local"),
    _seq2seq(
        "switch",
        "SwitchTransformers",
        sizes=T5,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        expert_capacity=64,
        output_router_logits=True,
        fp32=FP32_ROUTER,
    ),
    _seq2seq(
        "t5gemma", "T5Gemma", sizes={"encoder": _T5GEMMA, "decoder": _T5GEMMA, "vocab_size": VOCAB}, fp32=FP32_NORM
    ),
    _seq2seq("bart", "Bart"),
    _seq2seq("mbart", "MBart"),
    _seq2seq("pegasus", "Pegasus"),
    _seq2seq("pegasus-x", "PegasusX", num_global_tokens=2, block_size=4, batch=pair(length=8)),
    _seq2seq(
        "led",
        "LED",
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
        attention_window=4,
        batch=pair(length=8),
        fp32=FP32_MASK,
        dtype=torch.float32,
    ),
    _seq2seq("m2m100", "M2M100"),
    _seq2seq(
        "nllb-moe",
        "NllbMoe",
        num_experts=4,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        expert_capacity=64,
        output_router_logits=True,
        router_ignore_padding_tokens=False,
        fp32=FP32_ROUTER,
    ),
    _seq2seq("marian", "Marian", head="MTModel"),
    _seq2seq(
        "fsmt",
        "FSMT",
        langs=["en", "de"],
        src_vocab_size=VOCAB,
        tgt_vocab_size=VOCAB,
        batch=pair(answer=TOKENS),
        fp32=FP32_MASK,
        dtype=torch.float32,
    ),
    _seq2seq(
        "prophetnet",
        "ProphetNet",
        sizes={
            "hidden_size": 16,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 2,
            "num_decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "vocab_size": VOCAB,
            "max_position_embeddings": 64,
            "ngram": 2,
            **SPECIAL,
        },
        fp32=FP32_MASK,
        dtype=torch.float32,
    ),
    _seq2seq("blenderbot", "Blenderbot"),
    _seq2seq("blenderbot-small", "BlenderbotSmall"),
    _seq2seq("plbart", "PLBart"),
    _seq2seq("mvp", "Mvp"),
    _seq2seq("bigbird-pegasus", "BigBirdPegasus", attention_type="original_full"),
    _seq2seq(
        "bert2bert",
        "EncoderDecoder",
        head="Model",
        sizes={
            "encoder": {"model_type": "bert", **BERT},
            "decoder": {"model_type": "bert", **BERT, "is_decoder": True, "add_cross_attention": True},
            **SPECIAL,
        },
    ),
)
