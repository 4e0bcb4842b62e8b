"""`L2LTrainer` in several ranks has the bits of transformers' Trainer under DistributedDataParallel."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import distributed

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from models import batch_for
from rank_trainer import trained, trained_and_growing, trained_with_loss, trained_with_other_lengths
from training import measured, tiny_bert

SAME = ("losses", "norms", "eval_loss", "predictions", "weights", "state", "step")

UNCLIPPED = {"max_grad_norm": 0.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "dropout": ("dropout", {}),
    "llama, whose batches have unequal numbers of tokens": ("llama", {}),
    "without clipping": ("bert", {"max_grad_norm": 0.0}),
    "a schedule and decay": ("bert", {"warmup_steps": 2, "weight_decay": 0.1}),
}


def layered(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**options, "eps_update": "deferred", **more}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_bits_of_data_parallel(pool, tmp_path, case):
    name, options = CASES[case]
    plain = pool(2).run(trained, name, "hf", str(tmp_path / "hf"), options)
    found = pool(2).run(trained, name, "l2l", str(tmp_path / "l2l"), layered(options))
    assert plain[0]["wrapped"] == "DistributedDataParallel" != found[0]["wrapped"]
    for rank in range(2):
        for what in SAME:
            assert found[rank][what] == plain[rank][what], f"{what} of rank {rank}"


@pytest.mark.one_in(18)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("case", [*CASES, "cmp bf16", "cmp fp16", "eager"])
def test_two_ranks_have_the_bits_of_one_process_that_accumulates(pool, tmp_path, case, steps):
    """Its batches are those of the ranks in turn. Each rank draws its dropout from the same seed: it is left out.
    Losses are logged as means of ranks, and as sums, which are rounded in another order."""
    more = {"cmp bf16": {"cmp": "bf16"}, "cmp fp16": {"cmp": "fp16"}, "eager": {"eps_update": "eager", **UNCLIPPED}}
    name, options = CASES.get(case, ("llama", more.get(case, {})))
    name, options = name.replace("dropout", "bert"), layered({"l2l_merge_accumulation": "off"}, **options)
    alone = {**options, "gradient_accumulation_steps": 2 * steps}
    expected = pool(1).run(trained, name, "l2l", str(tmp_path / "alone"), alone)[0]
    options["gradient_accumulation_steps"] = steps
    for found in pool(2).run(trained, name, "l2l", str(tmp_path / "ranks"), options):
        for what in ("norms", "weights", "state", "step"):
            assert found[what] == expected[what], what
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)


def test_batches_of_ranks_are_not_merged(pool, tmp_path):
    options = layered({"gradient_accumulation_steps": 2, "max_steps": 2})
    found = pool(2).run(trained, "llama", "l2l", str(tmp_path / "auto"), options)
    off = pool(2).run(trained, "llama", "l2l", str(tmp_path / "off"), {**options, "l2l_merge_accumulation": "off"})
    assert [each["weights"] for each in found] == [each["weights"] for each in off]
    assert all("with several ranks, gradients are added after each batch" in each["warned"] for each in found)


@pytest.mark.parametrize("clips", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_loss_with_parameters_is_trained(pool, tmp_path, clips):
    """The norms are those of the model alone, as transformers has them; ranks update it, and the loss."""
    options = layered({"gradient_accumulation_steps": 2, "max_grad_norm": 0.1 if clips else 0.0})
    alone = pool(1).run(trained_with_loss, str(tmp_path / "alone"), options)[0]
    options["gradient_accumulation_steps"] = 1
    found = pool(2).run(trained_with_loss, str(tmp_path / "ranks"), options)
    for rank, each in enumerate(found):
        assert each["norms"] == alone["norms"] and each["weights"] == alone["weights"]
        assert f"Ranks = 2, of which this is rank {rank}; it updates " in each["summary"]
    assert "Ranks" not in alone["summary"]
    shares = [int(re.search(r"it updates ([0-9,]+) of", each["summary"])[1].replace(",", "")) for each in found]
    total = int(re.search(r"of ([0-9,]+) trained parameters", found[0]["summary"])[1].replace(",", ""))
    assert sum(shares) == total and min(shares) > 0


def test_micro_steps_are_equal_to_rounding(pool, tmp_path):
    """DistributedDataParallel first adds those of a rank, and then the ranks; here all ranks are added in each."""
    options = {"gradient_accumulation_steps": 2}
    plain = pool(2).run(trained, "llama", "hf", str(tmp_path / "hf"), options)
    found = pool(2).run(trained, "llama", "l2l", str(tmp_path / "l2l"), layered(options))
    assert found[0]["weights"] == found[1]["weights"]
    for what in ("losses", "norms", "eval_loss"):
        assert found[0][what] == pytest.approx(plain[0][what], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_three_ranks_are_equal_to_rounding(pool, tmp_path, case):
    """gloo adds in another order than that of the ranks."""
    name, options = CASES[case]
    plain = pool(3).run(trained, name, "hf", str(tmp_path / "hf"), options)
    found = pool(3).run(trained, name, "l2l", str(tmp_path / "l2l"), layered(options))
    assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]
    for what in ("losses", "norms", "eval_loss"):
        assert found[0][what] == pytest.approx(plain[0][what], rel=1e-4)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "options", [{"cmp": "bf16"}, {"cmp": "fp16"}, {"bf16": True}, {"stash": "host", "ubatch_size": 2}]
)
def test_other_modes_train(pool, tmp_path, options):
    found = pool(2).run(trained, "bert", "l2l", str(tmp_path), layered({}, **options))
    assert found[0]["weights"] == found[1]["weights"] and found[0]["step"] == 4


def test_on_the_simulated_accelerator(pool, tmp_path):
    """Each rank has its share of the devices: two of four, and one batch."""
    options = layered({"per_device_train_batch_size": 2, "use_cpu": False})
    found = pool(2, sim=True).run(trained, "bert", "l2l", str(tmp_path / "sim"), options)
    assert [each["devices"] for each in found] == [["sim:0", "sim:2"], ["sim:1", "sim:3"]]
    assert found[0]["weights"] == found[1]["weights"] and found[0]["step"] == 4


def test_times_are_of_all_ranks(pool, tmp_path):
    pool(2).run(trained, "bert", "l2l", str(tmp_path), layered({"l2l_log_times": True}))
    rows = measured(tmp_path)
    assert rows and all("l2l_tokens_per_s" in row for row in rows)
    assert len({row["step"] for row in rows}) == len(rows)  # one rank writes them


def test_each_rank_writes_a_trace(pool, tmp_path):
    trace = tmp_path / "trace.json"
    pool(2).run(trained, "bert", "l2l", str(tmp_path / "run"), layered({"l2l_trace": str(trace)}))
    assert trace.is_file() and (tmp_path / "trace.rank1.json").is_file()


def begun(folder: str) -> tuple[float | None, float]:
    """What is 0 in the trace of this rank, and when its first span begins there."""
    model = tiny_bert(layers=2)
    eps = attach_l2l(model, L2LConfig(trace=f"{folder}/trace.json"))
    if distributed.get_rank() == 0:  # an evaluation of its own
        with torch.no_grad():
            model(**batch_for(model))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    model(**batch_for(model)).loss.backward()
    optimizer.step()
    trace = eps.timeline._trace
    assert trace is not None
    with open(trace.path) as file:
        times = [event["ts"] for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    detach_l2l(model)
    return trace.begins_s, min(times)


def test_traces_of_ranks_have_one_time(pool, tmp_path):
    (begins, first), (others, of_other) = pool(2).run(begun, str(tmp_path))
    assert begins == others and min(first, of_other) >= 0.0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("average", [True, False], ids=["tokens of all ranks", "tokens of each"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_noise_scale_is_that_of_all_ranks(pool, tmp_path, name, average):
    """In one process that accumulates the batches of the ranks in turn, they weigh the same, if ranks divide by the
    tokens of all of them: else each rank does."""
    options = layered({"l2l_merge_accumulation": "off", "ubatch_size": 2, "learning_rate": 0.0, "max_steps": 3})
    options |= {"l2l_noise_scale": True, "l2l_noise_scale_every": "1", "logging_steps": 2}
    alone = {**options, "gradient_accumulation_steps": 2}
    expected = pool(1).run(trained, name, "l2l", str(tmp_path / "alone"), alone)[0]["noise"]
    found = pool(2).run(
        trained, name, "l2l", str(tmp_path / "ranks"), {**options, "average_tokens_across_devices": average}
    )
    assert found[0]["noise"] == found[1]["noise"] and expected["steps"] == 3
    for what in ("items", "rows", "steps"):
        assert found[0]["noise"][what] == expected[what]
    # A mean, as BERT's loss is, transformers multiplies by the ranks unless each divides by its own.
    noise = found[0]["noise"]["noise"] * (4 if name == "bert" and not average else 1)
    unequal = name == "llama" and not average
    assert noise == pytest.approx(expected["noise"], rel=0.2 if unequal else 1e-3)
    assert (noise != pytest.approx(expected["noise"], rel=1e-5)) == unequal


def test_a_noise_scale_is_resumed_by_all_ranks(pool, tmp_path):
    options = layered({"ubatch_size": 2, "l2l_noise_scale": True, "l2l_noise_scale_every": "1", "logging_steps": 3})
    options |= {"save_strategy": "steps", "save_steps": 2}
    whole = pool(2).run(trained, "llama", "l2l", str(tmp_path), options)
    checkpoint = str(tmp_path / "checkpoint-2")
    again = pool(2).run(trained, "llama", "l2l", str(tmp_path), options, 70, checkpoint)
    assert [each["noise"] for each in again] == [each["noise"] for each in whole]
    assert whole[0]["noise"] == whole[1]["noise"] and whole[0]["noise"]["steps"] == 4


def test_ranks_measure_at_the_same_steps(pool, tmp_path):
    """As rank 0 would: the first batches of ranks may have other lengths."""
    options = layered({"ubatch_size": 2, "l2l_noise_scale": True})
    found = pool(2).run(trained_with_other_lengths, "llama", "l2l", str(tmp_path), options)
    assert [each["noise"]["steps"] for each in found] == [2, 2] and found[0]["noise"] == found[1]["noise"]


def test_batches_of_ranks_grow_together(pool, tmp_path):
    """And a rank alone may log meanwhile."""
    options = layered({"ubatch_size": 2, "l2l_noise_scale": True, "l2l_noise_scale_every": "1", "max_steps": -1})
    options |= {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2, "logging_steps": 2}
    found = pool(2).run(trained_and_growing, "llama", "l2l", str(tmp_path), options)
    # 9 batches of each rank in an epoch: 4 and 5 / 2 steps, and 9 / 2.
    assert [each["step"] for each in found] == [12, 12] and found[0]["noise"] == found[1]["noise"]
    assert found[0]["weights"] == found[1]["weights"]
    checkpoint = str(tmp_path / "checkpoint-6")
    again = pool(2).run(trained_and_growing, "llama", "l2l", str(tmp_path), options, 70, checkpoint)
    for what in ("weights", "state", "step", "noise"):
        assert [each[what] for each in again] == [each[what] for each in found], what
