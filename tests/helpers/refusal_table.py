"""docs/settings.md: what is refused, and what to do. It is made of what the code raises when each case is provoked.

    PYTHONPATH=. python tests/helpers/refusal_table.py

writes it. It needs the package datasets, and a process without another accelerator, since the cases run on the
simulated one.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from hf_l2l.testing import enable_simulated_accelerator

if __name__ == "__main__":
    enable_simulated_accelerator()  # before any backward

from refusal_commands import ESTIMATE, ESTIMATE_WARNINGS, PROGRAM, SCRIPT, SCRIPT_WARNINGS
from refusal_models import DEVICES, MODELS, OPTIMIZERS, WARNINGS
from refusal_settings import CALLBACKS, NOISE, NOISE_WARNINGS, OURS_TOGETHER, VALUES_AND_NAMES, WITH_THE_TRAINER
from refusals import Case, Found, Rows, parts_of, provoke

HAS_DATASETS = importlib.util.find_spec("datasets") is not None
PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
INTRODUCTION = """\
# What is refused, and what to do

Every setting is checked where it is made, and every combination as soon as all of it is known: before a tensor of a
weight's size is allocated or moved, unless the row says "late". An error has the rule, the value received, and the
remedy; the tables leave out the value. It names options as they were typed: here as the Trainer's arguments do
(`l2l_boundary`, on the command line `--l2l_boundary`), and `boundary` for `L2LConfig(boundary=...)`. It is a
`ValueError`; for an option that does not exist a `TypeError`, on a command line the parser's own error; and for a host
without memory a `MemoryError`. If training is possible without a setting, it runs without it, with one warning.

Each row was provoked, on the simulated accelerator `sim:0`. `PYTHONPATH=. python tests/helpers/refusal_table.py`
writes this page, and a test compares it with what the code says.
"""


def _cases(rows: Rows) -> list[Case]:
    return [
        replace(each, typed=typed) if isinstance(each, Case) else Case(typed, each) for typed, each in rows.items()
    ]


_ERRORS: dict[str, Rows] = {
    "Values and names of options": VALUES_AND_NAMES,
    "Options of L2L with each other": OURS_TOGETHER,
    "With transformers' Trainer and launchers": WITH_THE_TRAINER,
    "Models": MODELS,
    "Devices and memory": DEVICES,
    "Optimizers": OPTIMIZERS,
    "`L2LCallback`": CALLBACKS,
    "The noise scale": NOISE,
    "`estimate`": ESTIMATE,
    "The program `hf-l2l`": PROGRAM,
}
_WARNED: dict[str, Rows] = {
    "Warnings: what is turned off, chosen, or without effect": WARNINGS | NOISE_WARNINGS | ESTIMATE_WARNINGS,
}
if HAS_DATASETS:  # without it, the script does not look at its options
    _ERRORS["The script `run_glue_l2l.py`"] = SCRIPT
    _WARNED["Warnings of `run_glue_l2l.py`"] = SCRIPT_WARNINGS
ERRORS = {title: _cases(rows) for title, rows in _ERRORS.items()}
WARNED = {title: _cases(rows) for title, rows in _WARNED.items()}


@cache
def found(case: Case) -> Found:
    """What a case raises, provoked once."""
    with tempfile.TemporaryDirectory() as folder:
        return provoke(case, Path(folder))


def row(case: Case, is_error: bool) -> str:
    """The line of a case: what an error has as rule and remedy, or all that a warning says."""
    text = found(case).message
    text = re.sub(case.varies, "...", text) if case.varies else text
    cells = [re.sub(r"(__|[|*<])", _escaped, cell) for cell in (parts_of(text)[::2] if is_error else (text,))]
    return _line(case.typed if case.is_early else f"{case.typed} (late)", *cells)


def page() -> str:
    """The text of the page."""
    errors = (_section(*each, "rule", "what to do") for each in ERRORS.items())
    warned = (_section(*each, "what the warning says") for each in WARNED.items())
    return "\n".join([INTRODUCTION, *errors, *warned])


def _section(title: str, cases: list[Case], *columns: str) -> str:
    head = ["what is typed", *columns]
    rows = [row(case, is_error=len(columns) == 2) for case in cases]
    return "\n".join([f"## {title}", "", _line(*head), f"|{'|'.join(['---'] * len(head))}|", *rows, ""])


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(found: re.Match[str]) -> str:
    return "".join(f"\\{each}" for each in found[1])


if __name__ == "__main__":
    assert HAS_DATASETS, "the page would lack the sections of the script"
    PAGE.write_text(page(), encoding="utf-8")
