"""The site that `make docs` builds: what it lists, and what a reader sees of it."""

import importlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.documents import ROOT, anchors, pages, read
from support.xla_replica.replicas import HAS_XLA

from tools.site import conf, errors
from tools.site.answers import ANSWERS

KNOWN = (
    "compiled another program than its peers for the graph",
    "did not reach … within … s of replica",
    "replicas disagree about collective … of the graph they are about to run",
    "a parameter is on …, but this is …: move the model with model.to(",
    "says that this process is one of several, but torch.distributed is not",
    "must be one of …, got …",
    "it normalises by statistics of the batch",  # of a Refusal
)
# A Chromium without a window and without a network, whose user prefers dark pages.
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom",
    "--virtual-time-budget=60000", "--allow-file-access-from-files",
    "--blink-settings=preferredColorScheme=0",
)  # fmt: skip
SITE = ROOT / "build" / "site"
TROUBLE = "docs/troubleshooting.md"
PAGES = ("docs/resuming", "build/reference/errors")  # with tables, with long messages
WIDTHS = [1280, 390]
LAST = "/docs/(architecture|benchmarks|outside|study)|/CHANGELOG|/errors"
ANSWERED = {
    words: (page, heading)
    for page, sections in ANSWERS.items()
    for heading, several in sections.items()
    for words in several
}


def looked_at(folder: Path, name: str, **values: object) -> list[dict]:
    """Returns what a page's script writes, in which names stand for ``values``."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None or not all((SITE / f"{page}.html").exists() for page in PAGES):
        # In CI, what it needs must be there.
        skip = pytest.fail if os.environ.get("CI") else pytest.skip
        skip("there is no Chromium (make browser), or no site (make docs)")
    file, probe = folder / "probe.html", read(f"test/support/site/{name}.html")
    for word, value in values.items():
        probe = probe.replace(word, json.dumps(value))
    file.write_text(probe)
    command = [browser, *OPTIONS, f"--user-data-dir={folder}/profile", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [text] = re.findall(r'<pre id="seen">(.+?)</pre>', done.stdout)
    return json.loads(text)


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    addresses = [f"{SITE.as_uri()}/{page}.html" for page in PAGES]
    folder = tmp_path_factory.mktemp("browser")
    return looked_at(folder, "sizes", PAGES=addresses, WIDTHS=WIDTHS)


@pytest.mark.skipif(HAS_XLA, reason="the other environment looks at the site")
@pytest.mark.parametrize("width", [1400, 420])
def test_the_first_hit_answers_what_a_reader_types(width, tmp_path):
    assert len(ANSWERED) == 20
    front = f"{SITE.as_uri()}/docs/README.html"
    values = {"WORDS": [*ANSWERED], "WIDTHS": [width], "FRONT": front}
    found = looked_at(tmp_path, "search", **values)
    for (page, heading), answer in zip(ANSWERED.values(), found, strict=True):
        assert (answer["heading"], answer["hidden"]) == (heading, 0)
        assert answer["page"].endswith(f"/{page}.html")
        assert answer["blocks"] > 0
        # How it is built and what it costs come after all pages about a task.
        late = [bool(re.search(LAST, hit)) for hit in answer["hits"]]
        assert late == sorted(late)


@pytest.mark.skipif(HAS_XLA, reason="the other environment looks at the site")
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_is_readable(page, width, seen):
    found = seen[PAGES.index(page) * len(WIDTHS) + WIDTHS.index(width)]
    assert found["path"].endswith(f"{page}.html")
    assert found["heading"]
    assert found["code"]
    assert found["inner"] == width
    assert found["hidden"] <= 0  # to the right, until one scrolls
    assert found["search"] == (width == max(WIDTHS))  # else it is in the menu
    color, background = (
        [int(number) for number in re.findall(r"\d+", found[name])[:3]]
        for name in ("color", "background")
    )
    assert max(background) < 60 < 160 < min(color)


def test_pages_are_found_by_task():
    assert [*conf.contents(conf.root_doc)] == [
        "Start", "Train", "Replicas", "Resume", "Live", "Sharded", "Order data",
        "Sparsify", "Per sample", "Extend", "Measurements", "Reference", "Project",
    ]  # fmt: skip


def test_the_contents_name_every_page_once():
    tables = [conf.contents(table).values() for table in conf.TABLES]
    listed = [page for table in tables for named in table for page in named]
    found = {page.relative_to(ROOT).with_suffix("").as_posix() for page in pages()}
    written = [page for page in listed if not page.startswith("build/reference/")]
    assert sorted(written) == sorted(found - {conf.root_doc} | {"examples/README"})


def test_the_reference_has_a_page_of_what_every_package_exports():
    listed = conf.contents(conf.root_doc)["Reference"]
    assert [page.rpartition("/")[2] for page in listed] == [*conf.REFERENCE, "errors"]
    for name in conf.REFERENCE:
        assert conf.exported(name) == importlib.import_module(name).__all__


def test_troubleshooting_leads_to_the_page_of_all_errors_however_they_are_made():
    source = [read(TROUBLE)]
    conf.add_contents(None, "docs/troubleshooting", source)
    assert "[Errors](/build/reference/errors)" in source[0]
    page = errors.page(ROOT, conf.PACKAGES)
    assert page.count("\n- ") > 400
    assert all(f"\n{name}\n{'-' * len(name)}\n" in page for name in conf.PACKAGES)
    assert all(said in page for said in KNOWN)


def package_sources() -> list[str]:
    return [read(p) for name in conf.PACKAGES for p in ROOT.glob(f"{name}/**/*.py")]


def test_a_message_names_the_section_that_troubleshooting_leads_to():
    """The first column quotes the message, and the last one says what to do."""
    sources = [re.sub(r'"\s+f?"', "", text) for text in package_sources()]
    rows = re.findall(r"(?m)^\| `(.+)` \| (.+) \| (.+) \|$", read(TROUBLE))
    assert len(rows) == 10
    for quoted, cause, remedy in rows:
        words = max(quoted.split("…"), key=len).strip()
        [section] = re.findall(r"\]\((\S+#\S+)\)$", remedy)
        assert len(cause.split()) > 3 < len(remedy.split())
        assert any(words in text and f"docs/{section}" in text for text in sources)


def test_a_section_that_a_message_names_is_there():
    section = r"\b(docs/\w+\.md)#([\w-]+)"
    named = {each for text in package_sources() for each in re.findall(section, text)}
    assert len(named) >= 9
    assert not [each for each in named if each[1] not in anchors(ROOT / each[0])]
