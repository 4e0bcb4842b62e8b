"""What a training says by default: one line, signed, whatever the program has set up."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import transformers as hf

import hf_l2l.log
from training import l2l_trainer

PROGRAM = """
import sys
sys.path.insert(0, {helpers!r})
{before}
from training import l2l_trainer
l2l_trainer({folder!r}, max_steps=1).train()
"""


def said(folder: Path, before: str = "") -> list[str]:
    """The lines about layers on stderr of a program that trains after `before`."""
    code = PROGRAM.format(helpers=str(Path(__file__).parents[1] / "helpers"), before=before, folder=str(folder))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return [line for line in ran.stderr.splitlines() if "hf_l2l" in line]


ON_THE_CPU = "no accelerator: trains on the CPU, as Trainer would"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", f"[hf_l2l] {ON_THE_CPU}"),
        ("import logging; logging.basicConfig(format='%(name)s - %(message)s')", f"hf_l2l - {ON_THE_CPU}"),
        ("import transformers; transformers.logging.set_verbosity_error()", None),
    ],
)
def test_one_line_says_what_runs(before, expected, tmp_path):
    assert said(tmp_path, before) == ([] if expected is None else [expected])


def test_details_are_for_those_who_ask(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "hf_l2l"):
        l2l_trainer(tmp_path / "a", max_steps=1).train()
    assert "Layer-to-layer execution" not in caplog.text
    hf.logging.set_verbosity_info()
    try:
        assert hf_l2l.log.details_are_shown()
        with caplog.at_level(logging.INFO, "hf_l2l"):
            l2l_trainer(tmp_path / "b", max_steps=1).train()
    finally:
        hf.logging.set_verbosity_warning()
    assert "Layer-to-layer execution" in caplog.text
    assert {record.name for record in caplog.records if "ayer" in record.getMessage()} == {"hf_l2l"}
