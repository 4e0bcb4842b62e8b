"""TRL's trainers run layer to layer as they do by themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("trl", reason="`make test-clients` has it")

import torch
import transformers as hf
import trl
from datasets import Dataset
from peft import LoraConfig

from client_models import llama, saved, sentence, tokenizer
from clients import UBATCHES, Training, assert_same, assert_same_bits, check_trainer, options, run, start_again
from hf_l2l import detach_l2l, make_l2l_arguments, make_l2l_trainer
from hf_l2l.hf.attach import attachment_of
from hf_l2l.testing import enable_simulated_accelerator
from tiers import on_a_device
from training import settled_memory

FP32 = {"dtype": "float32"}
ubatches = pytest.mark.parametrize("ubatch_size", UBATCHES)


def data(kind: str) -> Dataset:
    """Rows of random words, of one of the kinds that TRL trains on."""
    draws = random.Random(1)
    rows: list[dict[str, Any]] = []
    for i in range(32):
        roles = "user", "assistant", "assistant"
        asked, good, bad = ([{"role": role, "content": sentence(draws)}] for role in roles)
        kinds = {
            "prose": {"text": good[0]["content"]},
            "chat": {"messages": asked + good},
            "preference": {"prompt": asked, "chosen": good, "rejected": bad},
            "desirable": {"prompt": asked, "completion": good, "label": i % 2 == 0},
            "prompt": {"prompt": asked},
        }
        rows.append(kinds[kind])
    return Dataset.from_list(rows)


def parts(kind: str, **more: Any) -> dict[str, Any]:
    return {"model": llama(), "train_dataset": data(kind), "processing_class": tokenizer(), **more}


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


ACCUMULATED = {"gradient_accumulation_steps": 2, "max_steps": 2, "per_device_train_batch_size": 4}
WRAPPED = {"max_length": 16, "packing": True, "packing_strategy": "wrapped", "per_device_train_batch_size": 4}
SFT = {
    "prose": ("prose", {}),
    "chat": ("chat", {}),  # the head is fused with the loss, in tiles
    "packed": ("prose", WRAPPED),
    "dft": ("chat", {"loss_type": "dft"}),
    "accumulation": ("chat", ACCUMULATED),
}


@ubatches
@pytest.mark.filterwarnings("ignore:batch 4 x accumulation 2:UserWarning")
@pytest.mark.parametrize("case", SFT)
def test_sft(tmp_path, case, ubatch_size):
    kind, given = SFT[case]
    check_trainer(trl.SFTTrainer, trl.SFTConfig, tmp_path, lambda: parts(kind), ubatch_size, **given)


@ubatches
def test_sft_with_evaluations_of_a_model_named_by_its_folder(tmp_path, ubatch_size):
    folder = saved(llama(), tmp_path / "model")
    rows = data("chat")
    made = lambda: {"model": folder, "train_dataset": rows, "eval_dataset": rows.select(range(8))}  # noqa: E731
    given = {"model_init_kwargs": FP32, "eval_strategy": "steps", "eval_steps": 2}
    check_trainer(trl.SFTTrainer, trl.SFTConfig, tmp_path, made, ubatch_size, **given)


@ubatches
def test_sft_of_adapters(tmp_path, ubatch_size):
    made = lambda: parts("chat", peft_config=lora())  # noqa: E731
    found = check_trainer(trl.SFTTrainer, trl.SFTConfig, tmp_path, made, ubatch_size, max_steps=4)
    before = llama().state_dict()
    for name, p in found.trainer.model.get_base_model().named_parameters():
        assert p.requires_grad == ("lora_" in name)
        if not p.requires_grad:
            assert torch.equal(p, before[name.replace(".base_layer", "")]), name


@pytest.mark.parametrize(
    ("trainer", "config", "rows"),
    [(trl.SFTTrainer, trl.SFTConfig, "chat"), (trl.DPOTrainer, trl.DPOConfig, "preference")],
)
def test_accumulated_batches_run_one_by_one_and_a_warning_says_why(tmp_path, trainer, config, rows):
    """Its metrics are those of each batch."""
    folder = saved(llama(), tmp_path / "model")
    said = f"moves the weights 4 times per step: {trainer.__name__} has a compute_loss of"
    with pytest.warns(UserWarning, match=said):
        given = {**ACCUMULATED, "model_init_kwargs": FP32}
        check_trainer(trainer, config, tmp_path, lambda: parts(rows, model=folder), None, **given)


def test_padding_free_batches_are_trained_whole(tmp_path):
    """One row has all the tokens of the batch: there is nothing to split. Logs and weights are the same to the bit."""
    given = {"packing": True, "packing_strategy": "bfd", "max_length": 16, "model_init_kwargs": None}
    check_trainer(trl.SFTTrainer, trl.SFTConfig, tmp_path, lambda: parts("prose"), 3, tolerance=0.0, **given)


REFERENCES = ["made by the trainer", "given", "following", "computed before", "without adapters"]
SEVERAL = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig, "chat", {}),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, "preference", {}),
    "KTO": (trl.KTOTrainer, trl.KTOConfig, "desirable", {}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, "preference", {}),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, "prompt", {"max_completion_length": 4, "num_generations": 4}),
}


def model_of(case: str) -> Any:
    return llama(hf.LlamaForSequenceClassification, num_labels=1) if case == "reward" else llama()


@ubatches
@pytest.mark.parametrize("reference", REFERENCES)
def test_dpo(tmp_path, reference, ubatch_size):
    folder = saved(llama(), tmp_path / "model")

    def made() -> dict[str, Any]:
        found = parts("preference", model=folder)
        if reference in ("given", "computed before"):
            found["ref_model"] = llama(num_hidden_layers=2)
        if reference == "following":  # its weights are written to, through `.data`, after each step
            found["ref_model"] = llama()
        if reference == "without adapters":
            found["peft_config"] = lora()
        return found

    given = {"precompute_ref_log_probs": reference == "computed before", "model_init_kwargs": FP32}
    if reference == "following":
        given |= {"sync_ref_model": True, "ref_model_sync_steps": 1}
    found = check_trainer(trl.DPOTrainer, trl.DPOConfig, tmp_path, made, ubatch_size, **given)
    if reference in ("made by the trainer", "given", "following"):
        attachment = attachment_of(found.trainer.ref_model)
        assert attachment is not None and attachment.config.stash == "host"
        detach_l2l(found.trainer.model)
        assert attachment_of(found.trainer.ref_model) is None


@ubatches
@pytest.mark.parametrize("case", ["KTO", "reward"])
def test_kto_and_reward(tmp_path, case, ubatch_size):
    trainer, config, kind, _ = SEVERAL[case]
    folder = saved(model_of(case), tmp_path / "model")
    check_trainer(trainer, config, tmp_path, lambda: parts(kind, model=folder), ubatch_size, model_init_kwargs=FP32)


# ---- generation


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Something that differs between completions."""
    return [float(len(words[0]["content"].split()) % 3) for words in completions]


