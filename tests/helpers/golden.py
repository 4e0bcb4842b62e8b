"""Bits of fixed runs, to be compared before and after a change that is to change none.

    python tests/helpers/golden.py record before.json    # on the commit before
    python tests/helpers/golden.py compare before.json   # on the one after, on the same machine

Losses, gradient norms and a digest of the weights after every step, on the CPU with views and with copies and on the
simulated accelerator, in all update modes, precisions, stashes and numbers of micro-batches. The bits depend on the
machine, so no recording is kept with the tests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hf_l2l import L2LConfig, attach_l2l  # noqa: E402

STEPS, ROWS, TOKENS, VOCAB = 5, 8, 6, 60
SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**SMALL, vocab_size=VOCAB, max_position_embeddings=16))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**SMALL, vocab_size=VOCAB, num_key_value_heads=1, tie_word_embeddings=True)
    )


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "d_kv": 8, "vocab_size": VOCAB}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))


MODELS = {"bert": bert, "llama": llama, "t5": t5}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(model, options): every mode, precision, stash and number of micro-batches, though not all with each other."""
    for model in MODELS:
        for update in ("serial", "deferred", "eager"):
            for ubatch_size in (None, 3):
                yield model, {"eps_update": update, "ubatch_size": ubatch_size}
    for update in ("serial", "deferred"):
        for cmp in ("bf16", "fp16"):
            for stash in ("device", "host"):
                yield "bert", {"eps_update": update, "cmp": cmp, "stash": stash, "ubatch_size": 4}
    yield "bert", {"cmp": "bf16", "grad_dtype": "16bit", "moment_dtype": "bf16", "eps_update": "deferred"}
    yield "llama", {"cmp": "bf16", "host_copies": "per_sweep", "eps_update": "deferred"}
    yield "bert", {"gradient_slots": 1, "prefetch": False, "stash": "host", "ubatch_size": 2}
    yield "bert", {"nonfinite": "skip", "eps_update": "deferred"}


def run(device: str, name: str, options: dict[str, Any]) -> list[list[str]]:
    """Loss, gradient norm and a digest of the weights of each step, two micro-steps each."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    eps = attach_l2l(model, L2LConfig(device=device, **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    clips = options.get("eps_update") != "eager"
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        losses = []
        for turn in range(2):
            ids = torch.randint(5, VOCAB, (ROWS, TOKENS), generator=generator)
            mask = (torch.arange(TOKENS) < 3 + torch.arange(ROWS)[:, None] % 4).long()
            labels = ids[:, 0] % 2 if name == "bert" else ids
            if turn == 0:
                with eps.accumulate():
                    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
                    loss.backward()
            else:
                loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
                loss.backward()
            losses.append(loss.item().hex())
        norm = eps.clip_grad_norm_(0.1) if clips else eps.grad_norm()
        optimizer.step()
        optimizer.zero_grad()
        eps.synchronize()
        digest = hashlib.sha256()
        for value in model.state_dict().values():
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        found.append([*losses, norm.item().hex(), digest.hexdigest()[:16]])
    return found


def recorded(device: str) -> dict[str, list[list[str]]]:
    return {f"{device} {name} {json.dumps(options)}": run(device, name, options) for name, options in cases()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "compare", "run"))
    parser.add_argument("file", help="of the recording; for run, the device")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.action == "run":  # in a process of its own: the simulated accelerator stays for its life
        if given.file == "sim":
            from hf_l2l.testing import enable_simulated_accelerator

            enable_simulated_accelerator()
        print(json.dumps(recorded(given.file)))
        return
    found: dict[str, Any] = {}
    for device in ("cpu", "sim"):
        done = subprocess.run(
            [sys.executable, __file__, "run", device], capture_output=True, text=True, check=True, cwd=ROOT
        )
        found.update(json.loads(done.stdout.splitlines()[-1]))
    numbers = sum(len(step) for steps in found.values() for step in steps)
    if given.action == "record":
        Path(given.file).write_text(json.dumps(found, indent=1))
        print(f"{numbers} numbers of {len(found)} runs recorded")
        return
    expected = json.loads(Path(given.file).read_text())
    other = [name for name in expected if found.get(name) != expected[name]]
    print(f"{numbers} numbers of {len(found)} runs compared, {len(other)} runs differ", *other, sep="\n")
    sys.exit(bool(other))


if __name__ == "__main__":
    main()
