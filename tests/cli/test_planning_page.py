"""docs/planning.md has what its commands print, and its sentences have the figures of the plans."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_models import ran
from hf_l2l.scale import HARDWARE, Cluster, Method, TransformerShape, Usage, fastest
from hf_l2l.scale.curves import arranged
from hf_l2l.scale.hardware import GIB
from hf_l2l.scale.planner import DAY_S, YEAR_S

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "planning.md").read_text()
PROSE = " ".join(re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL).split())
BLOCKS = re.findall(r"```bash\nhf-l2l (.*?)\n```\n\n```text\n(.*?)\n```", PAGE, re.DOTALL)
A100 = Cluster(HARDWARE["a100"])


def test_every_command_has_its_output():
    assert PAGE.count("```bash") == len(BLOCKS) >= 9


@pytest.mark.parametrize(("command", "printed"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_the_output_is_that_of_the_command(command, printed, capsys):
    found = ran(capsys, *shlex.split(command))
    assert (found.out or found.err).partition("\n\nDevices and links")[0].rstrip() == printed


def first(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    plan: dict[str, Any] = ran(capsys, "plan", *given, "--json").json["plans"][0]
    return plan


def test_sentences_on_the_cluster(capsys):
    a100 = first(capsys, "X160", "--parallelism", "3d")
    memory = {name: size / GIB for name, size in a100["memory"].items()}
    days = a100["seconds"] / DAY_S
    assert f"{days:.1f} days on {a100['devices']:,} devices, which compute for {a100['efficiency']:.2f} of" in PROSE
    assert f"{a100['data']} instances of the model have {a100['micro_batches']} rows each" in PROSE
    assert f"pass through {a100['pipeline']} stages of {a100['tensor']} devices" in PROSE
    assert (
        f"{memory['resident']:.2f} GiB for buffers and activations, and {memory['offloadable']:.2f} GiB for" in PROSE
    )
    h200 = first(capsys, "X160", "--parallelism", "3d", "--hardware", "h200")
    assert f"{h200['seconds'] / DAY_S:.1f} days on {h200['devices']:,} devices. An H200 has" in PROSE
    assert f"has {HARDWARE['h200'].peak_flops / HARDWARE['a100'].peak_flops:.1f} times the peak" in PROSE
    assert HARDWARE["h200"].network == 2 * HARDWARE["a100"].network and HARDWARE["h200"].node_size == 8
    half = first(capsys, "X160", "--method", "improved", "--parallelism", "3d", "--days", "180")
    assert f"Half a year instead of a week takes {half['devices']:,} devices" in PROSE


def test_sentences_on_one_card(capsys):
    given = ["--method", "l2l", "--parallelism", "none", "--hardware", "h200"]
    plan = first(capsys, "X160", *given)
    size = plan["in_host_memory"] / GIB
    assert f"{plan['seconds'] / YEAR_S:.0f} years, and {size:,.0f} GiB of host memory" in PROSE
    assert plan["memory"]["state"] == 18 * TransformerShape.family(160).parameters
    scratch = first(capsys, "X100", *given, "--host-memory", "2TiB")
    assert f"From scratch, it takes {scratch['seconds'] / YEAR_S:.1f} years" in PROSE
    assert 18 * TransformerShape.family(102).parameters > 2048 * GIB, "the next larger one does not fit"
    tuning = first(capsys, "X100", *given, "--host-memory", "2TiB", "--steps", "1000")
    assert f"takes {tuning['seconds'] / DAY_S:.0f} days" in PROSE


def test_sentences_on_the_desk(capsys):
    given = ["X50", "--method", "l2l", "--parallelism", "none", "--hardware", "rtx4090", "--host-memory", "64GiB"]
    plan, few = first(capsys, *given), first(capsys, *given, "--batch", "8")
    days = plan["seconds"] / DAY_S
    assert f"{days:.0f} days from scratch, or {days / 100:.1f} for 1000 steps" in PROSE
    assert f"from {plan['micro_batches']} rows of 800 tokens on" in PROSE and plan["micro_batch"] == 1
    assert f"the training takes {few['seconds'] / DAY_S:.0f} days" in PROSE and few["overheads"]["update"] > 0
    state = 18 * TransformerShape.family(64).parameters / GIB
    assert f"its state takes {state:.0f} GiB" in PROSE


def largest(cluster: Cluster, holds: Callable[[Usage], bool]) -> Usage:
    usages = (arranged(TransformerShape.family(x), cluster, Method.IMPROVED) for x in range(1000, 20, -2))
    return next(usage for usage in usages if holds(usage))


def test_the_table_of_what_differs():
    any_node, x160 = Cluster(HARDWARE["a100"], node_size=10**6), TransformerShape.family(160)
    year = largest(A100, lambda usage: usage.seconds() <= YEAR_S)
    sizes = [
        year,
        largest(A100, lambda usage: usage.memory.resident <= 80 * GIB),
        largest(A100, lambda usage: usage.memory.total <= 80 * GIB),
        largest(any_node, lambda usage: usage.seconds() <= 30 * DAY_S),
        largest(any_node, lambda usage: usage.seconds() <= YEAR_S),
    ]
    a_year, offloaded, held, month_5, year_5 = (f"{usage.shape.parameters / 1e12:.0f}" for usage in sizes)
    ethernet = Cluster(HARDWARE["a100"], network=6.25)
    slower = [arranged(x160, each, Method.IMPROVED).seconds() for each in (ethernet, A100)]
    computed = [a_year, f"{year.memory.total / GIB:.0f}", offloaded, held, f"{month_5}, {year_5}"]
    rows = re.findall(r"^\| (?:figure|section) .* \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == [*computed, f"{slower[0] / slower[1] - 1:.0%}".replace("%", " %")]
    plans = [fastest(x160, each).seconds for each in (ethernet, A100)]
    assert f"of plans, {plans[0] / plans[1] - 1:.0%}".replace("%", " %") in PROSE


def test_the_picture():
    assert "(planning.png)" in PAGE and (DOCS / "planning.png").read_bytes().startswith(b"\x89PNG")
    assert (DOCS / "planning.png").stat().st_size < 200_000
