"""State-space models, linear attention, and models that mix them with attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_l2l.verify.families.decoders import FP32_SCAN, LLAMA, ROUTED, SPECIAL, decoder
from hf_l2l.verify.family import VOCAB, text

_MAMBA: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "state_size": 4,
    "expand": 2,
    "conv_kernel": 3,
    "time_step_rank": 4,
    "vocab_size": VOCAB,
    **SPECIAL,
}
_MAMBA2: Mapping[str, Any] = {**_MAMBA, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
_MIXER: Mapping[str, Any] = {"mamba_d_state": 4, "mamba_d_conv": 3, "mamba_expand": 2}
_MIXER2: Mapping[str, Any] = {
    **_MIXER,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
_DELTA: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
}
_UNMASKED = text("token", masked=False)

HYBRIDS = (
    decoder("mamba", "Mamba", sizes=_MAMBA, fp32=FP32_SCAN),
    decoder("mamba2", "Mamba2", sizes=_MAMBA2, fp32=FP32_SCAN),
    decoder("falcon-mamba", "FalconMamba", sizes=_MAMBA, fp32=FP32_SCAN),
    decoder(
        "jamba",
        "Jamba",
        sizes={**ROUTED, **_MIXER},
        mamba_dt_rank=4,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        output_router_logits=True,
    ),
    decoder("bamba", "Bamba", sizes={**LLAMA, **_MIXER2}, attn_layer_indices=[1]),
    decoder(
        "zamba",
        "Zamba",
        sizes={**LLAMA, **_MIXER},
        num_key_value_heads=2,
        num_hidden_layers=4,
        mamba_dt_rank=4,
        n_mamba_heads=2,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        attention_hidden_size=32,
        attention_head_dim=16,
    ),
    decoder(
        "zamba2",
        "Zamba2",
        sizes={**LLAMA, **_MIXER},
        num_key_value_heads=2,
        num_hidden_layers=4,
        mamba_ngroups=1,
        n_mamba_heads=4,
        chunk_size=4,
        num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        adapter_rank=4,
    ),
    decoder(
        "recurrent-gemma",
        "RecurrentGemma",
        sizes={k: v for k, v in LLAMA.items() if k != "head_dim"},
        lru_width=16,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
    ),
    decoder(
        "rwkv",
        "Rwkv",
        sizes={
            "hidden_size": 16,
            "attention_hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "vocab_size": VOCAB,
            "context_length": 64,
            **SPECIAL,
        },
        batch=_UNMASKED,
    ),
    decoder(
        "qwen3-next",
        "Qwen3Next",
        sizes={**ROUTED, **_DELTA},
        shared_expert_intermediate_size=16,
        output_router_logits=True,
    ),
    decoder("qwen3.5", "Qwen3_5", config="Qwen3_5Text", sizes={**LLAMA, **_DELTA}),
    decoder(
        "nemotron-h",
        "NemotronH",
        sizes=LLAMA,
        layers_block_type=["mamba", "attention", "mlp"],
        num_hidden_layers=3,
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=1,
        ssm_state_size=4,
        conv_kernel=3,
        chunk_size=4,
    ),
    decoder("falcon-h1", "FalconH1", sizes={**LLAMA, **_MIXER2}, mamba_d_ssm=32),
    decoder(
        "granite-moe-hybrid",
        "GraniteMoeHybrid",
        sizes={**LLAMA, **_MIXER2},
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        layer_types=["mamba", "attention"],
    ),
    decoder(
        "lfm2", "Lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3, block_ff_dim=24, block_multiple_of=8
    ),
    decoder("olmo-hybrid", "OlmoHybrid", sizes={**LLAMA, **_DELTA}),
)
