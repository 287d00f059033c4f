"""What docs/architecture.md promises of the structure: who imports whom, and sizes."""

import ast
import contextlib
import doctest
import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from support.documents import ROOT
from support.scripts import python

from variable_batch_size.step.run import ElasticOptions

# The arrows that docs/architecture.md draws: all of them exist, and no others.
IMPORTS = {
    "grab_xla": {"per_sample_grad", "xla_replica"},
    "per_sample_grad": {"xla_replica"},
    "rigl_xla": {"xla_replica"},
    "variable_batch_size": {"xla_replica"},
    "xla_replica": set(),
}
PACKAGES = sorted(IMPORTS)
RUNTIMES = ("torch_xla", "torch_tpu", "torch.distributed")
# Modules without torch, by their folder.
WITHOUT_TORCH = {
    "grab_xla.balancing": "reordering",
    "rigl_xla.report": "costs",
    "rigl_xla.topology": "distribution update_schedule",
    "variable_batch_size.control": "policies",
    "variable_batch_size.data": "lazy_orders minibatches schedule",
    "variable_batch_size.rules": "adam rule",
    "variable_batch_size.runs": "picture run_file",
    "variable_batch_size.trace_tools": "conversion curves families options simulation "
    "step_time",
    "variable_batch_size.traces": "batch_trace trace_csv",
    "xla_replica.common": "arguments differences files",
}


def dotted(path: Path) -> str:
    """The dotted name of a module's file; a package's is that of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    dotted(path): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def nodes_at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from nodes_at_run_time(node)


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at the top level) of every import; submodules by full name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in nodes_at_run_time(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            full = [f"{node.module}.{name}" for name in names]
            names = [name if name in MODULES else node.module for name in full]
        found += [(name, node in tree.body) for name in names]
    return found


TESTS = sorted((ROOT / "test").rglob("test_*.py"))
HELPERS = sorted((ROOT / "test" / "support").rglob("[!_]*.py"))

IMPORTED = {
    module: {name for name, _ in imports(path)} & MODULES.keys() - {module}
    for module, path in MODULES.items()
}


def folder(module: str) -> str:
    """The folder that a module is in; a module at a package's root is its own."""
    is_folder = MODULES[module].name == "__init__.py"
    parts = module.split(".")
    return module if is_folder or len(parts) == 2 else ".".join(parts[:-1])


def test_packages_import_exactly_what_is_drawn():
    drawn = {package: set() for package in PACKAGES}
    for module, others in IMPORTED.items():
        package = module.split(".")[0]
        drawn[package] |= {other.split(".")[0] for other in others} - {package}
    assert drawn == IMPORTS


def test_no_modules_and_no_folders_import_each_other():
    inner = {m: others - set(PACKAGES) for m, others in IMPORTED.items()}
    # A circle among them is named by the error.
    modules = {m: others for m, others in inner.items() if m not in PACKAGES}
    TopologicalSorter(modules).prepare()
    folders: dict[str, set[str]] = {}
    for module, others in modules.items():
        outside = {folder(other) for other in others} - {folder(module)}
        folders.setdefault(folder(module), set()).update(outside)
    TopologicalSorter(folders).prepare()


def test_classes_that_users_hold_and_that_change_do_not_import_each_other():
    held = {
        "variable_batch_size.data.sampler",
        "grab_xla.sampler",
        "rigl_xla.scheduler",
    }
    assert not any(IMPORTED[module] & held for module in held)


def test_folders_are_small_enough_to_be_read():
    modules = [path for path in MODULES.values() if path.name != "__init__.py"]
    count = Counter(path.parent for path in [*modules, *TESTS, *HELPERS])
    crowded = {path.relative_to(ROOT).as_posix() for path in count if count[path] > 12}
    # One file per member, as many as there are members.
    assert crowded <= {"grab_xla/balancers", "per_sample_grad/layers"}
    for package in PACKAGES:
        assert 3 <= len([*(ROOT / package).glob("*/__init__.py")]) <= 11, package


def test_modules_have_names_of_their_own():
    """Neither a standard module's nor, outside families, a public function's."""
    public = {name for p in PACKAGES for name in importlib.import_module(p).__all__}
    taken = public | sys.stdlib_module_names
    for module, path in MODULES.items():
        if path.name != "__init__.py":
            assert module.rpartition(".")[2] not in taken, module


def test_only_xla_replica_names_a_runtime_and_only_when_chosen():
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        if not module.startswith("xla_replica"):
            assert not any(name in text for name in RUNTIMES), path
        for name, top_level in imports(path):
            if name.startswith(RUNTIMES) and top_level:
                assert path.name == "distributed.py", path


