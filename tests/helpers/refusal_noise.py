"""What is refused and warned of with the noise scale, and with batches that grow with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LBatchGrowth, L2LTrainer
from refusals import Act, Case, Prepare, Scene
from training import rows


def _train(
    model: Callable[[Scene], Any] | None = None,
    kind: type[hf.Trainer] = L2LTrainer,
    of_trainer: dict[str, Any] | None = None,
    count: int = 48,
    **options: Any,
) -> Prepare:
    def prepare(scene: Scene) -> Act:
        made, data = scene.model() if model is None else model(scene), rows(count)
        given = {"use_cpu": True, "l2l_noise_scale": True, "ubatch_size": 4, **options}
        args = scene.arguments(**given)
        return lambda: kind(made, args, train_dataset=data, **(of_trainer or {})).train()

    return prepare


class _Own(L2LTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


def _over_rows(scene: Scene) -> Any:
    made: Any = scene.model()
    made.classifier = nn.Sequential(nn.BatchNorm1d(16), made.classifier)
    return made


def _again_and_again(scene: Scene) -> Any:
    sizes = {"embedding_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return scene.model(
        hf.AlbertForSequenceClassification(hf.AlbertConfig(vocab_size=60, num_hidden_layers=2, **sizes))
    )


def _coupled(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits @ outputs.logits.T, torch.arange(len(labels)))


def _growing(**options: Any) -> Prepare:
    return _train(of_trainer={"callbacks": [L2LBatchGrowth(32)]}, **options)


NOISE = [
    Case("`l2l_noise_scale=True`, with one micro-batch in a step", _train(ubatch_size=None)),
    Case("`l2l_noise_scale=True`, with batch norm over the rows of a batch", _train(_over_rows)),
    Case("`l2l_noise_scale=True`, with a `training_step` of the trainer's own", _train(kind=_Own)),
    Case(
        "`l2l_noise_scale=True`, with a loss that couples rows, such as a contrastive one",
        _train(of_trainer={"compute_loss_func": _coupled}),
        is_early=False,
        varies=r"[\d.]+(?= for a batch| as a)",
    ),
    Case(
        "`l2l_noise_scale=True`, with layers that run several times, as those of ALBERT",
        _train(_again_and_again),
        is_early=False,
    ),
    Case("`L2LBatchGrowth(0)`", lambda scene: lambda: L2LBatchGrowth(0)),
    Case("`L2LBatchGrowth(32, 'half')`", lambda scene: lambda: L2LBatchGrowth(32, "half")),
    Case("`L2LBatchGrowth(32)`, without `l2l_noise_scale=True`", _growing(l2l_noise_scale=False), is_early=False),
    Case("`L2LBatchGrowth(32)`, with 32 rows in a step", _growing(gradient_accumulation_steps=4), is_early=False),
    Case(
        "two of `L2LBatchGrowth`",
        _train(of_trainer={"callbacks": [L2LBatchGrowth(32), L2LBatchGrowth(64)]}),
    ),
]
NOISE_WARNINGS = [
    Case(
        "`l2l_noise_scale=True`, and batches that have fewer rows than `ubatch_size`", _train(count=4), is_early=False
    ),
]
