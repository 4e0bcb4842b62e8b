"""What one layer reaches: by a clock of the test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch.overrides import TorchFunctionMode

from hf_l2l.config import L2LConfig
from hf_l2l.plan.layer_probe import with_layer_rates
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates
from hf_l2l.shapes.inputs import example_inputs

RATES = Rates(flops=1.0, link_up=2.0, link_down=3.0, adamw=4.0, device_adamw=5.0)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}


def run_of(model: Any, rows: int) -> RunShapes:
    return RunShapes(model, L2LConfig(), example_inputs(model, rows, 16), device=torch.device("cuda"))


def llama() -> Any:
    with torch.device("meta"):
        return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2))


def flops_of(run: RunShapes, rows: int) -> int:
    layer = run.traced(rows).calls[0].layer
    return layer.forward_flops + layer.backward_flops


def test_operations_are_told_from_what_comes_besides():
    """A layer that takes 3 ms besides, and computes 10 GFLOP/s."""
    run = run_of(llama(), 8)
    times = iter([3e-3 + flops_of(run, rows) / 1e10 for rows in (1, 8)])
    found = with_layer_rates(RATES, run, torch.device("cpu"), lambda work: next(times))
    assert found.flops == pytest.approx(1e10)
    assert found.per_call == pytest.approx(1.5e-3)
    assert (found.link_up, found.link_down, found.adamw, found.device_adamw) == (2.0, 3.0, 4.0, 5.0)


@pytest.mark.parametrize(("rows", "times"), [(1, [0.5]), (8, [0.5, 0.5]), (8, [0.6, 0.5])])
def test_a_size_that_makes_no_difference_is_all_operations(rows, times):
    run = run_of(llama(), rows)
    given = iter(times)
    found = with_layer_rates(RATES, run, torch.device("cpu"), lambda work: next(given))
    assert found.flops == pytest.approx(flops_of(run, rows) / times[-1])
    assert found.per_call == 0


def test_a_layer_runs_under_the_autocast_of_the_training():
    model = llama()
    run = RunShapes(
        model, L2LConfig(), example_inputs(model, 4, 16), device=torch.device("cuda"), autocast=torch.bfloat16
    )
    seen: list[torch.dtype] = []

    class Sees(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.nn.functional.linear:
                seen.append(found.dtype)
            return found

    def measure(work: Any) -> float:
        with Sees():
            work()
        return float(len(seen))

    with_layer_rates(RATES, run, torch.device("cpu"), measure)
    assert seen and set(seen) == {torch.bfloat16}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["llama", "bert", pytest.param("t5", marks=pytest.mark.slow), "vit", "mixtral"])
def test_layers_of_many_kinds_run(kind):
    """Forward and backward, of one row and of all; the clock sees two turns."""
    with torch.device("meta"):
        models = {
            "llama": lambda: llama(),
            "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES)),
            "t5": lambda: hf.T5ForConditionalGeneration(
                hf.T5Config(d_model=32, num_layers=2, num_heads=2, d_ff=64, vocab_size=100, decoder_start_token_id=0)
            ),
            "vit": lambda: hf.ViTForImageClassification(
                hf.ViTConfig(**{k: v for k, v in SIZES.items() if k != "vocab_size"}, image_size=32, patch_size=8)
            ),
            "mixtral": lambda: hf.MixtralForCausalLM(
                hf.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2)
            ),
        }
        model = models[kind]()
    run = RunShapes(
        model,
        L2LConfig(),
        example_inputs(model, 4, None if kind == "vit" else 16),
        device=torch.device("cuda"),
    )
    turns = []

    def measure(work: Any) -> float:
        work()
        turns.append(work)
        return float(len(turns))

    assert with_layer_rates(RATES, run, torch.device("cpu"), measure).flops > 0
    assert len(turns) == 2