@pytest.mark.parametrize("where", WITHOUT_TORCH)
def test_pure_modules_do_not_import_torch(where):
    for name in WITHOUT_TORCH[where].split():
        found = imports(MODULES[f"{where}.{name}"])
        assert not any(other.startswith("torch") for other, _ in found), name


def test_tools_and_examples_use_public_names_only():
    parts = ("variable_batch_size.gradient_noise", "variable_batch_size.trace_tools")
    optional = "variable_batch_size.integrations."  # and so not names of the package
    for path in [*ROOT.glob("tools/**/*.py"), *ROOT.glob("examples/**/*.py")]:
        ours = {name for name, _ in imports(path) if name.split(".")[0] in PACKAGES}
        hidden = ours - {*PACKAGES, *parts}
        assert all(name.startswith(optional) for name in hidden), (path, hidden)


def test_nothing_else_imports_adapters_and_they_alone_import_their_libraries():
    adapters = {m for m in MODULES if m.startswith("variable_batch_size.integrations.")}
    libraries = ("lightning", "transformers", "accelerate", "mlflow", "wandb")
    for module, path in MODULES.items():
        if module not in adapters:
            assert not IMPORTED[module] & adapters, module
            names = {name.split(".")[0] for name, _ in imports(path)}
            assert not names & {*libraries}, module


def test_the_tests_are_not_a_package_and_their_files_have_different_names():
    """`test` would shadow the standard library's; pytest imports bare names."""
    assert not (ROOT / "test" / "__init__.py").exists()
    count = Counter(path.name for path in TESTS)
    assert max(count.values()) == 1, count.most_common(3)


def test_folders_of_tests_are_those_of_the_packages():
    """Or, elsewhere, few: CONTRIBUTING.md says which tests are where."""
    known = {path.parent.relative_to(ROOT) for path in MODULES.values()}
    folders = {path.parent.relative_to(ROOT / "test") for path in TESTS}
    assert {each for each in folders if {*PACKAGES} & {*each.parts[:1]}} <= known
    helpers = {path.parent for path in HELPERS} - {ROOT / "test" / "support"}
    assert {path.name for path in helpers} == set(PACKAGES)


def test_tests_import_no_other_tests():
    """A test's folder is not on the path when another folder's tests run alone."""
    for path in [*TESTS, *HELPERS]:
        names = [name for name, _ in imports(path) if name.startswith("test_")]
        assert not names, path


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_explains_itself(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name).__doc__, name


def explained(thing: Any) -> str:
    """Returns what `help` says of the arguments of a function or a constructor."""
    if not inspect.isclass(thing):
        return inspect.getdoc(thing) or ""
    makers = [base for base in thing.__mro__ if {"__init__", "__new__"} & {*vars(base)}]
    owners = [thing, *makers[:1]]
    return "\n".join(inspect.getdoc(each) or "" for each in [*owners, thing.__init__])


# What stands for further arguments, by name.
OPTIONS = {"variable_batch_size.optimizer": ElasticOptions}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_argument_of_a_public_name_is_explained(package):
    module = importlib.import_module(package)
    for thing in [getattr(module, name) for name in module.__all__]:
        if not callable(thing) or getattr(thing, "_is_protocol", False):
            continue
        with contextlib.suppress(ValueError):  # exceptions take what Python's take
            names = {*inspect.signature(thing).parameters}
            options = OPTIONS.get(getattr(thing, "__module__", ""))
            for name in names | {*getattr(options, "__annotations__", {})}:
                said = rf"(?m)^ +[\w*, ]*\b{name}\b[\w*, ]*(\(.*\))?:(?: |$)"
                is_public = not name.startswith("_")
                assert not is_public or re.search(said, explained(thing)), (thing, name)


IMPORT_EACH = f"""
import importlib, sys, torch
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch_xla", "torch_tpu"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
before = set(sys.modules)
for package in {PACKAGES}:
    importlib.import_module(package)
    new = {{name.split(".")[0] for name in set(sys.modules) - before}}
    print(package, *sorted(new - sys.stdlib_module_names - set({PACKAGES})))
    for name in [name for name in sys.modules if name.startswith({tuple(PACKAGES)})]:
        del sys.modules[name]
"""


def test_each_package_imports_alone_without_a_runtime_and_brings_only_torch():
    """pandas alone takes half as long as torch; it comes when a table is read."""
    run = python("-c", IMPORT_EACH)
    assert run.stdout.split() == PACKAGES


@pytest.mark.parametrize("module", [
    name for name, path in MODULES.items() if ">>> " in path.read_text("utf-8")
])  # fmt: skip
def test_docstring_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
