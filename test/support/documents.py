"""Reading the documentation's pages: their code, their diffs and their links."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def pages() -> list[Path]:
    """Returns every Markdown page that a reader is led to."""
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def read(page: str | Path) -> str:
    """Returns the text of a page, whose path is relative to the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str | Path, language: str) -> list[str]:
    """Returns the fenced blocks of a language, in the order of the page."""
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, read(page), re.DOTALL | re.MULTILINE)


def block(page: str | Path, language: str, mark: str) -> str:
    """Returns the only block of a language that contains ``mark``."""
    [found] = [text for text in blocks(page, language) if mark in text]
    return found


def sides(diff: str) -> tuple[str, str]:
    """Returns what a diff without separators shows before and after."""
    lines = diff.splitlines()
    before, after = (
        "".join(f"{line[1:]}\n" for line in lines if not line.startswith(sign))
        for sign in "+-"
    )
    return before, after


def patched(script: str, diff: str) -> str:
    """Returns the script with every hunk of a diff applied.

    Raises:
        AssertionError: A hunk's old lines are not in the script exactly once.
    """
    for hunk in re.split("^@@\n", diff, flags=re.MULTILINE):
        before, after = sides(hunk)
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


def anchors(page: Path) -> set[str]:
    """Returns what can follow ``#`` in a link to a page, as GitHub names headings."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number = sum(words == name or name.startswith(f"{words}-") for name in found)
        found.add(f"{words}-{number}" if words in found else words)
    return found


def links(page: Path) -> list[str]:
    """Returns the targets of a page's links to files of this repository."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not target.startswith("https:")]
