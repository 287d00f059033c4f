"""Who may import whom, what is public, and what a bare installation can import."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "grab_xla": {"per_sample_grad", "xla_replica"},
    "per_sample_grad": {"xla_replica"},
    "rigl_xla": {"xla_replica"},
    "xla_replica": set(),
    "variable_batch_size": {"xla_replica"},
}
PACKAGES = sorted(MAY_IMPORT)
WITHOUT_TORCH = {
    "variable_batch_size/traces/batch_trace.py",
    "variable_batch_size/traces/trace_csv.py",
    "variable_batch_size/data/schedule.py",
    "variable_batch_size/rules/rule.py",
    "variable_batch_size/rules/adam.py",
    "grab_xla/balancing/reordering.py",
    "grab_xla/epoch/round_robin_sharding.py",
    "rigl_xla/topology/distribution.py",
    "rigl_xla/topology/update_schedule.py",
    "rigl_xla/report/flops.py",
    "rigl_xla/report/cost_report.py",
    "xla_replica/common/differences.py",
    "xla_replica/common/files.py",
}
RUNTIMES = ("torch_xla", "torch_tpu", "torch.distributed")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at the top level) of every import statement."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        top = node in tree.body
        if isinstance(node, ast.Import):
            found += [(alias.name, top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", top))
    return found


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_every_package_is_packaged():
    script = "import setup, json; print(json.dumps(setup.PACKAGES))"
    # A stand-in: setuptools need not be installed, and nothing is to be set up.
    stand_in = "sys.modules['setuptools'] = types.SimpleNamespace(setup=lambda **_: 0)"
    run = subprocess.run(
        [sys.executable, "-c", f"import sys, types; {stand_in}; {script}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    folders = {path.parent.name for path in ROOT.glob("*/py.typed")}
    assert folders == set(PACKAGES)
    inner = {
        str(path.parent.relative_to(ROOT)).replace(os.sep, ".")
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert json.loads(run.stdout) == sorted(inner)
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_is_below_them(package):
    for path in modules(package):
        for module, _ in imports(path):
            owner = module.split(".")[0]
            assert owner not in MAY_IMPORT.keys() - MAY_IMPORT[package] - {package}, (
                path
            )


def test_only_xla_replica_names_a_runtime_and_only_when_chosen():
    for package in PACKAGES:
        for path in modules(package):
            text = path.read_text(encoding="utf-8")
            if package != "xla_replica":
                assert not any(name in text for name in RUNTIMES), path
            for module, top_level in imports(path):
                if module.startswith(RUNTIMES) and top_level:
                    assert path.name == "distributed.py", path


def test_pure_modules_do_not_import_torch():
    for name in WITHOUT_TORCH:
        assert not any(m.startswith("torch") for m, _ in imports(ROOT / name)), name


def test_tools_and_examples_use_public_names_only():
    for folder in ("tools", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for module, _ in imports(path):
                if module.split(".")[0] in PACKAGES:
                    assert module in PACKAGES, f"{path} imports {module}"


def test_the_tests_are_no_package():
    """`test` would shadow the standard library's."""
    assert not (ROOT / "test" / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_explains_itself(package):
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__doc__, name


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_without_any_runtime(package):
    """As if torch_xla and torch_tpu were not installed."""
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch_xla', 'torch_tpu'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        f"import {package}\n"
        "print(sorted(m for m in sys.modules if m.startswith(('torch_xla', 'jax'))))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def modules_with_examples() -> list[str]:
    """Every module of a package whose docstrings hold an example."""
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in PACKAGES
        for path in modules(package)
        if ">>> " in path.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("module", modules_with_examples())
def test_docstring_examples(module):
    import doctest

    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
