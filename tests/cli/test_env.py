"""`hf-l2l env`: a report of the machine that needs no transformers, names what fails, and tells no secrets."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import version

import pytest

import hf_l2l
from cli_models import ran, refused
from hf_l2l import surroundings
from hf_l2l.cli import env
from hf_l2l.memory import host_limits
from hf_l2l.probe import rates
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.probe.rates import Sizes

PARTS = ["versions", "unsupported", "system", "devices", "page_locking", "host", "variables", "probe"]


def test_the_report(capsys):
    found = ran(capsys, "env", "--json").json
    assert list(found) == PARTS
    assert found["versions"]["torch"] == version("torch") and found["versions"]["hf_l2l"] == hf_l2l.__version__
    assert found["unsupported"] is None and found["probe"] is None
    assert found["devices"] == [] and found["page_locking"]["works"] is None
    assert found["host"]["usable_cores"] <= found["host"]["cores"]
    assert 0 < found["host"]["available_bytes"] <= found["host"]["total_bytes"]


def test_the_text(capsys):
    text = ran(capsys, "env").out
    assert f"\n  torch: {version('torch')}\n" in text
    assert "devices:\n  none: layers run on the CPU\n" in text
    assert "\n  total: " in text and "GiB\n" in text and "probe:" not in text


def test_packages_that_are_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(surroundings, "PACKAGES", ("torch", "surely-not-installed"))
    assert ran(capsys, "env", "--json").json["versions"]["surely-not-installed"] is None
    assert "\n  surely-not-installed: -\n" in ran(capsys, "env").out


def test_versions_that_are_not_supported(monkeypatch, capsys):
    """Other commands refuse them."""
    monkeypatch.setattr(hf_l2l, "_TESTED", {"torch": ("98", "99")})
    assert "needs torch 98 or newer" in ran(capsys, "env", "--json").json["unsupported"]
    assert "unsupported:\n  hf_l2l" in ran(capsys, "env").out


def test_a_part_that_fails_does_not_end_the_report(monkeypatch, capsys):
    def broken():
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(surroundings, "devices", broken)
    found = ran(capsys, "env", "--json")
    assert found.status == 0 and found.json["devices"] == "failed: RuntimeError: the driver is gone"
    assert "devices:\n  failed: RuntimeError: the driver is gone\n" in ran(capsys, "env").out


def test_variables_without_secrets():
    given = {
        "HF_HOME": "folder",
        "HF_TOKEN": "hf_abc",
        "HF_API_KEY": "abc",
        "HF_ENDPOINT": "https://me:word@mirror/x",
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "4",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_L2L_SKIP_MEMORY_CHECK": "1",
        "CUDA_SECRET": "s",
        "HF_password": "p",
        "PATH": "/bin",
    }
    assert surroundings.variables(given) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "HF_ENDPOINT": "https://***@mirror/x",
        "HF_HOME": "folder",
        "HF_L2L_SKIP_MEMORY_CHECK": "1",
        "OMP_NUM_THREADS": "4",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def test_a_token_is_nowhere(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    assert "hf_very_secret" not in ran(capsys, "env").out + ran(capsys, "env", "--json").out


def test_the_revision_of_a_checkout(tmp_path):
    assert surroundings._revision(tmp_path) is None

    def git(*words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *names, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    (tmp_path / "hf_l2l").mkdir()
    (tmp_path / "hf_l2l" / "a.py").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "--short=12", "HEAD")
    assert surroundings._revision(tmp_path) == head
    (tmp_path / "hf_l2l" / "a.py").write_text("2")
    assert surroundings._revision(tmp_path) == f"{head}+"


def test_the_probe(monkeypatch, capsys):
    """Its figures can be read again."""
    monkeypatch.setattr(rates, "Sizes", lambda: Sizes(2**16, 2**10, 64, 0.0))
    found = ran(capsys, "env", "--probe", "--json")
    figures = HardwareFigures.from_json(found.out)
    assert figures.link_up is None and figures.dram > 0
    assert json.loads(figures.to_json()) == found.json["probe"]
    text = ran(capsys, "env", "--probe", "--device", "cpu").out
    assert " FLOP/s" in text and " parameters/s" in text and "\n  link_up: -\n" in text


def test_flags_that_contradict(capsys):
    said = refused(capsys, "env", "--device", "cpu")
    assert "--device names the device that --probe measures (got --device cpu without --probe)" in said


def test_a_device_that_is_not_there(capsys):
    assert "must be one this machine has (got cuda:7)" in refused(capsys, "env", "--probe", "--device", "cuda:7")
    assert "device must name a torch device (got 'gpu'" in refused(capsys, "env", "--probe", "--device", "gpu")


def test_sizes_and_rates_are_text():
    part = {"total_bytes": 2**30, "limit_bytes": None, "dram": 2.5e9, "flops": {"fp32": 1e12}, "adamw_by_threads": {}}
    assert list(env._pairs(part)) == [
        "total: 1.0 GiB",
        "limit: -",
        "dram: 2.5 G bytes/s",
        "flops: fp32 1.0 T FLOP/s",
        "adamw_by_threads: -",
    ]


# ---- limits of the process


@pytest.mark.parametrize(
    ("text", "number"), [("max", None), (str(2**63 - 4096), None), ("1048576", 2**20), ("", None)]
)
def test_the_limit_of_a_control_group(tmp_path, monkeypatch, text, number):
    (tmp_path / "memory.max").write_text(text)
    groups = [(tmp_path, "memory.max", ""), (tmp_path / "none", "memory.max", "")]
    monkeypatch.setattr(host_limits, "_control_groups", lambda: iter(groups))
    assert host_limits.group_bytes() == number


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("", None)])
def test_the_cores_of_a_control_group(tmp_path, monkeypatch, text, cores):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(host_limits, "_control_groups", lambda: iter([(tmp_path, "memory.max", "")]))
    assert host_limits.group_cores() == cores


def test_limits_of_locked_memory(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert surroundings.page_locking()["limit_bytes"] is None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**16, 2**20))
    assert surroundings.page_locking()["limit_bytes"] == 2**16
