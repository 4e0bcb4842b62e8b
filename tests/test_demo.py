"""The demo sentiment set is what its README says."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from hf_l2l.demo import demo_files


def rows(split: str) -> list[dict[str, str]]:
    with open(demo_files()[split], encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def normalized(sentence: str) -> str:
    """The sentence without case, punctuation and spacing, so that near copies are found, too."""
    return " ".join("".join(c if c.isalnum() else " " for c in sentence.lower()).split())


@pytest.mark.parametrize(("split", "count"), [("train", 400), ("validation", 120)])
def test_a_split_is_balanced_text(split: str, count: int) -> None:
    found = rows(split)
    assert Counter(row["label"] for row in found) == {"0": count // 2, "1": count // 2}
    assert {tuple(row) for row in found} == {("sentence", "label")}
    assert all(row["sentence"] == row["sentence"].strip() and len(row["sentence"].split()) >= 4 for row in found)


def test_no_sentence_occurs_twice_and_none_in_both_splits() -> None:
    sentences = [normalized(row["sentence"]) for split in ("train", "validation") for row in rows(split)]
    assert [sentence for sentence, count in Counter(sentences).items() if count > 1] == []


def test_the_files_lie_beside_their_readme() -> None:
    folders = {Path(file).parent for file in demo_files().values()}
    assert len(folders) == 1
    assert (folders.pop() / "README.md").is_file()
