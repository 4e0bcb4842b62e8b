"""The results as lines of text, as a table in markdown, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec

import torch
import transformers

from hf_l2l.verify.cases import FEWER_ROWS, ROWS, UBATCH
from hf_l2l.verify.checks import ADAPTERS, CHECKS, LEARNING_RATE, Report
from hf_l2l.verify.comparisons import SMALL
from hf_l2l.verify.mixed import GRADIENT_ERROR, LOSS_ERROR, OF_PLAIN
from hf_l2l.verify.results import Result

FEWER = " and then ".join(str(rows) for rows in FEWER_ROWS)
MEANINGS = {
    "layers": "the stacks that are found: how many layers, of which classes",
    "gradients": f"loss and every gradient against plain torch: {ROWS} rows at once, without transfers; then {ROWS}, "
    f"and then {FEWER} rows through one attached model, {UBATCH} by {UBATCH}. Each gradient within 1e-10 of its "
    f"largest entry (or of {SMALL:g} of the largest entry of all, if that is more) in float64, 1e-6 where the model "
    "computes something in fp32 whatever its dtype, 1e-5 in fp32 where it fails in float64",
    "micro-batches": "whether each layer runs micro-batch by micro-batch; if not, a warning says the reason, as here. "
    "And whether buffers that layers write to depend on it",
    "boundary": 'as "gradients" in micro-batches, with `stash="host"` and `boundary="host"`: what passes between '
    "layers, and what is computed before and after them, is in host memory",
    "evaluation": "all outputs in evaluation mode, in micro-batches, without gradients and caches; the same tolerance",
    "generate": "four tokens, greedy, with a key-value cache: the same tokens, and logits within the same tolerance; "
    '"-" if the model does not generate',
    "LoRA": "peft, adapters on all linear modules: gradients of adapters as plain ones, within "
    f"{ADAPTERS:g} times the tolerance of gradients, and frozen weights without any",
    "saving": f"after a step (SGD, lr={LEARNING_RATE:g}, the rows at once): `save_pretrained` while attached and "
    "`from_pretrained` give, to the bit, what they give after `detach_l2l`; then weights, buffers, loss and gradients "
    "are those after a plain step, within the same tolerance",
    "bf16": f'`cmp="bf16"` against fp32: the loss within {LOSS_ERROR:g} of it, and gradients, all together in norm, '
    f"within {GRADIENT_ERROR:g}; or within {OF_PLAIN:g} times the error of the plain model that is loaded in bf16",
}


def line(report: Report) -> str:
    """One line for the screen, and one for each thing that is red or refused."""
    if report.status == "not run":
        return f"{report.family}: not run ({report.reason})"
    told: dict[str, list[str]] = {}
    for name, result in report.results.items():
        if result.status in ("red", "refused"):
            told.setdefault(result.text, []).append(name)
    first = f"{report.family}: {report.status} ({report.results['layers'].text})"
    return "\n".join([first, *(f"    {', '.join(names)}: {text}" for text, names in told.items())])


def summary(reports: Sequence[Report]) -> str:
    """How many families are green, refused, red and not run."""
    counts = Counter(report.status for report in reports)
    found = [f"{counts[status]} {status}" for status in ("green", "refused", "red", "not run")]
    return f"{len(reports)} families: {', '.join(found)}"


def as_json(reports: Sequence[Report]) -> str:
    """All results as a JSON object, with the versions."""
    families = {
        report.family: {
            "status": report.status,
            "checks": {name: {"status": r.status, "text": r.text} for name, r in report.results.items()},
        }
        for report in reports
    }
    return json.dumps({"versions": _versions(), "families": families}, indent=2)


def markdown(groups: Mapping[str, Sequence[Report]], command: str) -> str:
    """The page: what the columns mean, versions, the command, and a table for each kind of family.

    Args:
        groups: the reports by the kind of family.
        command: the command that wrote the page.
    """
    reports = [report for group in groups.values() for report in group]
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    page = [
        "# Which models run layer to layer",
        "",
        f"Tiny random models of {len(reports)} families, on {date.today().isoformat()}, with {versions}, on the CPU, "
        "to which weights and inputs are copied as to an accelerator. No accelerator was used:",
        "",
        "```bash",
        command,
        "```",
        "",
        f"{summary(reports)}. Refused: the engine says in one sentence what does not run layer to layer. "
        "What holds for a family holds for its sizes and heads; other options of its config may lead elsewhere, and "
        "the command takes names of families to check them again.",
        "",
        *(f"- **{name}**: {meaning}" for name, meaning in MEANINGS.items()),
        "",
    ]
    for kind, group in groups.items():
        columns = ["family", *CHECKS]
        page += [f"## {kind}", "", _row(columns), _row(["---"] * len(columns))]
        page += [_row([report.family, *_cells(report)]) for report in group]
        page.append("")
    return "\n".join(page)


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    return found | ({"peft": version("peft")} if find_spec("peft") else {})


def _cells(report: Report) -> list[str]:
    if not report.results:
        return [f"not run: {report.reason}", *[""] * (len(CHECKS) - 1)]
    return [_cell(report.results[name]) for name in CHECKS]


def _cell(result: Result) -> str:
    text = result.text.replace("|", "\\|").replace("<", "&lt;")
    return f"**{text}**" if result.status == "red" else text


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
