"""`hf-l2l env`: a report of the machine that names what fails, and tells no secrets."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import version

import hf_l2l
from cli_models import ran, refused
from hf_l2l import surroundings
from hf_l2l.probe import rates
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.probe.rates import Sizes

PARTS = ["versions", "unsupported", "system", "devices", "page_locking", "host", "variables", "probe"]


def test_the_report(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.setattr(surroundings, "PACKAGES", ("torch", "hf_l2l", "surely-not-installed"))
    told = ran(capsys, "env", "--json")
    found = told.json
    assert list(found) == PARTS
    assert found["versions"]["torch"] == version("torch") and found["versions"]["hf_l2l"] == hf_l2l.__version__
    assert found["versions"]["surely-not-installed"] is None
    assert found["unsupported"] is None and found["probe"] is None
    assert 0 < found["host"]["available_bytes"] <= found["host"]["total_bytes"]
    text = ran(capsys, "env").out
    assert f"\n  torch: {version('torch')}\n" in text and "\n  surely-not-installed: -\n" in text
    assert "devices:\n  none: layers run on the CPU\n" in text and "probe:" not in text
    assert "hf_very_secret" not in text + told.out


def test_what_is_not_supported_or_fails_does_not_end_the_report(monkeypatch, capsys):
    """Other commands refuse such versions."""

    def broken():
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(hf_l2l, "TESTED", {"torch": ("98", "99")})
    monkeypatch.setattr(surroundings, "devices", broken)
    found = ran(capsys, "env", "--json")
    assert "needs torch 98 or newer" in found.json["unsupported"]
    assert found.status == 0 and found.json["devices"] == "failed: RuntimeError: the driver is gone"


def test_variables_without_secrets():
    told = {
        "CUDA_VISIBLE_DEVICES": "0",
        "HF_HOME": "folder",
        "HF_L2L_SKIP_MEMORY_CHECK": "1",
        "OMP_NUM_THREADS": "4",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    secret = {"HF_TOKEN": "hf_abc", "HF_API_KEY": "abc", "CUDA_SECRET": "s", "HF_password": "p", "PATH": "/bin"}
    given = {**told, **secret, "HF_ENDPOINT": "https://me:word@mirror/x"}
    assert surroundings.variables(given) == {**told, "HF_ENDPOINT": "https://***@mirror/x"}


def test_the_revision_of_a_checkout(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *names, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    package = tmp_path / "hf_l2l"
    package.mkdir()
    (package / "a.py").write_text("1")
    monkeypatch.setattr(surroundings, "__file__", str(package / "surroundings.py"))
    assert surroundings.versions()["revision"] is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "--short=12", "HEAD")
    assert surroundings.versions()["revision"] == head
    (package / "a.py").write_text("2")
    assert surroundings.versions()["revision"] == f"{head}+"


def test_the_probe(monkeypatch, capsys):
    """Its figures can be read again; a device that is not there is refused."""
    monkeypatch.setattr(rates, "Sizes", lambda: Sizes(2**16, 2**10, 64, 0.0))
    found = ran(capsys, "env", "--probe", "--json")
    figures = HardwareFigures.from_json(found.out)
    assert figures.link_up is None and figures.dram > 0
    assert json.loads(figures.to_json()) == found.json["probe"]
    text = ran(capsys, "env", "--probe", "--device", "cpu").out
    assert " FLOP/s" in text and " parameters/s" in text and "\n  link_up: -\n" in text
    assert "one this machine has (got cuda:7)" in refused(capsys, "env", "--probe", "--device", "cuda:7")
