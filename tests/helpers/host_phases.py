"""A program that trains a GPT-2 on the simulated accelerator, and measures the memory of its process phase by phase.

`measured` runs it in a process of its own, and returns what it has printed.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

TINY = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 16}
LARGE = {"n_embd": 768, "n_layer": 10, "n_head": 12, "vocab_size": 5000, "n_positions": 64}
"""300 MB of weights."""
ROWS, TOKENS = 2, 8


def measured(kind: str, folder: Path, **options: Any) -> dict[str, dict[str, int]]:
    """Phase -> "process" and "host", the most bytes that its memory grew by, with and without those of the simulated
    device, and "simulated", the most of that; of "l2l" with options of `L2LTrainingArguments`, or of
    "plain_checkpointing"."""
    # Freed memory goes back to the system at once, so that it is not counted: that of glibc, which keeps less in one
    # arena than in one of each thread, and that of MKL, whose buffers grow with the largest product so far.
    freed = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    env = {**freed, "MKL_DISABLE_FAST_MM": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, kind, str(folder), json.dumps(options)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


class Watch:
    """Looks at the memory of the process every half millisecond, from a thread of its own."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, int]] = {}
        self.phase = ""
        self._base = self._process() - self._simulated()
        threading.Thread(target=self._look, daemon=True).start()

    def begin(self, phase: str) -> None:
        """What is held from now on is of this phase; of "", of none."""
        gc.collect()
        self.phase = phase

    @staticmethod
    def _process() -> int:
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
        return sum(int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))

    @staticmethod
    def _simulated() -> int:
        import torch

        from hf_l2l.runtime import stream

        return stream.simulated_bytes(torch.device("sim"))[0]

    def _look(self) -> None:
        while True:
            phase, before = self.phase, self._simulated()
            process, simulated = self._process() - self._base, self._simulated()
            if before != simulated:  # what has been freed in between would count as memory of the host
                continue
            now = {"process": process, "host": process - simulated, "simulated": simulated}
            if phase and phase == self.phase:  # another one may have begun meanwhile
                most = self.found.setdefault(phase, now)
                self.found[phase] = {name: max(value, most[name]) for name, value in now.items()}
            time.sleep(0.0005)


def run(kind: str, sizes: dict[str, int], folder: str, options: dict[str, Any], watch: Watch | None = None) -> None:
    """Load, train two steps, save, and resume for one step."""
    import torch
    import transformers as hf

    from hf_l2l import L2LTrainer, L2LTrainingArguments

    def begin(phase: str) -> None:
        if watch is not None:
            watch.begin(phase)

    class Phases(hf.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begin("train" if state.global_step < 2 else "")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begin("save" if state.global_step == 2 else "")

    def trainer(**more: Any) -> Any:
        ids = torch.randint(5, 90, (4 * ROWS, TOKENS))
        given = {"per_device_train_batch_size": ROWS, "report_to": "none", "disable_tqdm": True, **more}
        of_l2l: tuple[Any, ...] = (L2LTrainer, L2LTrainingArguments, options)
        of_plain = (hf.Trainer, hf.TrainingArguments, {"gradient_checkpointing": True})
        made, arguments, others = of_l2l if kind == "l2l" else of_plain
        return made(
            model=hf.GPT2LMHeadModel.from_pretrained(f"{folder}/model"),
            args=arguments(output_dir=folder, **given, **others),
            train_dataset=[{"input_ids": row, "labels": row} for row in ids],
            callbacks=[Phases()],
        )

    hf.GPT2LMHeadModel(hf.GPT2Config(**sizes)).save_pretrained(f"{folder}/model")
    begin("attach")
    trainer(max_steps=2, save_strategy="steps", save_steps=2).train()
    begin("")
    for _ in range(10):  # the device's thread lets go of the first training
        gc.collect()
        time.sleep(0.02)
    begin("resume")
    trainer(max_steps=3, save_strategy="no").train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    begin("")


def main(kind: str, folder: str, options: str) -> None:
    """Print the bytes of each phase."""
    import torch

    from hf_l2l.testing import enable_simulated_accelerator

    torch.set_num_threads(1)
    enable_simulated_accelerator()
    gc.freeze()
    with contextlib.redirect_stdout(io.StringIO()):
        run(kind, TINY, f"{folder}/tiny", json.loads(options))  # what libraries allocate once
        gc.collect()
        gc.freeze()  # what was imported is not looked at again and again
        watch = Watch()
        run(kind, LARGE, f"{folder}/real", json.loads(options), watch)
    print(json.dumps(watch.found))


if __name__ == "__main__":
    main(*sys.argv[1:])
