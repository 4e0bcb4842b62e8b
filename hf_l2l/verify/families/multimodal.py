"""Models of text together with images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_l2l.verify.families.decoders import FP32_NORM, LLAMA
from hf_l2l.verify.families.text_encoders import BERT
from hf_l2l.verify.families.vision import VIT, family
from hf_l2l.verify.family import (
    IMAGE,
    TOKENS,
    VOCAB,
    Batch,
    MakeBatch,
    floats_of,
    ids_of,
    mask_of,
    text,
)

_CLIP_TEXT: Mapping[str, Any] = {**BERT, "projection_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
_CLIP: Mapping[str, Any] = {
    "text_config": _CLIP_TEXT,
    "vision_config": {**VIT, "projection_dim": 16},
    "projection_dim": 16,
}


def _captions(model: nn.Module, rows: int) -> Batch:
    return {"pixel_values": floats_of(model, rows, 3, IMAGE, IMAGE), "return_loss": True}


def _with_image(token: int, count: int, *, labels: bool = True, extra: int = 0) -> MakeBatch:
    """Batches of an image and a text per row, which begins with `count` tokens that stand for the image."""

    def make(model: nn.Module, rows: int) -> Batch:
        ids = torch.cat([torch.full((rows, count), token), ids_of(rows, TOKENS, vocab=50)], 1)
        mask = torch.cat([torch.ones(rows, count).long(), mask_of(rows, TOKENS)], 1)
        shape = (rows, *[1] * extra, 3, IMAGE, IMAGE)
        batch: Batch = {"input_ids": ids, "attention_mask": mask, "pixel_values": floats_of(model, *shape)}
        return batch | {"labels": ids.masked_fill((mask == 0) | (ids == token), -100)} if labels else batch

    return make


def _qwen(patch_values: int) -> MakeBatch:
    """Batches of an image of 4 x 4 patches per row, flattened over rows, in a text of which 4 tokens stand for it."""

    def make(model: nn.Module, rows: int) -> Batch:
        start, end = torch.full((rows, 1), 51), torch.full((rows, 1), 52)
        ids = torch.cat([start, torch.full((rows, 4), 53), end, ids_of(rows, TOKENS, vocab=50)], 1)
        mask = torch.cat([torch.ones(rows, 6).long(), mask_of(rows, TOKENS)], 1)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "pixel_values": floats_of(model, rows * 16, patch_values),
            "image_grid_thw": torch.tensor([[1, 4, 4]]).expand(rows, 3).contiguous(),
            "mm_token_type_ids": (ids == 53).int(),
            "labels": ids.masked_fill((mask == 0) | (ids > 50), -100),
        }

    return make


_QWEN_TOKENS: Mapping[str, Any] = {
    "vision_start_token_id": 51,
    "vision_end_token_id": 52,
    "image_token_id": 53,
    "video_token_id": 54,
}
_MROPE: Mapping[str, Any] = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
_QWEN_TEXT: Mapping[str, Any] = {**LLAMA, "rope_parameters": _MROPE}
_QWEN_EYE: Mapping[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 1,
    "spatial_merge_size": 2,
}
_SIGLIP_EYE: Mapping[str, Any] = {"model_type": "siglip_vision_model", **VIT}
_LLAMA_TEXT: Mapping[str, Any] = {"model_type": "llama", **LLAMA}
_BLIP2: Mapping[str, Any] = {
    "vision_config": VIT,
    "qformer_config": {**BERT, "encoder_hidden_size": 16, "cross_attention_frequency": 1},
    "text_config": {
        "model_type": "opt",
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 24,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "pad_token_id": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "num_query_tokens": 2,
    "image_token_index": 55,
}
MULTIMODAL = (
    family("clip", "CLIP", "Model", _CLIP, text("none", more=_captions)),
    family("siglip", "Siglip", "Model", _CLIP, text("none", more=_captions)),
    family("chinese-clip", "ChineseCLIP", "Model", _CLIP, text("none", more=_captions)),
    family(
        "blip",
        "Blip",
        "Model",
        {**_CLIP, "text_config": {**_CLIP_TEXT, "encoder_hidden_size": 16}},
        text("none", more=_captions),
    ),
    family(
        "vilt",
        "Vilt",
        "ForImagesAndTextClassification",
        {**BERT, "image_size": IMAGE, "patch_size": 8, "num_images": 1},
        text("class", more=lambda model, rows: {"pixel_values": floats_of(model, rows, 1, 3, IMAGE, IMAGE)}),
    ),
    family(
        "git",
        "Git",
        "ForCausalLM",
        {**BERT, "vision_config": VIT, "bos_token_id": 1, "eos_token_id": 2},
        text("token", more=lambda model, rows: {"pixel_values": floats_of(model, rows, 3, IMAGE, IMAGE)}),
        generates=True,
    ),
    family(
        "llava",
        "Llava",
        "ForConditionalGeneration",
        {
            "vision_config": {"model_type": "clip_vision_model", **VIT},
            "text_config": _LLAMA_TEXT,
            "image_token_index": 55,
            "vision_feature_layer": -1,
        },
        _with_image(55, 4),
        generates=True,
        fp32=FP32_NORM,
    ),
    family(
        "paligemma",
        "PaliGemma",
        "ForConditionalGeneration",
        {
            "vision_config": _SIGLIP_EYE,
            "text_config": {"model_type": "gemma", **LLAMA},
            "projection_dim": 16,
            "image_token_index": 55,
            "hidden_size": 16,
        },
        lambda model, rows: (
            (b := _with_image(55, 4)(model, rows)) | {"token_type_ids": torch.zeros_like(b["input_ids"])}
        ),
        generates=True,
        fp32=FP32_NORM,
    ),
    family(
        "idefics3",
        "Idefics3",
        "ForConditionalGeneration",
        {
            "vision_config": {**VIT, "patch_size": 4},
            "text_config": _LLAMA_TEXT,
            "image_token_id": 55,
            "scale_factor": 2,
        },
        _with_image(55, 4, extra=1),
        generates=True,
        fp32=FP32_NORM,
    ),
    family("blip-2", "Blip2", "ForConditionalGeneration", _BLIP2, _with_image(55, 2), generates=True),
    family(
        "internvl",
        "InternVL",
        "ForConditionalGeneration",
        {
            "vision_config": {**VIT, "image_size": [IMAGE, IMAGE], "patch_size": [4, 4]},
            "text_config": {"model_type": "qwen2", **LLAMA},
            "image_token_id": 55,
            "downsample_ratio": 0.5,
            "image_seq_length": 4,
        },
        _with_image(55, 4),
        generates=True,
        fp32=FP32_NORM,
    ),
    family(
        "qwen2-vl",
        "Qwen2VL",
        "ForConditionalGeneration",
        {
            "text_config": _QWEN_TEXT,
            "vision_config": {**_QWEN_EYE, "embed_dim": 16, "hidden_size": 16, "mlp_ratio": 2},
            **_QWEN_TOKENS,
        },
        _qwen(48),
        generates=True,
        fp32=FP32_NORM,
    ),
    family(
        "qwen2.5-vl",
        "Qwen2_5_VL",
        "ForConditionalGeneration",
        {
            "text_config": _QWEN_TEXT,
            "vision_config": {
                **_QWEN_EYE,
                "hidden_size": 16,
                "out_hidden_size": 16,
                "intermediate_size": 24,
                "window_size": 8,
                "fullatt_block_indexes": [1],
            },
            **_QWEN_TOKENS,
        },
        _qwen(48),
        generates=True,
        fp32=FP32_NORM,
    ),
    family(
        "qwen3-vl",
        "Qwen3VL",
        "ForConditionalGeneration",
        {
            "text_config": _QWEN_TEXT,
            "vision_config": {
                **_QWEN_EYE,
                "hidden_size": 16,
                "out_hidden_size": 16,
                "intermediate_size": 24,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            **_QWEN_TOKENS,
        },
        _qwen(48),
        generates=True,
        fp32=FP32_NORM,
    ),
)
