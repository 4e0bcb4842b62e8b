"""Models of sound and of time series."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_l2l.verify.families.seq2seq import BART
from hf_l2l.verify.families.vision import VIT, family
from hf_l2l.verify.family import (
    TOKENS,
    VOCAB,
    Batch,
    MakeBatch,
    floats_of,
    ids_of,
    mask_of,
    sounds,
)


def _features(channels: int, length: int, labels: str) -> MakeBatch:
    """Batches of spectrograms [rows, channels, length] with a sentence as labels."""

    def make(model: nn.Module, rows: int) -> Batch:
        return {"input_features": floats_of(model, rows, channels, length), "labels": ids_of(rows, TOKENS, seed=5)}

    return make


def _spectrum(model: nn.Module, rows: int) -> Batch:
    return {"input_values": floats_of(model, rows, 24, 16), "labels": torch.arange(rows) % 2}


def _frames(model: nn.Module, rows: int) -> Batch:
    return {
        "input_features": floats_of(model, rows, 24, 8),
        "attention_mask": mask_of(rows, 24),
        "labels": torch.arange(rows) % 2,
    }


_WAVE: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": [8, 8],
    "conv_stride": [5, 4],
    "conv_kernel": [5, 4],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "classifier_proj_size": 8,
    "vocab_size": VOCAB,
}
_HEARD = sounds(length=400)
_WHISPER: Mapping[str, Any] = {
    **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
    "max_source_positions": 12,
    "max_target_positions": 32,
    "num_mel_bins": 8,
    "decoder_start_token_id": 3,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
AUDIO = (
    family("whisper", "Whisper", "ForConditionalGeneration", _WHISPER, _features(8, 24, "token"), generates=True),
    family("wav2vec2", "Wav2Vec2", "ForSequenceClassification", _WAVE, _HEARD),
    family(
        "wav2vec2-stable",
        "Wav2Vec2",
        "ForSequenceClassification",
        _WAVE,
        _HEARD,
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
    ),
    family("hubert", "Hubert", "ForSequenceClassification", _WAVE, _HEARD),
    family("wavlm", "WavLM", "ForSequenceClassification", _WAVE, _HEARD),
    family("unispeech", "UniSpeech", "ForSequenceClassification", _WAVE, _HEARD, num_ctc_classes=VOCAB),
    family("unispeech-sat", "UniSpeechSat", "ForSequenceClassification", _WAVE, _HEARD),
    family("data2vec-audio", "Data2VecAudio", "ForSequenceClassification", _WAVE, _HEARD),
    family("sew", "SEW", "ForSequenceClassification", _WAVE, _HEARD, squeeze_factor=2),
    family(
        "wav2vec2-conformer",
        "Wav2Vec2Conformer",
        "ForSequenceClassification",
        _WAVE,
        _HEARD,
        conv_depthwise_kernel_size=3,
    ),
    family(
        "wav2vec2-bert",
        "Wav2Vec2Bert",
        "ForSequenceClassification",
        {k: v for k, v in _WAVE.items() if not k.startswith("conv")},
        _frames,
        conv_depthwise_kernel_size=3,
        feature_projection_input_dim=8,
        left_max_position_embeddings=4,
        right_max_position_embeddings=2,
    ),
    family(
        "ast",
        "AST",
        "ForAudioClassification",
        {k: v for k, v in VIT.items() if k != "image_size"},
        _spectrum,
        max_length=24,
        num_mel_bins=16,
        frequency_stride=8,
        time_stride=8,
    ),
    family(
        "speech-to-text",
        "Speech2Text",
        "ForConditionalGeneration",
        {
            **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
            "num_conv_layers": 1,
            "conv_kernel_sizes": [3],
            "conv_channels": 16,
            "input_feat_per_channel": 8,
            "max_source_positions": 32,
            "max_target_positions": 32,
        },
        lambda model, rows: {"input_features": floats_of(model, rows, 24, 8), "labels": ids_of(rows, TOKENS, seed=5)},
        generates=True,
    ),
    family(
        "moonshine",
        "Moonshine",
        "ForConditionalGeneration",
        {
            "hidden_size": 16,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 2,
            "decoder_num_attention_heads": 2,
            "intermediate_size": 24,
            "vocab_size": VOCAB,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
        },
        lambda model, rows: {"input_values": floats_of(model, rows, 2000), "labels": ids_of(rows, TOKENS, seed=5)},
        generates=True,
    ),
)


def _series(model: nn.Module, rows: int) -> Batch:
    past, future = 16, 4
    return {
        "past_values": floats_of(model, rows, past).abs(),
        "past_time_features": floats_of(model, rows, past, 1, seed=4),
        "past_observed_mask": torch.ones(rows, past).to(floats_of(model, 1).dtype),
        "future_values": floats_of(model, rows, future, seed=5).abs(),
        "future_time_features": floats_of(model, rows, future, 1, seed=6),
    }


def _channels(model: nn.Module, rows: int) -> Batch:
    return {"past_values": floats_of(model, rows, 16, 2), "future_values": floats_of(model, rows, 4, 2, seed=4)}


_FORECAST: Mapping[str, Any] = {
    **{k: v for k, v in BART.items() if k.startswith(("d_model", "encoder_", "decoder_"))},
    "prediction_length": 4,
    "context_length": 9,
    "lags_sequence": [1, 2, 7],
    "num_time_features": 1,
}
_PATCHES: Mapping[str, Any] = {
    "num_input_channels": 2,
    "context_length": 16,
    "prediction_length": 4,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 16,
    "ffn_dim": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
SERIES = (
    family("time-series-transformer", "TimeSeriesTransformer", "ForPrediction", _FORECAST, _series),
    family("informer", "Informer", "ForPrediction", _FORECAST, _series),
    family(
        "autoformer",
        "Autoformer",
        "ForPrediction",
        _FORECAST,
        _series,
        label_length=2,
        autocorrelation_factor=1,
        moving_average=3,
        fp32="its attention computes in fp32",
        dtype=torch.float32,
    ),
    family("patchtst", "PatchTST", "ForPrediction", _PATCHES, _channels),
    family("patchtsmixer", "PatchTSMixer", "ForPrediction", _PATCHES, _channels, num_layers=2),
)
