"""Fields of configs: which are sizes, and what they are in a tiny copy; and which switch behaviour."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from hf_l2l.verify.family import IMAGE, VOCAB

Fields = Mapping[str, Any]

HIDDEN, HEADS, HEAD_DIM, INNER, LAYERS, MOST_LAYERS, WINDOW = 16, 2, 8, 32, 2, 4, 4
"""Sizes of a tiny copy. It has more layers than `LAYERS`, up to `MOST_LAYERS`, where its config has so many kinds."""

LAYER_FIELDS = (
    "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers depth"
).split()
HEAD_FIELDS = (
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads"
).split()
KV_HEAD_FIELDS = "num_key_value_heads num_kv_heads n_head_kv".split()
_SIZES = (
    (LAYERS, " ".join(LAYER_FIELDS)),
    (
        HIDDEN,
        "hidden_size d_model n_embd n_embed dim embed_dim emb_dim d_embed embedding_size word_embed_proj_dim "
        "projection_dim hidden_sizes encoder_hidden_size decoder_hidden_size cross_attention_hidden_size",
    ),
    (HEADS, " ".join([*HEAD_FIELDS, *KV_HEAD_FIELDS])),
    (
        HEAD_DIM,
        "head_dim kv_channels d_kv attention_head_dim attention_head_size d_head v_head_dim qk_head_dim "
        "qk_nope_head_dim qk_rope_head_dim",
    ),
    (
        INNER,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner n_inner ffn_hidden_size dff "
        "hidden_dim moe_intermediate_size shared_expert_intermediate_size dim_feedforward feed_forward_size mlp_dim",
    ),
    (VOCAB, "vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input"),
    (
        64,
        "max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length max_source_positions "
        "max_target_positions max_encoder_position_embeddings max_decoder_position_embeddings",
    ),
    (4, "num_local_experts num_experts n_routed_experts"),
    (2, "num_experts_per_tok top_k num_selected_experts"),
    (IMAGE, "image_size"),
    (IMAGE // 2, "patch_size"),
)
SIZE_OF = {name: size for size, names in _SIZES for name in names.split()}
"""Name of a field -> its size in a tiny copy."""
SIZE_LIKE = re.compile("dim|size|rank|width|hidden|channels")
"""Names of further fields that may be sizes."""

TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}

NOT_COPIED = {
    *vars(PreTrainedConfig()),
    *("auto_map", "model_type", "output_attentions", "quantization_config", "torch_dtype", "use_cache"),
    *("out_features", "out_indices", "stage_names"),
}
"""Fields that say nothing about layers, or say which outputs a program gets."""


def fields_of(config: Any) -> dict[str, Any]:
    """The fields of a config that make its model, in dicts for the configs in it."""
    return {name: value for name, value in config.to_dict().items() if name not in NOT_COPIED}


def is_config(value: Any) -> bool:
    """Whether the value of a field is a config in a config."""
    return isinstance(value, dict) and "model_type" in value


# ---- a tiny copy of any config


def shrunk(fields: Fields, *, bold: bool = False) -> dict[str, Any]:
    """The fields with tiny sizes, as far as their names tell. Lists with an entry for each layer keep a layer of each
    kind. With `bold`, every number whose name is like that of a size is made small, too."""
    known = {name: value for name, value in fields.items() if name not in NOT_COPIED}
    renamed = {value: SIZE_OF[name] for name, value in known.items() if name in SIZE_OF and _is_number(value)}
    depth = next((value for name, value in known.items() if name in LAYER_FIELDS and _is_number(value)), 0)
    kept = layers_kept(known, depth)
    found: dict[str, Any] = {}
    for name, value in known.items():
        if is_config(value):
            found[name] = {"model_type": value["model_type"], **shrunk(value, bold=bold)}
        elif isinstance(value, list | tuple) and len(value) == depth > 1:
            found[name] = [_size(name, value[layer], known, renamed, bold) for layer in kept]
        elif isinstance(value, list | tuple):
            found[name] = [_size(name, each, known, renamed, bold) for each in value]
        elif name in LAYER_FIELDS and _is_number(value):
            found[name] = len(kept)
        else:
            found[name] = _size(name, value, known, renamed, bold)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _size(name: str, value: Any, fields: Fields, renamed: Mapping[int, int], bold: bool) -> Any:
    if name in TOKEN_IDS:
        return TOKEN_IDS[name]
    if not _is_number(value):
        return value
    if "token_id" in name or "token_index" in name:
        return value if 0 <= value < VOCAB else 3
    if name in KV_HEAD_FIELDS:
        heads = next((fields[each] for each in HEAD_FIELDS if each in fields), value)
        return HEADS if value == heads else 1
    if name in SIZE_OF:
        return min(value, SIZE_OF[name])
    if "window" in name:
        return min(value, WINDOW)
    if value in renamed and value > VOCAB:  # as an embedding that is as wide as the layers
        return renamed[value]
    return min(value, HIDDEN) if bold and SIZE_LIKE.search(name) else value


def layers_kept(fields: Fields, depth: int) -> Sequence[int]:
    """The numbers of the layers that a tiny copy has: the first of each kind that lists of the config tell apart."""
    lists = [v for v in fields.values() if isinstance(v, list | tuple) and len(v) == depth and depth]
    kinds = [tuple(str(each[layer]) for each in lists if isinstance(each[layer], str)) for layer in range(depth)]
    first = sorted({kind: layer for layer, kind in reversed([*enumerate(kinds)])}.values())[:MOST_LAYERS]
    more = [layer for layer in range(depth) if layer not in first]
    return sorted([*first, *more[: max(0, LAYERS - len(first))]])


# ---- what a family takes from a config


def switches(fields: Fields, tiny: Fields) -> dict[str, dict[str, Any]]:
    """What switches behaviour in `fields` and is otherwise in the tiny config `tiny`, as arguments of the config, by
    what it is called in reports: truth values, words, factors, what there is none of (None or 0), positions, windows,
    kinds of layers."""
    given = {name: _switch(name, value, tiny[name]) for name, value in fields.items() if name in tiny}
    found = {name: {name: value} for name, value in given.items() if value is not _NO and value != tiny[name]}
    found |= _kinds_of_layers(fields, tiny)
    for name, inner in fields.items():
        if is_config(inner) and is_config(tiny.get(name)) and inner["model_type"] == tiny[name]["model_type"]:
            nested = switches(inner, tiny[name])
            found |= {f"{name}.{key}": {name: value} for key, value in nested.items()}
    return found


_NO = object()
_WITHOUT_EFFECT = re.compile("init|drop|jitter|_token|prob$")


def _switch(name: str, value: Any, tiny: Any) -> Any:
    """What a tiny copy, which has `tiny` there, takes of this field; `_NO` if it is a size or without effect there. Of
    a number it takes whether there are any."""
    if _WITHOUT_EFFECT.search(name) or name in SIZE_OF or name.startswith("_"):
        return _NO
    if value is None or isinstance(value, bool | str | float):
        return value
    if "window" in name and _is_number(value):
        return min(value, WINDOW)
    if _is_number(value) and _is_number(tiny) and (value == 0) != (tiny == 0):
        return min(value, 1)
    return value if name.startswith("rope") and isinstance(value, dict) else _NO


def _kinds_of_layers(fields: Fields, tiny: Fields) -> dict[str, dict[str, Any]]:
    """Lists of words with an entry for each layer, such as `layer_types`."""
    depth = fields.get("num_hidden_layers")
    lists = {n: v for n, v in fields.items() if n in tiny and isinstance(v, list) and v and isinstance(v[0], str)}
    lists = {name: value for name, value in lists.items() if len(value) == depth}
    if not lists or not isinstance(depth, int) or depth == 1:  # any list of one entry has as many
        return {}
    kept = layers_kept(lists, depth)
    taken = {name: [value[layer] for layer in kept] for name, value in lists.items()}
    if all(tiny[name] == value for name, value in taken.items()):
        return {}
    return {", ".join(taken): {**taken, "num_hidden_layers": len(kept)}}


def merged(sizes: Fields, given: Fields) -> dict[str, Any]:
    """`sizes` with the values of `given`, configs in them merged in turn."""
    found = dict(sizes)
    for name, value in given.items():
        inner = found.get(name)
        nested = isinstance(inner, Mapping) and isinstance(value, Mapping) and not name.startswith("rope")
        found[name] = merged(inner, value) if nested and inner is not None else value
    return found
