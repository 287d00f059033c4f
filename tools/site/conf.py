"""Sphinx's settings: the pages of the repository, and a reference page per package.

The repository is the source's root, so that links between pages, and to examples and
records, need no mapping. Packages are read, not imported.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.site import answers, errors  # noqa: E402

PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/py.typed"))
# What docs/stability.md calls public beside what the packages themselves export.
PARTS = ("variable_batch_size.gradient_noise", "variable_batch_size.trace_tools")
REFERENCE = sorted((*PACKAGES, *PARTS))
# Pages whose tables are the contents of the site.
TABLES = ("docs/README", "docs/migration/README")
TREE = "\n```{{toctree}}\n:hidden:\n:caption: '{}'\n\n{}\n```\n"

project = "elastic-xla"
extensions = ["myst_parser", "autoapi.extension"]
root_doc = TABLES[0]
include_patterns = ["*.md", "docs/**.md", "examples/README.md", "build/reference/*"]
exclude_patterns = [".*", "build/site", "test", "tools", *PACKAGES]
html_theme = "furo"
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_title = project
html_copy_source = html_show_copyright = False
maximum_signature_line_length = 88
myst_heading_anchors = 6
default_role = "py:obj"  # `names` in docstrings lead to what they name
autoapi_dirs = [str(ROOT / name) for name in PACKAGES]
autoapi_generate_api_docs = False
autoapi_options = ["members", "imported-members"]
# Of private names (check_reference sees to public ones), and of a block's language csv.
suppress_warnings = ["autoapi.python_import_resolution", "misc.highlighting_failure"]


def exported(package: str) -> list[str]:
    """Returns ``__all__`` of a package, which it ends with."""
    text = (ROOT / package.replace(".", "/") / "__init__.py").read_text("utf-8")
    return ast.literal_eval(text.partition("\n__all__ = ")[2])


def contents(name: str) -> dict[str, list[str]]:
    """Returns the pages that a page's tables link to, by the bold line above them."""
    found: dict[str, list[str]] = {}
    caption = "Pages"
    for line in (ROOT / f"{name}.md").read_text("utf-8").splitlines():
        if heading := re.fullmatch(r"\*\*(.+)\*\*", line):
            caption = heading[1]
        for target in re.findall(r"\]\((\S+)\.md\)", line if line[:1] == "|" else ""):
            page = ((ROOT / name).parent / target).resolve().relative_to(ROOT)
            found.setdefault(caption, []).append(page.as_posix())
    if name == root_doc:
        listed = [*REFERENCE, "errors"]
        found["Reference"] = [f"build/reference/{package}" for package in listed]
        found["Project"] = ["README", "examples/README", "CHANGELOG"]
    return found


def add_contents(app: Any, name: str, source: list[str]) -> None:
    if name == root_doc:  # the site opens with what the README begins with
        pitch, _, _ = (ROOT / "README.md").read_text("utf-8").partition("\n## ")
        pages = source[0].partition("\n")[2]
        source[0] = pitch.replace("](docs/", "](") + pages
    source[0] = answers.with_entries(name, source[0])
    if name in TABLES:
        for caption, pages in contents(name).items():
            source[0] += TREE.format(caption, "\n".join(f"/{page}" for page in pages))
    if name == "docs/troubleshooting":  # the page is not in the repository
        source[0] = source[0].replace("*Errors*", "[Errors](/build/reference/errors)")


def read_docstring(app: Any, what: str, name: str, *given: Any) -> None:
    """Turns a docstring into what Sphinx reads; a package's ends with code."""
    from sphinx.ext.napoleon import Config, GoogleDocstring

    lines = given[-1]
    sections = [("Class attributes", "Attributes")]
    settings = Config(napoleon_use_ivar=True, napoleon_custom_sections=sections)
    lines[:] = [  # |x| is a norm
        re.sub(r"(`+)(.*?)\1|\|", lambda found: found[0] if found[1] else r"\|", line)
        for line in GoogleDocstring(lines, settings).lines()
    ]
    for number, line in enumerate(lines):
        if what == "package" and re.match("from |import ", line):
            lines[number:] = ["::", "", *(f"    {each}" for each in lines[number:])]
            return


def write_reference(app: Any) -> None:
    folder = ROOT / "build/reference"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "errors.rst").write_text(errors.page(ROOT, PACKAGES))
    for name in REFERENCE:
        (folder / f"{name}.rst").write_text(
            f"{name}: reference\n{'=' * (len(name) + 11)}\n\n"
            f".. autoapimodule:: {name}\n   :show-inheritance:\n"
            f"   :members: {', '.join(exported(name))}\n"
        )


def check_reference(app: Any, env: Any) -> None:
    """Raises where a package exports what its page does not have."""
    names = {f"{package}.{name}" for package in REFERENCE for name in exported(package)}
    if missing := names - env.get_domain("py").objects.keys():
        raise ValueError(f"the reference lacks {', '.join(sorted(missing))}")


def write_front(app: Any, error: Exception | None) -> None:
    front = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
    (Path(app.outdir) / "index.html").write_text(front)


def setup(app: Any) -> None:
    app.connect("builder-inited", write_reference, priority=0)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("env-check-consistency", check_reference)
    app.connect("build-finished", write_front)
