"""Tiny configs in folders, and calls of `hf-l2l`, for the tests of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hf_l2l.cli.main import main

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "vocab_size": 50,
}


def written(folder: Path, content: dict[str, Any], **changes: Any) -> str:
    """A folder with this config, and these changes; a change to None leaves the field out."""
    fields = {name: value for name, value in {**content, **changes}.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


class Ran(NamedTuple):
    """What a call of the program gave."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """What it printed, as one JSON object."""
        found: dict[str, Any] = json.loads(self.out)
        return found


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ran:
    """Call `hf-l2l` in this process."""
    status = main(arguments)
    out, err = capsys.readouterr()
    return Ran(status, out, err)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence with which a call is refused."""
    found = ran(capsys, *arguments)
    assert (found.status, found.out) == (2, "")
    assert found.err.startswith("hf-l2l") and found.err.count("\n") == 1 and "Traceback" not in found.err
    return found.err
