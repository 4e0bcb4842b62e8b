"""From the figures of a machine to the rates of one run."""

from __future__ import annotations

import torch

from hf_l2l.config import L2LConfig
from hf_l2l.devices import execution_device
from hf_l2l.plan.layer_probe import with_layer_rates
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates
from hf_l2l.probe.figures import HardwareFigures


def rates_of(figures: HardwareFigures, run: RunShapes, config: L2LConfig, *, measures: bool) -> Rates:
    """The rates of a run by these figures; one that `measures` runs a layer of the model, too.

    Raises:
        ValueError: if the figures are of a device that shares the host's memory, or lack the dtype of the layers.
    """
    if figures.link_up is None:
        raise ValueError(
            f"times are of a machine whose device has memory of its own (got the figures of {figures.device_name}, "
            f"which shares that of the host, for {run.device.type}); give those of the machine that will train it"
        )
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(run.multiplies_in or torch.float32, "fp32")
    if dtype not in figures.flops:
        raise ValueError(
            f"the figures must have FLOP/s of the dtype in which layers compute (got {dtype}, and figures of "
            f"{figures.device_name} with {', '.join(figures.flops)}, the dtypes in which it multiplies matrices); "
            "give cmp one of them, leave out cmp, or leave out bf16"
        )
    rates = Rates.of(figures, run.multiplies_in, config)
    if measures:
        rates = with_layer_rates(rates, run, execution_device(config.device))
    return rates
