"""Device memory against depth, device batch, vocabulary and sequence length.

A decoder with random weights trains with all of it on the device, the same with activation checkpointing, and layer to
layer with stash and boundary on the host. Peaks are the accelerator's own count; without one, that of the simulated
accelerator, whose memory is counted exactly and whose speed means nothing.

    python benchmarks/memory.py [--questions depth batch vocabulary length] [--quick] [--rows FILE.jsonl]
        [--out FILE.md] [--picture FILE.png]

A document, then all rows as one JSON document in the last line. With --rows every case is written when it is measured,
and a repeated call measures only what is not there yet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as hf_logging

from hf_l2l.logits.chunks import rows_per_chunk
from hf_l2l.testing import enable_simulated_accelerator

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import memory_report
from benchmarks.environment import environment
from benchmarks.memory_runs import WAYS, Case, layer_bytes_per_token, measured


@dataclass(frozen=True)
class Question:
    """What grows, and by which formula device memory should grow with it under L2L.

    Args:
        grows: the field of `Case` that takes the sizes.
        slope: bytes for each unit of it.
        formula: the same in words.
        quick: sizes that take seconds, with `quick_case`.
        case: the other sizes.
    """

    title: str
    grows: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    case: Case
    quick_case: Case
    slope: Callable[[Case, torch.device], float]
    formula: str


def per_row(case: Case, device: torch.device) -> float:
    """Of the device batch: the id and the label of each token in 64 bits, the labels that transformers' loss pads and
    shifts, with which the forward takes the gradients of the logits, and the loss of each in fp32."""
    return 36.0 * case.tokens + 8


def per_word(case: Case, device: torch.device) -> float:
    """The weights of embedding and head, and the gradient of the head (that of the embedding is made when the logits
    are gone); a chunk of logits, their logarithmic softmax, and the gradients of both; all fp32."""
    return 12.0 * case.hidden + 16.0 * rows_per_chunk(case.hidden, case.vocab, None)


def per_token(case: Case, device: torch.device) -> float:
    """What one layer needs by itself; the input that comes for the next layer and the gradient that leaves; id and
    label."""
    return layer_bytes_per_token(case, device) + 2 * 4.0 * case.hidden + 16


SMALL = Case("l2l", layers=6, hidden=128, vocab=1000, rows=8, tokens=64, ubatch=2)
LONG = Case("l2l", layers=2, hidden=64, vocab=1000, rows=1, tokens=512, ubatch=1)
QUICK = replace(SMALL, layers=2, hidden=32, rows=16, tokens=16)
QUESTIONS = {
    "depth": Question(
        "Depth",
        "layers",
        (6, 24, 96, 384),
        (2, 4),
        SMALL,
        QUICK,
        lambda case, device: 0.0,
        "flat: no byte for a further layer",
    ),
    "batch": Question(
        "Device batch",
        "rows",
        (8, 16, 32, 64, 128, 256),
        (16, 32),
        SMALL,
        QUICK,
        per_row,
        "36 bytes for each further token: its id, its label three times, its loss",
    ),
    "vocabulary": Question(
        "Vocabulary",
        "vocab",
        (1000, 4000, 16000, 64000, 128000),
        (1000, 2000),
        SMALL,
        QUICK,
        per_word,
        "12 H + 16 C bytes for each further word (H the hidden size, C the tokens of a chunk of logits)",
    ),
    "length": Question(
        "Tokens of one row",
        "tokens",
        tuple(2**n for n in range(9, 17)),
        (512, 1024),
        LONG,
        LONG,
        per_token,
        "for each further token what one layer by itself takes, two layer outputs on their way, id and label",
    ),
}


def rows_of(name: str, ways: Sequence[str], quick: bool, kept: Path | None) -> list[dict[str, Any]]:
    """All cases of a question; those in the file `kept` are not measured again."""
    question, device = QUESTIONS[name], torch.accelerator.current_accelerator()
    assert device is not None, "`main` has made sure of one"
    fixed = question.quick_case if quick else question.case
    slope, rows = question.slope(fixed, device), []
    have = [] if kept is None or not kept.exists() else [json.loads(line) for line in kept.read_text().splitlines()]
    for size in question.quick if quick else question.sizes:
        for way in ways:
            case = replace(fixed, way=way, **{question.grows: size})
            row = next(
                (r for r in have if r["question"] == name and all(r[k] == v for k, v in asdict(case).items())), None
            )
            if row is None:
                row = {"question": name, "size": size, "slope": slope, **measured(case, device)}
                print(f"{name} {size} {way}: {row['peaks']}", file=sys.stderr, flush=True)
                if kept is not None:
                    with kept.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            rows.append(row)
    return rows


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--quick", action="store_true", help="few and small sizes, to see that it runs")
    for name, meaning in (("rows", "where rows are kept"), ("out", "the document"), ("picture", "the picture")):
        parser.add_argument(f"--{name}", type=Path, help=meaning)
    options = parser.parse_args(arguments)
    if "l2l" not in options.ways:
        parser.error(f"--ways must name l2l, which the formula is for (got {' '.join(options.ways)})")
    for name in ("rows", "out", "picture"):
        file = getattr(options, name)
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"--{name} must be in a folder that exists (got {file})")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    if not torch.accelerator.is_available():
        enable_simulated_accelerator()
    hf_logging.set_verbosity_error()
    rows = {name: rows_of(name, options.ways, options.quick, options.rows) for name in options.questions}
    where = environment("memory.py", arguments)
    if where["device"].startswith("sim"):
        where["link_bytes_per_s"] = None  # a simulated link has no speed of its own
    result = {"environment": where, "rows": rows}
    text = memory_report.document(result, QUESTIONS)
    if options.out is not None:
        options.out.write_text(text)
    if options.picture is not None:
        memory_report.picture(rows, QUESTIONS, result["environment"]["device"], options.picture)
    print(text)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
