"""A script as users write it, for launchers: `python rank_script.py FOLDER [KILLED_AT [realtime]]`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import transformers as hf
from transformers.trainer_utils import get_last_checkpoint

from hf_l2l import L2LTrainer, L2LTrainingArguments
from models import bert
from rank_pool import digest
from rank_trainer import Rows


class Killed(hf.TrainerCallback):
    """Kills the last rank at the end of a step, in the first attempt."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if is_first and state.global_step == self.step and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, killed_at = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    realtime = {"l2l_realtime_checkpoint": f"{folder}-now", "l2l_realtime_every": 1, "save_strategy": "no"}
    torch.manual_seed(0)
    args = L2LTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=6,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        eps_update="deferred",
        l2l_rank_timeout=5,
        **(realtime if "realtime" in sys.argv else {}),
    )
    model = bert(0.1)
    trainer = L2LTrainer(model=model, args=args, train_dataset=Rows(70, "classes"), callbacks=[Killed(killed_at)])
    os.makedirs(folder, exist_ok=True)
    resumes = True if "realtime" in sys.argv and os.path.isdir(f"{folder}-now") else get_last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=resumes)  # as docs/ranks.md says
    if args.should_save:
        print("RESULT", args.world_size, trainer.state.global_step, digest(*model.parameters()), flush=True)


if __name__ == "__main__":
    main()
