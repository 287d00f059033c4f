"""What pip installs for each place is what the page about installing says."""

import importlib.metadata
import re
import runpy
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.documents import ROOT, read
from support.xla_replica.replicas import needs_xla

from tools import install
from tools.size.count_lines import PACKAGES
from variable_batch_size.command_line import main

INSTALLING = read("docs/installing.md")


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    """What setup.py gives setuptools, which need not be installed."""
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        stand_in = SimpleNamespace(setup=given.update)
        patch.setitem(sys.modules, "setuptools", stand_in)
        runpy.run_path(str(ROOT / "setup.py"))
    return given


@pytest.fixture(scope="module")
def extras(given) -> dict[str, dict[str, Requirement]]:
    """Requirements by extra, "" without one, and by the name of what is required."""
    groups = {"": given["install_requires"], **given["extras_require"]}
    return {
        extra: {r.name: r for r in map(Requirement, requirements)}
        for extra, requirements in groups.items()
    }


def test_every_package_and_the_command_are_packaged(given):
    roots = [path.parent for path in ROOT.glob("*/py.typed")]
    assert {path.name for path in roots} == {*PACKAGES}
    inner = {path.parent for root in roots for path in root.rglob("*.py")}
    names = [".".join(path.relative_to(ROOT).parts) for path in inner]
    assert given["packages"] == sorted(names)
    scripts = given["entry_points"]["console_scripts"]
    assert scripts == [f"vbs = {main.__module__}:{main.__name__}"]


def test_the_oldest_and_the_newest_torch_are_tested(extras):
    """make takes the newest from pyproject.toml, and a build without CUDA first."""
    allowed = extras[""]["torch"].specifier
    [newest] = re.findall(r'^torch = \["torch==(.*)"\]$', read("pyproject.toml"), re.M)
    assert list(allowed.filter(["2.8.0", "2.9.0", newest])) == ["2.9.0", newest]
    make = ("make", "-n", "ENV=torch", "VENV=new", "new/ready")
    said = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    installs = re.findall(r"install(?:\.py)? (.*)'torch==(.*?)'", said.stdout)
    assert [version for _, version in installs] == 3 * [newest]
    assert ["/cpu " in options for options, _ in installs] == [True, False, False]


def test_uv_is_told_what_pip_knows_and_pip_installs_where_there_is_no_uv():
    told = "global.cert='/etc/ca'\n:env:.cert='/own/ca'\nglobal.timeout='9'\n"
    links = "global.extra-index-url='\\nfile:///a\\nfile:///b'\n"
    found = install.variables(links + told)
    assert found["UV_EXTRA_INDEX_URL"] == "file:///a file:///b"
    assert found["SSL_CERT_FILE"] == "/own/ca"
    assert found.keys() - install.LIKE_PIP == {"UV_EXTRA_INDEX_URL", "SSL_CERT_FILE"}
    for has_uv, tool in ((True, "uv"), (False, "pip")):
        assert install.command("python", has_uv)[1:3] == ["-m", tool]


def test_the_pages_name_an_extra_for_every_place_and_no_others(extras):
    places = INSTALLING.split("\n\n")[2]
    named = re.findall(r"\.\[([\w,-]+)\]'` \((.*?)\)", places)
    assert [extra for extra, _ in named] == ["xla-cpu", "xla-tpu", "torchtpu"]
    for extra, what in named:
        version = re.match(r"torch (\d\.\d+)", what)[1]
        assert extras[extra]["torch"].specifier.contains(f"{version}.0")
    pages = ("README.md", "Makefile", "docs/tutorial.md", "docs/installing.md")
    everywhere = "".join(map(read, pages))
    for group in re.findall(r"\.\[([\w,-]+)\]", everywhere):
        assert set(group.split(",")) <= extras.keys()


def test_the_version_is_the_same_everywhere():
    """A development version until a release has its date in the changelog."""
    [version] = re.findall(r'^    version="(.+)",$', read("setup.py"), re.MULTILINE)
    headings = re.findall("^## (.+)$", read("CHANGELOG.md"), re.MULTILINE)
    if version.endswith(".dev0"):
        assert headings[0] == "Unreleased"
        cited = f"\nversion: {version}\nkeywords:"
    else:
        [date] = re.findall(rf"^{version} - (\d{{4}}-\d\d-\d\d)$", headings[0])
        cited = f"\nversion: {version}\ndate-released: {date}\n"
    assert cited in read("CITATION.cff")


def test_hooks_before_a_commit_run_what_lint_runs():
    lint = read("Makefile").split("\nlint:")[1].split("\n\n")[0]
    hooks = re.findall(r"^ +entry: (.*)", read(".pre-commit-config.yaml"), re.MULTILINE)
    assert hooks == re.findall(r"/(ruff .*)", lint) != []


def test_every_requirement_holds_on_every_python(extras):
    """pip leaves a requirement with an unmet marker out, without a word."""
    required = {"torch", "numpy", "pandas", "tensorboardX", "tqdm", "cloudpickle"}
    assert extras[""].keys() == required
    assert all(r.marker is None for named in extras.values() for r in named.values())


def test_only_a_tpus_extra_brings_libtpu_and_none_is_for_torch_tpu_too(extras):
    for extra, options in (("xla-cpu", set()), ("xla-tpu", {"tpu"})):
        assert extras[extra]["torch_xla"].extras == options
        assert str(extras[extra]["torch_xla"].specifier) == "==2.9.0"
    of_xla, of_tpu = extras["xla-tpu"]["torch"], extras["torchtpu"]["torch"]
    versions = [f"2.{minor}.{patch}" for minor in range(30) for patch in range(3)]
    assert not [*(of_xla.specifier & of_tpu.specifier).filter(versions)]


@needs_xla
@pytest.mark.xla
def test_torch_xlas_extra_for_tpus_is_there_and_brings_libtpu():
    required = map(Requirement, importlib.metadata.requires("torch_xla"))
    brought = {
        r.name: f"{r.name}{r.specifier}"
        for r in required
        if r.marker and r.marker.evaluate({"extra": "tpu"})
    }
    assert {"libtpu", "tpu-info"} <= brought.keys()
    # Programs are compiled by the libtpu that a TPU VM gets.
    assert f" {brought['libtpu']}\n" in (ROOT / "Makefile").read_text()
