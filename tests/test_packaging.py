"""What `pip install .`, the wheel and the source distribution have, and what the index shows of them."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import hf_l2l

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_PACKED = shutil.ignore_patterns(
    *(".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "*.pyc", "PKG-INFO", "setup.cfg"),
    *("build", "dist", "site", "output", "*_output", "tmp_trainer", "soak_results", "gpu_rehearsal"),
)
"""What is no part of the project: made by its tools, or by its build."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, in which a build may leave files."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("packed") / "project", ignore=NOT_PACKED))


def built(tree: Path, kind: str) -> Path:
    """The wheel or the source distribution of a tree, as pip and `python -m build` make them."""
    folder = tree.parent / "dist"
    call = f"import setuptools.build_meta as b; print(b.build_{kind}({str(folder)!r}))"
    ran = subprocess.run([sys.executable, "-c", call], cwd=tree, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return folder / ran.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def files(tree: Path) -> set[str]:
    """Before anything is built."""
    return {str(file.relative_to(tree)) for file in tree.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def sdist(tree: Path, files: set[str]) -> Path:
    return built(tree, "sdist")


@pytest.fixture(scope="module")
def wheel(tree: Path, files: set[str]) -> Path:
    return built(tree, "wheel")


def test_the_source_distribution_has_every_file(sdist: Path, files: set[str]) -> None:
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert sorted(files - names) == []
    assert {"run_glue_l2l.py", "tests/conftest.py", "tests/helpers/training.py", "Makefile", ".ci/run"} <= names


@pytest.mark.parametrize(
    "tests",
    [
        "tests/test_measured.py",
        pytest.param("tests/test_architecture.py tests/glue", marks=pytest.mark.slow),
    ],
)
def test_the_tests_of_the_source_distribution_run(tests: str, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path, filter="data")
    [project] = tmp_path.iterdir()
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu", "-n", "0", *tests.split()],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout


def test_the_wheel_has_the_package_and_the_script(wheel: Path, files: set[str]) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    package = {name for name in files if name.startswith("hf_l2l/")}
    assert names == package | {"run_glue_l2l.py"}


def test_what_a_wheel_has_installed_runs(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True, timeout=240)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    for words, said in {
        ("-m", "hf_l2l", "--version"): f"hf_l2l {hf_l2l.__version__}",
        ("-m", "run_glue_l2l", "--help"): "--ubatch_size",
        (str(target / "bin" / "hf-l2l"), "plan", "X50"): "X50",
        ("-c", "import hf_l2l.demo as d; print(*d.demo_files().values())"): str(target),
    }.items():
        ran = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert ran.returncode == 0 and said in ran.stdout, ran.stderr


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as packed:
        [name] = [name for name in packed.namelist() if name.endswith("/METADATA")]
        return email.message_from_bytes(packed.read(name))


def test_the_index_knows_what_it_is(metadata: Message) -> None:
    assert metadata["Name"] == "hf_l2l" and metadata["Version"] == hf_l2l.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL") or ())
    assert {"Repository", "Documentation", "Changelog", "Issues", "Paper"} <= set(urls)
    assert all(url.startswith("https://") for url in urls.values())
    assert "layer-to-layer" in metadata["Keywords"]


def test_links_of_the_readme_work_on_the_index(metadata: Message) -> None:
    """Where no file of the project lies beside it."""
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    home = PROJECT["urls"]["Repository"].removeprefix("https://github.com/")
    assert {"https"} == {link.partition(":")[0] for link in links}
    for link in links:
        if "github" in link:
            pages = (f"https://github.com/{home}/{kind}/main/" for kind in ("blob", "tree"))
            places = (*pages, f"https://raw.githubusercontent.com/{home}/main/")
            [rest] = [link.removeprefix(place) for place in places if link.startswith(place)]
            assert (ROOT / rest.partition("#")[0]).exists()
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_declared_pythons_are_the_same_everywhere(metadata: Message) -> None:
    versions = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert versions == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == ">=3.11"
    assert "v >= (3, 11) or" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "refused"), [((3, 10), True), ((3, 11), False), ((3, 12), False), ((3, 14), False)]
)
@pytest.mark.parametrize(
    ("target", "variable"),
    [("demo", "VENV"), ("test-oldest", "OLDEST"), ("test-clients", "CLIENTS"), ("docs", "DOCS")],
)
def test_make_refuses_another_python_before_it_downloads(target, variable, version, refused, tmp_path):
    python = tmp_path / "python"
    program = "import sys; sys.version_info = ({}, {}, 0); exec(sys.argv[2])".format(*version)
    # What follows the check, `python -m venv`, fails, so that nothing is downloaded.
    other = 'echo "made an environment"; exit 3'
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || {{ {other}; }}\nexec {sys.executable} -c "{program}" "$@"\n')
    python.chmod(0o755)
    call = ["make", "-s", "-C", str(ROOT), f"PYTHON={python}", f"{variable}={tmp_path / 'venv'}", target]
    ran = subprocess.run(call, capture_output=True, text=True, timeout=60)
    assert ran.returncode != 0 and not (tmp_path / "venv").exists()
    assert ("made an environment" in ran.stdout) != refused
    assert (f"needs Python 3.11 or newer ({python} is {version[0]}.{version[1]})" in ran.stderr) == refused
