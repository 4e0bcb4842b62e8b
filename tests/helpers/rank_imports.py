"""What ranks, and trainings that are killed, have imported when they are forked. No collection of garbage looks at it
again."""

# ruff: noqa: F401

from __future__ import annotations

import gc

import accelerate
import hypothesis
import transformers.models.bert.modeling_bert
import transformers.models.llama.modeling_llama
import transformers.models.t5.modeling_t5

import benchmarks.kill_points
import hf_l2l.testing
import rank_cases
import rank_trainer
import slow_disk

gc.collect()
gc.freeze()
