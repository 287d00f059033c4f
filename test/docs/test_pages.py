"""What the pages name is there: files, headings and public names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from support.documents import ROOT, anchors, block, blocks, links, pages, read

import variable_batch_size as vbs

PAGES = pytest.mark.parametrize(
    "page", pages(), ids=lambda page: str(page.relative_to(ROOT))
)
MODULES = {
    "vbs": "variable_batch_size",
    "psg": "per_sample_grad",
    **{name: name for name in ("xla_replica", "grab_xla", "rigl_xla")},
}
FOLDERS = ("docs", "examples", "test", "tools", *MODULES.values())


@PAGES
def test_links_lead_somewhere(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


@PAGES
def test_files_that_are_named_exist(page):
    folders = "|".join(FOLDERS)
    named = rf"(?<![\w/])(?:{folders})/[\w/.-]*\w\.(?:py|md|json|csv|png)"
    for path in re.findall(named, read(page)):
        assert (ROOT / path).exists(), path
    tests = {path.name for path in ROOT.glob("test/**/*.py")}
    for name in re.findall(r"`(test_\w+\.py)`", read(page)):
        assert name in tests, name


@PAGES
def test_names_that_are_public_exist(page):
    for alias, name in re.findall(
        rf"\b({'|'.join(MODULES)})\.([a-zA-Z_]+)", read(page)
    ):
        if name in ("py", "md", "pyi", "json"):
            continue
        module = importlib.import_module(MODULES[alias])
        assert hasattr(module, name), f"{alias}.{name}"


@PAGES
def test_python_code_compiles(page):
    for code in blocks(page, "python"):
        compile(code, str(page), "exec")


def test_a_rule_works_without_a_wrapper():
    names: dict[str, object] = {"vbs": vbs}
    exec(block("docs/variable_batch_size.md", "python", "rule.update"), names)
    assert names["scaled"].lr == pytest.approx(2e-3)


def test_headings_become_anchors_as_on_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One: `a_b`\n## Two, or 3\n```\n# not a heading\n```\n## Two, or 3\n"
    )
    assert anchors(Path(page)) == {"one-a_b", "two-or-3", "two-or-3-1"}
