"""Figures of the hardware are written as JSON and read back, and what is no such object is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hf_l2l.probe.figures import HardwareFigures

OF_A_GPU = HardwareFigures(
    device_name="a GPU",
    device_memory_bytes=80 * 2**30,
    link_up=5e10,
    link_down=4.5e10,
    link_up_both=4e10,
    link_down_both=3.5e10,
    dram=1e11,
    adamw_by_threads={1: 5e8, 8: 2e9},
    flops={"fp32": 5e13, "bf16": 7e14},
    page_locked=True,
    pageable={"up": 5e9, "down": 4e9, "up_both": 3e9, "down_both": 3e9},
)
OF_A_HOST = HardwareFigures("a processor", None, None, None, None, None, 1e10, {1: 1e8}, {"fp32": 1e11})


@pytest.mark.parametrize("figures", [OF_A_GPU, OF_A_HOST], ids=["gpu", "host"])
def test_json_gives_the_same_figures(figures):
    assert HardwareFigures.from_json(figures.to_json()) == figures


def test_the_output_of_env_is_read():
    text = json.dumps({"versions": {}, "probe": json.loads(OF_A_GPU.to_json())})
    assert HardwareFigures.from_json(text) == OF_A_GPU
    with pytest.raises(ValueError, match="must have the fields"):  # of a run without --probe
        HardwareFigures.from_json(json.dumps({"versions": {}, "probe": None}))


def test_json_has_the_names_of_the_fields():
    assert list(json.loads(OF_A_GPU.to_json())) == [each.name for each in dataclasses.fields(HardwareFigures)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dram": "fast"}, "dram must be a rate per second, above 0 and finite (got 'fast')"),
        ({"dram": 0}, "dram must be a rate per second, above 0 and finite (got 0)"),
        ({"dram": True}, "(got True)"),
        ({"link_up": -1.0}, "link_up must be a rate"),
        ({"flops": [1]}, "flops must be an object of rates by name (got [1])"),
        ({"flops": {"fp32": None}}, "flops must be a rate per second, above 0 and finite (got None)"),
        ({"adamw_by_threads": {"few": 1e9}}, "numbers of threads of at least 1 (got 'few')"),
        ({"page_locked": 1}, "page_locked must be true, false or null (got 1)"),
        ({"speed": 1}, "(got an unknown speed)"),
    ],
)
def test_other_values_are_refused(change, said):
    text = json.dumps({**json.loads(OF_A_GPU.to_json()), **change})
    with pytest.raises(ValueError) as error:
        HardwareFigures.from_json(text)
    assert said in str(error.value) and str(error.value).endswith("write them with: hf-l2l env --probe --json")


def test_missing_fields_are_refused():
    with pytest.raises(ValueError, match=r"\(got an unknown speed and no dram\)"):
        found = {**json.loads(OF_A_GPU.to_json()), "speed": 1}
        found.pop("dram")
        HardwareFigures.from_json(json.dumps(found))


@pytest.mark.parametrize(("text", "said"), [("{", "must be JSON"), ("[]", "must be a JSON object")])
def test_other_texts_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        HardwareFigures.from_json(text)
