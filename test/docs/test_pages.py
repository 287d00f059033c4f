"""What the pages name is there: files, headings and public names."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch
from support.documents import ROOT, anchors, links, pages, read

import per_sample_grad as psg
import rigl_xla
import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler

PAGES = pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))
MODULES = {
    "vbs": "variable_batch_size",
    "psg": "per_sample_grad",
    **{name: name for name in ("xla_replica", "grab_xla", "rigl_xla")},
}
FOLDERS = ("docs", "examples", "test", "tools", *MODULES.values())
# What the pages call objects of these classes.
VARIABLES: dict[str, tuple[type, ...]] = {
    "optimizer": (vbs.AdaScaleOptimizer, torch.optim.SGD),
    "sampler": (vbs.CustomSampler, GraBSampler),
    "grab": (GraBSampler,),
    "plan": (vbs.EpochPlan,),
    "checkpointer": (vbs.Checkpointer,),
    "log": (vbs.RunLog,),
    "replica": (xla_replica.Replica,),
    "recorded": (psg.Capture,),
    "factors": (psg.Factors,),
    "scores": (psg.PoolScores,),
    "pruner": (rigl_xla.RigLScheduler,),
}


@PAGES
def test_links_lead_somewhere(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def present(page: Path) -> str:
    """Returns the text of a page but for the lists of what is withdrawn."""
    return re.sub(r"(?ms)^#### Withdrawn$.*?(?=^##)", "", read(page))


@PAGES
def test_files_and_public_names_that_are_named_exist(page):
    text = present(page)
    named = rf"(?<![\w/])(?:{'|'.join(FOLDERS)})/[\w/.-]*\w\.(?:py|md|json|csv|png)"
    assert not [path for path in re.findall(named, text) if not (ROOT / path).exists()]
    tests = {path.name for path in ROOT.glob("test/**/*.py")}
    assert {*re.findall(r"`(test_\w+\.py)`", text)} <= tests
    for alias, name in re.findall(rf"\b({'|'.join(MODULES)})\.([a-zA-Z_]+)", text):
        module = importlib.import_module(MODULES[alias])
        is_file = name in ("py", "md", "pyi", "json")
        is_module = importlib.util.find_spec(f"{module.__name__}.{name}") is not None
        assert is_file or is_module or hasattr(module, name), f"{alias}.{name}"


def test_the_page_on_stability_lists_all_public_names():
    page = read("docs/stability.md")
    listed = re.findall(r"^`([\w.]+)`\n\n```text\n(.*?)```", page, re.M | re.DOTALL)
    assert {*MODULES.values()} <= {module for module, _ in listed}
    for module, names in listed:
        assert names.split() == importlib.import_module(module).__all__, module


def attributes(cls: type) -> set[str]:
    """Returns the names that objects of a class have, those set by methods too."""
    found = set(dir(cls))
    for base in cls.__mro__[:-1]:
        found.update(getattr(base, "__annotations__", {}))
        found.update(re.findall(r"self\.(\w+)\b[^=\n]*=", inspect.getsource(base)))
    return found


@PAGES
def test_attributes_of_what_pages_call_by_its_usual_name_exist(page):
    # The first column of this page's table is of names that are gone.
    text = re.sub(r"^\| `.*?` \|", "", present(page), flags=re.MULTILINE)
    for name, classes in VARIABLES.items():
        known = set().union(*map(attributes, classes))
        for attribute in re.findall(rf"(?<![\w./]){name}\.([a-zA-Z_]\w*)", text):
            file = attribute in ("py", "pt", "csv", "json")
            assert file or attribute in known, f"{name}.{attribute}"


def test_every_record_has_a_page_that_names_it():
    text = "".join(map(read, pages()))
    for record in ROOT.glob("docs/benchmarks/*.json"):
        # A run's further records may be abbreviated: `...-wide.json`.
        end = re.escape(record.name.rpartition("-")[2])
        assert record.name in text or re.search(rf"`…-[\w-]*{end}`", text), record.name


@pytest.mark.parametrize("page", ["README.md", "docs/grab_xla.md"])
def test_a_gain_is_told_with_its_cost(page):
    """Orders are compared after equally many epochs, which do not cost the same."""
    text = " ".join(read(page).split())
    assert "same cost" not in text
    assert re.search(r"8 to 76 times.*?(an epoch|ordered step)", text, re.IGNORECASE)
    assert "#what-an-epoch-costs" in text


@pytest.mark.parametrize(
    "family",
    ["A learning-rate rule", "A balance type", "A layer rule", "A sparsity method",
     "A replica backend", "A score of a pool", "A family of traces"],
)  # fmt: skip
def test_a_member_is_added_from_outside_in_thirty_lines_of_code(family):
    _, _, section = read("docs/extending.md").partition(f"\n## {family}\n")
    [code] = re.findall("```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    assert 0 < len([*filter(str.strip, code.splitlines())]) <= 30
