"""The package imports fast, says which versions it needs, and has the names it promises."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf_l2l

ROOT = Path(__file__).parent.parent
NAMES = [
    "EagerParamServer",
    "EngineFailedError",
    "L2LArgumentsMixin",
    "L2LBatchGrowth",
    "L2LCallback",
    "L2LConfig",
    "L2LTrainer",
    "L2LTrainerMixin",
    "L2LTrainingArguments",
    "Lamb",
    "NonFiniteError",
    "RankFailedError",
    "attach_l2l",
    "copy_as",
    "detach_l2l",
    "estimate",
    "load_once",
    "make_l2l_arguments",
    "make_l2l_trainer",
]


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_public_names():
    assert sorted(hf_l2l.__all__) == NAMES
    for name in NAMES:
        assert callable(getattr(hf_l2l, name)), name
    assert hf_l2l.L2LTrainer is importlib.import_module("hf_l2l.hf.trainer").L2LTrainer
    assert hf_l2l.L2LTrainingArguments is importlib.import_module("hf_l2l.hf.training_args").L2LTrainingArguments


def test_star_import_brings_the_public_names():
    names: dict[str, object] = {}
    exec("from hf_l2l import *", names)
    assert sorted(names.keys() - {"__builtins__"}) == NAMES


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'hf_l2l' has no attribute 'L2LTrianer'"):
        _ = hf_l2l.L2LTrianer
    with pytest.raises(ImportError, match="cannot import name 'L2LTrianer'"):
        from hf_l2l import L2LTrianer  # noqa: F401


def test_importing_the_package_is_light():
    heavy = ["transformers.trainer", "transformers.training_args", "datasets", "evaluate", "hf_l2l.testing"]
    code = f"import sys, hf_l2l; print([name for name in {heavy} if name in sys.modules])"
    assert run(code) == "[]"


def test_the_package_alone_imports_nothing():
    """So that `hf-l2l env` says what is installed, whatever of it is broken."""
    code = (
        "import sys, hf_l2l; print([name for name in ('torch', 'transformers', 'accelerate') if name in sys.modules])"
    )
    assert run(code) == "[]"


# ---- versions


def test_versions_are_checked_when_a_name_is_first_used():
    code = """
import sys, hf_l2l
hf_l2l._TESTED = {"torch": ("98", "99")}
try:
    from hf_l2l import L2LConfig
except ImportError as error:
    print(error, "torch" in sys.modules)
"""
    assert run(code).startswith("hf_l2l 0.1.0 needs torch 98 or newer (found ")
    assert run(code).endswith(" False")


def test_tested_versions_pass(recwarn):
    hf_l2l._check_versions(hf_l2l._TESTED)
    hf_l2l._check_versions({})
    assert not recwarn


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_an_older_version_is_refused_in_one_sentence(package):
    with pytest.raises(ImportError) as error:
        hf_l2l._check_versions({package: ("98.0", "99.0")})
    assert str(error.value) == (
        f"hf_l2l {hf_l2l.__version__} needs {package} 98.0 or newer (found {version(package)}); install one with: pip "
        f"install '{package}>=98.0'"
    )


def test_versions_are_numbers(monkeypatch):
    found = {"torch": "2.11"}
    monkeypatch.setattr(hf_l2l, "_version", found.__getitem__)
    hf_l2l._check_versions({"torch": ("2.11", "2.13")})
    found["torch"] = "2.9"
    with pytest.raises(ImportError, match=r"\(found 2\.9\)"):
        hf_l2l._check_versions({"torch": ("2.11", "2.13")})


def test_a_newer_version_is_tried_with_one_warning(monkeypatch):
    found = {"torch": "2.13.1+cpu"}
    monkeypatch.setattr(hf_l2l, "_version", found.__getitem__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_l2l._check_versions({"torch": ("2.11", "2.13")})
    found["torch"] = "2.14.0"
    hf_l2l._warn_once.cache_clear()
    with pytest.warns(
        UserWarning,
        match=r"not been tested with torch 2\.14\.0 \(tested: 2\.11 to 2\.13\), Python 3\.99 .*"
        r"something fails: pip install 'torch==2\.13\.\*', and use Python 3\.13",
    ):
        hf_l2l._check_versions({"torch": ("2.11", "2.13")}, python=(3, 99))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_l2l._check_versions({"torch": ("2.11", "2.13")}, python=(3, 99))


def test_the_lowest_versions_are_those_the_package_is_installed_with():
    requirements = (ROOT / "pyproject.toml").read_text()
    for package, (lowest, _) in hf_l2l._TESTED.items():
        assert f'"{package}>={lowest}"' in requirements
    assert f'version = "{hf_l2l.__version__}"' in requirements
    assert torch.__version__.startswith(version("torch").split("+")[0])


# ---- on a machine with a GPU


def commands(target: str) -> list[str]:
    """The calls of pytest that a target of the Makefile makes."""
    done = subprocess.run(
        ["make", "-n", "-o", ".venv/ready", "-o", ".venv-oldest/ready", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if " -m pytest " in line]


def test_tests_and_what_they_start_see_no_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    for target in ("test", "test-all", "test-oldest"):
        assert len(commands(target)) == 2
        assert all("CUDA_VISIBLE_DEVICES= " in command for command in commands(target))


def test_tests_of_the_gpu_see_it(monkeypatch, pytestconfig):
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    [command] = commands("test-gpu")
    words = command.split()
    asked = words[words.index("-m", words.index("pytest")) + 1]
    assert "CUDA_VISIBLE_DEVICES" not in command
    hiding = ("not slow and not gpu", "not (slow or gpu)", "not (gpu)", "not slow", "slow", "")
    for marks, seen in [(asked, "3"), ("gpu and not slow", "3"), *((marks, "") for marks in hiding)]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        conftest.pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr=marks)))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