@ubatches
@pytest.mark.parametrize(("trainer", "config"), [(trl.GRPOTrainer, trl.GRPOConfig), (trl.RLOOTrainer, trl.RLOOConfig)])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_generation_while_it_trains(tmp_path, trainer, config, beta, ubatch_size):
    """With `beta`, a reference model is loaded beside."""
    folder = saved(llama(), tmp_path / "model")
    made = lambda: parts("prompt", model=folder, reward_funcs=reward)  # noqa: E731
    given = {"max_completion_length": 6, "num_generations": 4, "beta": beta, "model_init_kwargs": FP32}
    found = check_trainer(trainer, config, tmp_path, made, ubatch_size, **given)
    assert len({entry["reward"] for entry in found.logs if "reward" in entry}) > 1


@pytest.fixture
def _two_devices() -> Iterator[None]:
    enable_simulated_accelerator(devices=2)
    yield
    enable_simulated_accelerator()


@on_a_device
@pytest.mark.usefixtures("_two_devices")
@pytest.mark.parametrize("case", SEVERAL)
def test_two_devices_train_as_one_with_twice_the_rows(tmp_path, case):
    """With TRL's own trainers, several devices mean `DataParallel`, which it refuses."""
    trainer, config, kind, given = SEVERAL[case]
    kinds = make_l2l_trainer(trainer), make_l2l_arguments(config)
    folder = saved(model_of(case), tmp_path)
    more = {"reward_funcs": reward} if case == "GRPO" else {}

    def trained(devices: str, rows: int) -> Training:
        sizes = {"per_device_train_batch_size": rows, "ubatch_size": 2, "l2l_devices": devices, "max_steps": 2}
        made = lambda: parts(kind, model=folder, **more)  # noqa: E731
        return run(*kinds, tmp_path / devices, made, model_init_kwargs=FP32, **sizes, **given)

    two, one = trained("2", 4), trained("1", 8)
    assert two.trainer.args.n_gpu == 2 and two.trainer._train_batch_size == 8
    assert len(attachment_of(two.trainer.model).config.device) == 2
    assert_same(two, one, None)


