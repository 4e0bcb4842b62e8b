"""Encoders of text: BERT and what came after it, with a classifier or as plain encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_l2l.verify.family import (
    TOKENS,
    VOCAB,
    Batch,
    Family,
    Loss,
    MakeBatch,
    classes_of,
    floats_of,
    own_loss,
    size_of_first,
    text,
)

BERT: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def _encoder(
    name: str,
    stem: str,
    *,
    head: str = "ForSequenceClassification",
    sizes: Mapping[str, Any] = BERT,
    batch: MakeBatch | None = None,
    loss: Loss = own_loss,
    fp32: str = "",
    dtype: torch.dtype = torch.float64,
    own_backward: bool = False,
    **more: Any,
) -> Family:
    """A family whose classes are called `stem` and something."""
    return Family(
        name,
        stem + head,
        stem + "Config",
        {**sizes, **more},
        batch or text("class"),
        loss=loss,
        fp32=fp32,
        dtype=dtype,
        own_backward=own_backward,
    )


def _boxes(model: nn.Module, rows: int) -> Batch:
    corners = torch.arange(TOKENS)[None, :, None] + torch.tensor([0, 0, 3, 3])
    return {"bbox": corners.expand(rows, TOKENS, 4).contiguous()}


def _seen(model: nn.Module, rows: int) -> Batch:
    return {"visual_feats": floats_of(model, rows, 3, 8), "visual_pos": floats_of(model, rows, 3, 4)}


def _looked_at(model: nn.Module, rows: int) -> Batch:
    return {"visual_embeds": floats_of(model, rows, 3, 8), "visual_attention_mask": torch.ones(rows, 3).long()}


def _entities(model: nn.Module, rows: int) -> Batch:
    place = torch.full((rows, 1, 30), -1)
    place[:, :, 0] = 1
    return {"entity_ids": torch.ones(rows, 1).long(), "entity_position_ids": place, "labels": classes_of(rows)}


_XLM: Mapping[str, Any] = {
    "emb_dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "n_langs": 2,
}
_ROBERTA: Mapping[str, Any] = {"pad_token_id": 1}
_CALLED_ONCE = text("class", length=16)

TEXT_ENCODERS = (
    _encoder("bert", "Bert"),
    _encoder("bert-masked-lm", "Bert", head="ForMaskedLM", batch=text("token")),
    _encoder("bert-embeddings", "Bert", head="Model", batch=text("none"), loss=size_of_first),
    _encoder("mpnet-embeddings", "MPNet", head="Model", batch=text("none"), loss=size_of_first, pad_token_id=1),
    _encoder("roberta", "Roberta", **_ROBERTA),
    _encoder("roberta-prelayernorm", "RobertaPreLayerNorm", **_ROBERTA),
    _encoder("xlm-roberta", "XLMRoberta", **_ROBERTA),
    _encoder("xlm-roberta-xl", "XLMRobertaXL", **_ROBERTA),
    _encoder("xmod", "Xmod", **_ROBERTA, languages=["en_XX"], default_language="en_XX"),
    _encoder("camembert", "Camembert", **_ROBERTA),
    _encoder("data2vec-text", "Data2VecText", **_ROBERTA),
    _encoder("electra", "Electra", embedding_size=8),
    _encoder("albert", "Albert", embedding_size=8),
    _encoder(
        "distilbert",
        "DistilBert",
        sizes={"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": VOCAB},
    ),
    _encoder("deberta", "Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8),
    _encoder(
        "deberta-v2",
        "DebertaV2",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
        max_relative_positions=4,
        share_att_key=True,
        conv_kernel_size=3,
        conv_act="gelu",
    ),
    _encoder("mpnet", "MPNet", pad_token_id=1),
    _encoder("xlnet", "XLNet", sizes={"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": VOCAB}),
    _encoder("xlm", "XLM", sizes=_XLM),
    _encoder("flaubert", "Flaubert", sizes=_XLM),
    _encoder("squeezebert", "SqueezeBert", embedding_size=16, q_groups=2, k_groups=2, v_groups=2),
    _encoder("ibert", "IBert", quant_mode=False, **_ROBERTA),
    _encoder(
        "funnel",
        "Funnel",
        sizes={"block_sizes": [2, 2], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "vocab_size": VOCAB},
        batch=text("class", length=8),
    ),
    _encoder(
        "lxmert",
        "Lxmert",
        head="ForQuestionAnswering",
        sizes={**BERT, "l_layers": 2, "x_layers": 2, "r_layers": 2, "visual_feat_dim": 8, "num_qa_labels": 2},
        batch=text("class", more=_seen),
    ),
    _encoder(
        "perceiver",
        "Perceiver",
        sizes={
            "num_latents": 4,
            "d_latents": 16,
            "d_model": 16,
            "num_blocks": 2,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "vocab_size": VOCAB,
            "max_position_embeddings": 64,
        },
        batch=lambda model, rows: _renamed(text("class")(model, rows), "input_ids", "inputs"),
    ),
    _encoder(
        "reformer",
        "Reformer",
        sizes={
            "attn_layers": ["local", "local"],
            "hidden_size": 16,
            "num_attention_heads": 2,
            "attention_head_size": 8,
            "feed_forward_size": 24,
            "vocab_size": VOCAB,
            "max_position_embeddings": 16,
            "axial_pos_shape": [4, 4],
            "axial_pos_embds_dim": [8, 8],
            "local_attn_chunk_length": 4,
            "is_decoder": False,
        },
        batch=_CALLED_ONCE,
        own_backward=True,
    ),
    _encoder("modernbert", "ModernBert", global_attn_every_n_layers=2, local_attention=4),
    _encoder("longformer", "Longformer", attention_window=4, batch=text("class", length=8), **_ROBERTA),
    _encoder("bigbird", "BigBird", attention_type="original_full"),
    _encoder(
        "bigbird-sparse",
        "BigBird",
        attention_type="block_sparse",
        block_size=2,
        num_random_blocks=1,
        batch=text("class", length=32),
    ),
    _encoder(
        "nystromformer", "Nystromformer", num_landmarks=8, segment_means_seq_len=8, batch=text("class", length=8)
    ),
    _encoder("convbert", "ConvBert", embedding_size=16, head_ratio=1, conv_kernel_size=3),
    _encoder(
        "mobilebert",
        "MobileBert",
        sizes={**BERT, "embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8},
    ),
    _encoder("roformer", "RoFormer", embedding_size=16),
    _encoder("ernie", "Ernie"),
    _encoder("esm", "Esm", mask_token_id=4, position_embedding_type="rotary", **_ROBERTA),
    _encoder("layoutlm", "LayoutLM", max_2d_position_embeddings=64, batch=text("class", more=_boxes)),
    _encoder(
        "lilt",
        "Lilt",
        max_2d_position_embeddings=64,
        batch=text("class", more=_boxes),
        channel_shrink_ratio=2,
        hidden_size=24,
    ),
    _encoder("megatron-bert", "MegatronBert"),
    _encoder("rembert", "RemBert", input_embedding_size=8, output_embedding_size=8),
    _encoder(
        "canine",
        "Canine",
        num_hash_buckets=32,
        local_transformer_stride=4,
        batch=text("class", length=16),
        fp32="its masks overflow in float64",
        dtype=torch.float32,
    ),
    _encoder("fnet", "FNet", batch=text("class", masked=False)),
    _encoder("yoso", "Yoso", use_expectation=True),
    _encoder("splinter", "Splinter", head="Model", batch=text("none"), loss=size_of_first),
    _encoder(
        "luke",
        "Luke",
        entity_vocab_size=4,
        entity_emb_size=8,
        head="ForEntityClassification",
        batch=text("none", more=_entities),
    ),
    _encoder("nomic-bert", "NomicBert"),
    _encoder("eurobert", "EuroBert", num_key_value_heads=1),
    _encoder("jina-embeddings-v3", "JinaEmbeddingsV3"),
    _encoder("gte", "Gte"),
    _encoder(
        "visual-bert",
        "VisualBert",
        head="Model",
        visual_embedding_dim=8,
        loss=size_of_first,
        batch=text("none", more=_looked_at),
    ),
    _encoder("bert-generation", "BertGeneration", head="Encoder", batch=text("none"), loss=size_of_first),
    _encoder("markuplm", "MarkupLM", max_depth=4, xpath_unit_hidden_size=4, **_ROBERTA),
)


def _renamed(batch: Batch, old: str, new: str) -> Batch:
    return {new if key == old else key: value for key, value in batch.items()}
