"""The package imports fast, says which versions it needs, has the names it promises, and is packed whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import warnings
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import hf_l2l
from tiers import more, nightly

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_public_names():
    names: dict[str, object] = {}
    exec("from hf_l2l import *", names)
    assert names.keys() - {"__builtins__"} == set(hf_l2l.__all__)
    with pytest.raises(ImportError, match="cannot import name 'L2LTrianer'"):
        from hf_l2l import L2LTrianer  # noqa: F401


FRESH = """
import sys, hf_l2l
heavy = ["torch", "transformers", "accelerate", "transformers.trainer", "transformers.training_args", "datasets"]
print([name for name in [*heavy, "evaluate", "hf_l2l.testing"] if name in sys.modules])
hf_l2l.TESTED = {"torch": ("98", "99")}
try:
    from hf_l2l import L2LConfig
except ImportError as error:
    print(error)
print("torch" in sys.modules)
"""


def test_importing_the_package_imports_nothing_else_and_versions_are_checked_at_the_first_name():
    """So that `hf-l2l env` says what is installed, whatever of it is broken."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", FRESH], env=env, capture_output=True, text=True, check=True)
    imported, refused, has_torch = ran.stdout.splitlines()
    assert (imported, has_torch) == ("[]", "False")
    assert refused.startswith(f"hf_l2l {hf_l2l.__version__} needs torch 98 or newer (found ")


def test_an_older_version_is_refused_and_a_newer_one_tried_with_one_warning():
    """They are compared as numbers."""
    found = version("torch")
    with pytest.raises(ImportError, match=re.escape(f"(found {found})") + ".*pip install 'torch>=2.100'"):
        hf_l2l.check_versions({"torch": ("2.100", "2.101")})
    tested = rf"torch {re.escape(found)} \(tested: 2\.8 to 2\.9\), Python 3\.99 "
    with pytest.warns(UserWarning, match=tested + r".*pip install 'torch==2\.9\.\*', and use Py"):
        hf_l2l.check_versions({"torch": ("2.8", "2.9")}, python=(3, 99))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_l2l.check_versions({"torch": ("2.8", "2.9")}, python=(3, 99))
        hf_l2l.check_versions(hf_l2l.TESTED)
        own = ".".join(found.split(".")[:2])  # its third number does not matter, nor what follows
        hf_l2l.check_versions({"torch": ("2.8", own)})


def test_versions_and_addresses_are_the_same_everywhere():
    requirements = (ROOT / "pyproject.toml").read_text()
    for package, (lowest, _) in hf_l2l.TESTED.items():
        assert f'"{package}>={lowest}"' in requirements
    assert PROJECT["version"] == hf_l2l.__version__ and version("torch")
    versions = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert versions == ["3.11", "3.12", "3.13"] and PROJECT["requires-python"] == ">=3.11"
    assert "v >= (3, 11) or" in (ROOT / "Makefile").read_text(encoding="utf-8")
    # Links of the README lead somewhere on the index, too, where no file of the project lies beside it.
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    home = PROJECT["urls"]["Repository"]
    raw = f"{home}/main/".replace("github.com", "raw.githubusercontent.com")
    places = (f"{home}/blob/main/", f"{home}/tree/main/", raw)
    assert all(link.startswith(places if "github" in link else "https:") for link in links)


def test_tests_and_what_they_start_see_no_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    tests = [f"{name}-on-{device}" for name in ("test", "test-all", "test-oldest") for device in ("cpu", "sim")]
    call = ["make", "-n", "-o", ".venv/ready", "-o", ".venv-oldest/ready"]
    for targets, is_hidden in ((tests, True), (["test-gpu"], False)):
        done = subprocess.run([*call, *targets], cwd=ROOT, capture_output=True, text=True, check=True)
        commands = [line for line in done.stdout.splitlines() if " -m pytest " in line]
        assert len(commands) >= len(targets)
        assert all(("CUDA_VISIBLE_DEVICES= " in each) == is_hidden for each in commands)


