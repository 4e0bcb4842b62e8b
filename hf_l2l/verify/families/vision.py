"""Models of images and video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_l2l.verify.families.seq2seq import BART
from hf_l2l.verify.family import (
    IMAGE,
    Batch,
    Family,
    Loss,
    MakeBatch,
    floats_of,
    images,
    own_loss,
    size_of_first,
)

VIT: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": IMAGE,
    "patch_size": 8,
}
_SWIN: Mapping[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 4,
}
_CONV: Mapping[str, Any] = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2}
_PYRAMID: Mapping[str, Any] = {
    "depths": [1, 1, 2, 1],
    "hidden_sizes": [8, 8, 16, 16],
    "num_attention_heads": [1, 1, 2, 2],
    "sr_ratios": [2, 2, 1, 1],
    "patch_sizes": [4, 2, 2, 2],
    "strides": [4, 2, 2, 2],
    "mlp_ratios": [2, 2, 2, 2],
}


def family(
    name: str,
    stem: str,
    head: str,
    sizes: Mapping[str, Any],
    batch: MakeBatch | None = None,
    loss: Loss = own_loss,
    fp32: str = "",
    generates: bool = False,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Family:
    """A family whose classes are called `stem` and something."""
    return Family(
        name,
        stem + head,
        stem + "Config",
        {**sizes, **more},
        batch or images(),
        loss=loss,
        fp32=fp32,
        generates=generates,
        dtype=dtype,
    )


def _classes_of_pixels(model: nn.Module, rows: int) -> Batch:
    return {"labels": torch.ones(rows, 32, 32).long()}


def _objects(model: nn.Module, rows: int) -> Batch:
    box = torch.tensor([[0.5, 0.5, 0.4, 0.4]]).to(floats_of(model, 1).dtype)
    return {"labels": [{"class_labels": torch.tensor([1]), "boxes": box} for _ in range(rows)]}


_IMAGE_CLASSIFIER = "ForImageClassification"
_FP32_LOSS = "its loss computes in fp32"
VISION = (
    family("vit", "ViT", _IMAGE_CLASSIFIER, VIT),
    family("deit", "DeiT", _IMAGE_CLASSIFIER, VIT),
    family("beit", "Beit", _IMAGE_CLASSIFIER, VIT, use_relative_position_bias=True),
    family("data2vec-vision", "Data2VecVision", _IMAGE_CLASSIFIER, VIT, use_relative_position_bias=True),
    family("swin", "Swin", _IMAGE_CLASSIFIER, _SWIN, images(size=32)),
    family("swinv2", "Swinv2", _IMAGE_CLASSIFIER, _SWIN, images(size=32)),
    family("dinov2", "Dinov2", _IMAGE_CLASSIFIER, VIT, mlp_ratio=2),
    family("dinov2-registers", "Dinov2WithRegisters", _IMAGE_CLASSIFIER, VIT, mlp_ratio=2, num_register_tokens=2),
    family("dinov3", "DINOv3ViT", "Model", VIT, images("none"), size_of_first, num_register_tokens=2),
    family("convnext", "ConvNext", _IMAGE_CLASSIFIER, _CONV, image_size=IMAGE, patch_size=4),
    family("convnextv2", "ConvNextV2", _IMAGE_CLASSIFIER, _CONV, image_size=IMAGE, patch_size=4),
    family("segformer", "Segformer", _IMAGE_CLASSIFIER, _PYRAMID, images(size=32), decoder_hidden_size=16),
    family(
        "segformer-segmentation",
        "Segformer",
        "ForSemanticSegmentation",
        _PYRAMID,
        images("none", size=32, more=_classes_of_pixels),
        decoder_hidden_size=16,
    ),
    family(
        "pvt",
        "Pvt",
        _IMAGE_CLASSIFIER,
        {k: v for k, v in _PYRAMID.items() if k != "sr_ratios"},
        images(size=32),
        image_size=32,
        sequence_reduction_ratios=[2, 2, 1, 1],
    ),
    family("pvt-v2", "PvtV2", _IMAGE_CLASSIFIER, _PYRAMID, images(size=32), image_size=32),
    family("resnet", "ResNet", _IMAGE_CLASSIFIER, {"hidden_sizes": [8, 16], "depths": [2, 2], "embedding_size": 8}),
    family("vit-mae", "ViTMAE", "Model", VIT, images("none"), size_of_first, mask_ratio=0.0),
    family("vit-msn", "ViTMSN", _IMAGE_CLASSIFIER, VIT),
    family("ijepa", "IJepa", _IMAGE_CLASSIFIER, VIT),
    family(
        "hiera",
        "Hiera",
        _IMAGE_CLASSIFIER,
        {
            "embed_dim": 8,
            "image_size": [32, 32],
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 2, 2, 4],
            "masked_unit_size": [8, 8],
            "embed_dim_multiplier": 2.0,
        },
        images(size=32),
    ),
    family(
        "poolformer",
        "PoolFormer",
        _IMAGE_CLASSIFIER,
        {k: v for k, v in _PYRAMID.items() if k != "sr_ratios"},
        images(size=32),
        padding=[2, 1, 1, 1],
    ),
    family(
        "yolos",
        "Yolos",
        "ForObjectDetection",
        {**VIT, "image_size": [IMAGE, IMAGE]},
        images("none", more=_objects),
        num_detection_tokens=4,
        fp32=_FP32_LOSS,
        dtype=torch.float32,
    ),
    family(
        "detr",
        "Detr",
        "ForObjectDetection",
        {k: v for k, v in BART.items() if k != "decoder_start_token_id"},
        images("none", size=32, more=_objects),
        num_queries=4,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config={
            "model_type": "resnet",
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "embedding_size": 8,
            "out_features": ["stage2"],
        },
        fp32=_FP32_LOSS,
        dtype=torch.float32,
    ),
    family(
        "videomae",
        "VideoMAE",
        "ForVideoClassification",
        VIT,
        lambda model, rows: {
            "pixel_values": floats_of(model, rows, 4, 3, IMAGE, IMAGE),
            "labels": torch.arange(rows) % 2,
        },
        num_frames=4,
        tubelet_size=2,
    ),
    family(
        "timesformer",
        "Timesformer",
        "ForVideoClassification",
        VIT,
        lambda model, rows: {
            "pixel_values": floats_of(model, rows, 2, 3, IMAGE, IMAGE),
            "labels": torch.arange(rows) % 2,
        },
        num_frames=2,
    ),
)