# ---- what is saved


def sft(folder, **given: Any) -> Any:
    start_again()
    kinds = make_l2l_trainer(trl.SFTTrainer), make_l2l_arguments(trl.SFTConfig)
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "ubatch_size": 3, **given}
    return kinds[0](args=kinds[1](**options(folder, **saving)), **parts("chat"))


def test_a_checkpoint_is_resumed(tmp_path):
    whole = sft(tmp_path)
    whole.train()
    expected = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    resumed = sft(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert_same_bits(dict(resumed.model.named_parameters()), expected)


def test_arguments_of_a_checkpoint_are_loaded_and_plain_sft_goes_on_from_what_was_saved(tmp_path):
    found = sft(tmp_path, max_steps=2)
    found.train()
    args = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert type(args) is make_l2l_arguments(trl.SFTConfig)
    assert (args.ubatch_size, args.max_length) == (3, trl.SFTConfig(output_dir=str(tmp_path), bf16=False).max_length)
    found.save_model(str(tmp_path / "saved"))
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_bits(loaded.state_dict(), found.model.state_dict())
    run(
        trl.SFTTrainer,
        trl.SFTConfig,
        tmp_path / "further",
        lambda: parts("chat", model=str(tmp_path / "saved")),
        max_steps=1,
    )


@on_a_device
def test_device_memory_does_not_grow_with_the_depth_of_two_models(tmp_path):
    def made(depth: int) -> dict[str, Any]:
        sizes = {"num_hidden_layers": depth, "hidden_size": 32}
        return parts("preference", model=llama(**sizes), ref_model=llama(**sizes))

    def peak(depth: int, trainer: type[Any], config: type[Any], **given: Any) -> int:
        settled_memory()
        torch.accelerator.reset_peak_memory_stats()
        before = int(torch.accelerator.memory_allocated())
        given |= {"max_steps": 1, "per_device_train_batch_size": 1}
        run(trainer, config, tmp_path / trainer.__name__, lambda: made(depth), **given)
        return int(torch.accelerator.max_memory_allocated()) - before

    layer = sum(p.nbytes for p in made(1)["model"].model.layers.parameters())
    streamed = make_l2l_trainer(trl.DPOTrainer), make_l2l_arguments(trl.DPOConfig)
    assert peak(12, *streamed, stash="host") - peak(4, *streamed, stash="host") < layer
    # Weights of two models, gradients and moments; what the loss takes hides some of it.
    assert peak(12, trl.DPOTrainer, trl.DPOConfig) - peak(4, trl.DPOTrainer, trl.DPOConfig) > 8 * 2 * layer
