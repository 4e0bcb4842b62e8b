"""Decoders that continue text, dense ones and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_l2l.verify.family import VOCAB, Family, MakeBatch, text

SPECIAL: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    **SPECIAL,
}
GPT: Mapping[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": VOCAB, **SPECIAL}
EXPERTS: Mapping[str, Any] = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED: Mapping[str, Any] = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

_FALCON: Mapping[str, Any] = {key: value for key, value in LLAMA.items() if key != "head_dim"}

FP32_NORM = "its norm computes in fp32"
FP32_ROUTER = "its router computes in fp32"
FP32_SCAN = "its scan computes in fp32"
FP32_MASK = "its masks overflow in float64"


def decoder(
    name: str,
    stem: str,
    *,
    head: str = "ForCausalLM",
    config: str = "",
    sizes: Mapping[str, Any] = LLAMA,
    batch: MakeBatch | None = None,
    generates: bool = True,
    fp32: str | None = None,
    random: str = "",
    refused: str = "",
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Family:
    """A family whose classes are called `stem` and something, and that continues text. Those with the sizes of Llama
    have its norm, unless `fp32` says otherwise."""
    llama_norm = FP32_NORM if "intermediate_size" in sizes else ""
    return Family(
        name,
        stem + head,
        (config or stem) + "Config",
        {**sizes, **more},
        batch or text("token"),
        generates=generates,
        fp32=llama_norm if fp32 is None else fp32,
        random=random,
        refused=refused,
        dtype=dtype,
    )


DECODERS = (
    decoder("openai-gpt", "OpenAIGPT", head="LMHeadModel", sizes=GPT),
    decoder("ctrl", "CTRL", head="LMHeadModel", sizes=GPT, dff=24),
    decoder("gpt2", "GPT2", head="LMHeadModel", sizes=GPT),
    decoder(
        "gpt2-classifier", "GPT2", head="ForSequenceClassification", sizes=GPT, batch=text("class"), generates=False
    ),
    decoder(
        "gpt-neo",
        "GPTNeo",
        sizes={
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "intermediate_size": 32,
            "vocab_size": VOCAB,
            "max_position_embeddings": 64,
            **SPECIAL,
        },
    ),
    decoder("gpt-neox", "GPTNeoX", rotary_pct=0.5),
    decoder("gpt-neox-japanese", "GPTNeoXJapanese", rotary_pct=1.0),
    decoder("gpt-j", "GPTJ", sizes=GPT, rotary_dim=4),
    decoder("gpt-bigcode", "GPTBigCode", sizes=GPT),
    decoder("codegen", "CodeGen", sizes=GPT, n_head=4, rotary_dim=4),
    decoder(
        "opt",
        "OPT",
        sizes={
            "hidden_size": 16,
            "word_embed_proj_dim": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 24,
            "vocab_size": VOCAB,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 1,
        },
    ),
    decoder("bloom", "Bloom", sizes={"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB, **SPECIAL}),
    decoder("mpt", "Mpt", sizes={"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": VOCAB, "max_seq_len": 64}),
    decoder("falcon", "Falcon", sizes=_FALCON),
    decoder("falcon-alibi", "Falcon", sizes=_FALCON, alibi=True, multi_query=False, new_decoder_architecture=False),
    decoder("phi", "Phi"),
    decoder("phi-3", "Phi3"),
    decoder("llama", "Llama"),
    decoder("llama-classifier", "Llama", head="ForSequenceClassification", batch=text("class"), generates=False),
    decoder("mistral", "Mistral", sliding_window=4),
    decoder("ministral", "Ministral", sliding_window=4),
    decoder("qwen2", "Qwen2"),
    decoder("qwen3", "Qwen3"),
    decoder("gemma", "Gemma"),
    decoder("gemma2", "Gemma2", sliding_window=4),
    decoder("gemma3", "Gemma3", config="Gemma3Text", sliding_window=4, num_hidden_layers=3),
    decoder(
        "gemma3n",
        "Gemma3n",
        config="Gemma3nText",
        num_hidden_layers=4,
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=4,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        intermediate_size=[24] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        sliding_window=4,
    ),
    decoder(
        "gemma4-shared-kv",
        "Gemma4",
        config="Gemma4Text",
        refused="must not write tensors into its arguments.*wrote to 'shared_kv_states'",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=8,
        sliding_window=4,
    ),
    decoder(
        "gemma4",
        "Gemma4",
        config="Gemma4Text",
        num_hidden_layers=4,
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=8,
        sliding_window=4,
    ),
    decoder("vaultgemma", "VaultGemma", sliding_window=4),
    decoder("cohere", "Cohere"),
    decoder("cohere2", "Cohere2", sliding_window=4),
    decoder("granite", "Granite"),
    decoder("olmo", "Olmo"),
    decoder("olmo2", "Olmo2"),
    decoder("olmo3", "Olmo3", sliding_window=4),
    decoder("smollm3", "SmolLM3"),
    decoder("starcoder2", "Starcoder2"),
    decoder("stablelm", "StableLm"),
    decoder("glm", "Glm"),
    decoder("glm4", "Glm4"),
    decoder("biogpt", "BioGpt"),
    decoder(
        "xglm",
        "XGLM",
        sizes={"d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 24, "vocab_size": VOCAB, **SPECIAL},
        fp32=FP32_MASK,
        dtype=torch.float32,
    ),
    decoder("persimmon", "Persimmon", num_key_value_heads=2),
    decoder("nemotron", "Nemotron"),
    decoder("exaone4", "Exaone4", sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    decoder("helium", "Helium"),
    decoder("arcee", "Arcee"),
    decoder("seed-oss", "SeedOss"),
    decoder("ernie4.5", "Ernie4_5"),
    decoder("diffllama", "DiffLlama", num_attention_heads=4, num_key_value_heads=2, head_dim=4),
    decoder("apertus", "Apertus"),
    decoder("bitnet", "BitNet"),
    decoder("hunyuan-dense", "HunYuanDenseV1"),
    decoder("nanochat", "NanoChat"),
    decoder("modernbert-decoder", "ModernBertDecoder", global_attn_every_n_layers=2, local_attention=4),
)

_SHARED: Mapping[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_LATENT: Mapping[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key != "head_dim"},
    **_SHARED,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 2,
}
MIXTURES = (
    decoder("mixtral", "Mixtral", sizes=EXPERTS, output_router_logits=True),
    decoder("qwen2-moe", "Qwen2Moe", sizes=ROUTED, shared_expert_intermediate_size=16, output_router_logits=True),
    decoder(
        "qwen3-moe", "Qwen3Moe", sizes=ROUTED, num_hidden_layers=3, mlp_only_layers=[0], output_router_logits=True
    ),
    decoder("gpt-oss", "GptOss", sizes=EXPERTS, sliding_window=4, output_router_logits=True),
    decoder("deepseek-v2", "DeepseekV2", sizes=_LATENT, n_group=1, topk_group=1),
    decoder("deepseek-v3", "DeepseekV3", sizes=_LATENT, n_group=2, topk_group=1),
    decoder("olmoe", "Olmoe", sizes=ROUTED, output_router_logits=True),
    decoder("granite-moe", "GraniteMoe", sizes=EXPERTS, output_router_logits=True),
    decoder("phimoe", "Phimoe", sizes=EXPERTS, output_router_logits=True, random="its router"),
    decoder("minimax", "MiniMax", sizes=EXPERTS, layer_types=["linear_attention", "full_attention"], block_size=4),
    decoder("glm4-moe", "Glm4Moe", sizes={**LLAMA, **_SHARED}, n_group=1, topk_group=1),
    decoder(
        "ernie4.5-moe",
        "Ernie4_5_Moe",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=16,
        moe_layer_start_index=1,
        moe_num_shared_experts=1,
    ),
    decoder("dots1", "Dots1", sizes={**LLAMA, **_SHARED}, n_group=1, topk_group=1),
    decoder("flex-olmo", "FlexOlmo", sizes=ROUTED, output_router_logits=True),
    decoder("jetmoe", "JetMoe", sizes={**EXPERTS, "kv_channels": 8, "num_key_value_heads": 2}, generates=True),
    decoder(
        "llama4-text",
        "Llama4",
        config="Llama4Text",
        sizes=EXPERTS,
        intermediate_size_mlp=24,
        interleave_moe_layer_step=2,
        attention_chunk_size=4,
        num_experts_per_tok=1,
    ),
    decoder("hunyuan-moe", "HunYuanMoEV1", sizes=ROUTED, moe_topk=2),
    decoder(
        "dbrx",
        "Dbrx",
        sizes={
            "d_model": 16,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 64,
            "vocab_size": VOCAB,
            "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
            **SPECIAL,
        },
    ),
)