@pytest.mark.parametrize(
    ("target", "variable"), [("demo", "VENV"), *more(("test-oldest", "OLDEST"), ("docs", "DOCS"))]
)
def test_make_refuses_another_python_before_it_downloads(target, variable, tmp_path):
    for minor, is_refused in ((10, True), (11, False)):
        python = tmp_path / "python"
        program = f"import sys; sys.version_info = (3, {minor}, 0); exec(sys.argv[2])"
        # What follows the check, `python -m venv`, fails, so that nothing is downloaded.
        other = 'echo "made an environment"; exit 3'
        python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || {{ {other}; }}\nexec {sys.executable} -c "{program}" "$@"\n')
        python.chmod(0o755)
        call = ["make", "-s", "-C", str(ROOT), f"PYTHON={python}", f"{variable}={tmp_path / 'venv'}", target]
        ran = subprocess.run(call, capture_output=True, text=True, timeout=60)
        assert ran.returncode != 0 and not (tmp_path / "venv").exists()
        assert ("made an environment" in ran.stdout) != is_refused
        assert (f"needs Python 3.11 or newer ({python} is 3.{minor})" in ran.stderr) == is_refused


# ---- what is packed

NOT_PACKED = shutil.ignore_patterns(
    *(".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "*.pyc", "PKG-INFO", "setup.cfg"),
    *("build", "dist", "site", "output", "*_output", "tmp_trainer", "soak_results", "gpu_rehearsal"),
)
"""What is no part of the project: made by its tools, or by its build."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, set[str]]:
    """The source distribution and the wheel, as pip and `python -m build` make them, and the files before."""
    folder = tmp_path_factory.mktemp("packed")
    tree = Path(shutil.copytree(ROOT, folder / "project", ignore=NOT_PACKED))
    files = {str(file.relative_to(tree)) for file in tree.rglob("*") if file.is_file()}
    calls = "; ".join(f"print(b.build_{kind}({str(folder)!r}))" for kind in ("sdist", "wheel"))
    call = [sys.executable, "-c", f"import setuptools.build_meta as b; {calls}"]
    ran = subprocess.run(call, cwd=tree, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    sdist, wheel = (line for line in ran.stdout.splitlines() if line.endswith((".tar.gz", ".whl")) and " " not in line)
    return folder / sdist, folder / wheel, files


def test_source_distribution_and_wheel_have_every_file(built):
    sdist, wheel, files = built
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert sorted(files - names) == []
    assert {"run_glue_l2l.py", "tests/conftest.py", "tests/helpers/training.py", "Makefile", ".ci/run"} <= names
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
        [entries] = [name for name in packed.namelist() if name.endswith("/entry_points.txt")]
        assert "hf-l2l = hf_l2l.cli.main:main" in packed.read(entries).decode()
    assert names == {name for name in files if name.startswith("hf_l2l/")} | {"run_glue_l2l.py"}


FROM_THE_WHEEL = """
import contextlib, runpy, sys
import hf_l2l.demo
for module, *words in (["run_glue_l2l", "--help"], ["hf_l2l", "plan", "X50", "--parallelism", "none"]):
    sys.argv = [module, *words]
    with contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__")
print(*hf_l2l.demo.demo_files().values())
"""


@nightly
def test_the_wheel_and_the_tests_of_the_source_distribution_run(built, tmp_path):
    sdist, wheel, _ = built
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path / "sdist", filter="data")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "wheel")
    [project] = (tmp_path / "sdist").iterdir()
    tests = ["-m", "pytest", "-q", "-n", "0", "tests/test_architecture.py", "tests/programs/test_main.py"]
    for words, folder in ((["-c", FROM_THE_WHEEL], tmp_path / "wheel"), (tests, project)):
        env = {**os.environ, "PYTHONPATH": str(folder), "L2L_TESTS": ""}
        call = [sys.executable, *words]
        ran = subprocess.run(call, cwd=folder, env=env, capture_output=True, text=True, timeout=580)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert " passed" in ran.stdout or ("--ubatch_size" in ran.stdout and "X50: " in ran.stdout)
