"""What a reader sees of the site: wide and narrow, in a browser that prefers dark."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.documents import ROOT
from support.xla_replica.replicas import HAS_XLA

from tools.site.answers import ANSWERS

# A Chromium without a window and without a network, whose user prefers dark pages.
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom",
    "--virtual-time-budget=60000", "--allow-file-access-from-files",
    "--blink-settings=preferredColorScheme=0",
)  # fmt: skip
SITE = ROOT / "build" / "site"
PAGES = ("docs/resuming", "build/reference/errors")  # with tables, with long messages
WIDTHS = [1280, 390]
# Measures the pages in frames of these widths, and writes what is seen.
PROBE = """<!doctype html><title>probe</title><pre id="seen"></pre><script>
const seen = []
function visible(window, element) {
  const box = element.getBoundingClientRect()
  return box.width > 0 && box.height > 0 && box.left >= 0
    && box.right <= window.innerWidth && element.checkVisibility()
}
async function measure(path, width) {
  const frame = document.createElement("iframe")
  Object.assign(frame, {width, height: 900, src: path})
  await new Promise(done => { frame.onload = done; document.body.append(frame) })
  const window = frame.contentWindow, page = window.document
  const first = words => page.querySelector(words)
  const colors = window.getComputedStyle(page.body)
  seen.push({
    path, width,
    inner: page.documentElement.clientWidth,
    hidden: Math.max(...["html", ".main", ".content"].map(first).map(
      element => element.scrollWidth - element.clientWidth)),
    heading: visible(window, first("h1")),
    code: visible(window, first("article .highlight pre, article code")),
    color: colors.color, background: colors.backgroundColor,
    search: visible(window, first("input.sidebar-search")),
  })
}
(async () => {
  for (const path of PAGES) for (const width of WIDTHS) await measure(path, width)
  document.getElementById("seen").textContent = JSON.stringify(seen)
})()
</script>"""


# Types words into the search box, follows the first hit, and writes where it leads.
ASK = """<!doctype html><title>probe</title><pre id="seen"></pre><script>
const seen = []
const later = () => new Promise(done => setTimeout(done, 100))
const loads = frame => new Promise(done => { frame.onload = done })
async function ask(words, width) {
  const frame = document.createElement("iframe")
  Object.assign(frame, {width, height: 900, src: FRONT})
  document.body.append(frame)
  await loads(frame)
  const box = frame.contentDocument.querySelector("input.sidebar-search")
  box.value = words
  box.form.submit()
  await loads(frame)
  let hit = null
  for (let tries = 0; tries < 40 && !hit; tries++) {
    await later()
    hit = frame.contentDocument.querySelector("#search-results li a")
  }
  const hits = [...frame.contentDocument.querySelectorAll("#search-results li > a")]
    .map(link => new URL(link.href).pathname)
  hit.click()
  await loads(frame)
  const page = frame.contentDocument
  const place = page.getElementById(frame.contentWindow.location.hash.slice(1))
  const section = place.closest("section")
  seen.push({
    heading: section.querySelector("h1, h2").firstChild.textContent,
    page: frame.contentWindow.location.pathname, hits,
    blocks: section.querySelectorAll(".highlight").length,
    hidden: page.documentElement.scrollWidth - page.documentElement.clientWidth,
  })
  frame.remove()
}
(async () => {
  for (const width of WIDTHS) for (const words of WORDS) await ask(words, width)
  document.getElementById("seen").textContent = JSON.stringify(seen)
})()
</script>"""
LAST = "/docs/(architecture|benchmarks|outside|study)|/CHANGELOG"
ANSWERED = {
    words: (page, heading)
    for page, sections in ANSWERS.items()
    for heading, several in sections.items()
    for words in several
}


def looked_at(folder: Path, probe: str, **values: object) -> list[dict]:
    """Returns what a page with a script writes, in which names stand for values."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None or not all((SITE / f"{page}.html").exists() for page in PAGES):
        # In CI, what it needs must be there.
        skip = pytest.fail if os.environ.get("CI") else pytest.skip
        skip("there is no Chromium (make browser), or no site (make docs)")
    file = folder / "probe.html"
    for name, value in values.items():
        probe = probe.replace(name, json.dumps(value))
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
    return looked_at(folder, PROBE, PAGES=addresses, WIDTHS=WIDTHS)


@pytest.mark.skipif(HAS_XLA, reason="the other environment looks at the site")
@pytest.mark.parametrize("width", [1400, 420])
def test_the_first_hit_answers_what_a_reader_types(width, tmp_path):
    assert len(ANSWERED) == 20
    front = f"{SITE.as_uri()}/docs/README.html"
    values = {"WORDS": [*ANSWERED], "WIDTHS": [width], "FRONT": front}
    found = looked_at(tmp_path, ASK, **values)
    for (page, heading), answer in zip(ANSWERED.values(), found, strict=True):
        assert (answer["heading"], answer["hidden"]) == (heading, 0)
        assert answer["page"].endswith(f"/{page}.html")
        assert answer["blocks"] > 0
        # How it is built and what it costs come after all pages about a task.
        late = [bool(re.search(LAST, hit)) for hit in answer["hits"]]
        assert late == sorted(late)


# Once: the site does not depend on the environment.
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
