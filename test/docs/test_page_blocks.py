"""Every block of code on the pages runs: here, in another test, or it says why not."""

import argparse
import ast
import contextlib
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from support.documents import ROOT, blocks, patched, read
from support.page_blocks import Block, all_blocks
from support.scripts import python

ALL = all_blocks()
LANGUAGES = {"python", "sh", "diff", "csv", "text", "yaml"}
# Of modules that ask for blocks: one runs none of them, and one runs them again.
PASSED_OVER = ("test_page_blocks.py", "test_wheel.py")
TEXTS = (ast.Constant, ast.JoinedStr, ast.Tuple)
PARSE = argparse.ArgumentParser.parse_args


def asked_for(source: str) -> list[tuple[str, ...]]:
    """Returns the arguments of the calls of `block` and `blocks` in a test module."""
    tree, names = ast.parse(source), {}
    for node in tree.body:
        if isinstance(getattr(node, "value", None), TEXTS):
            with contextlib.suppress(NameError):  # a name from elsewhere
                exec(ast.unparse(node), names)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        tuple(eval(ast.unparse(argument), names) for argument in call.args)
        for call in calls
        if ast.unparse(call.func) in ("block", "blocks")
    ]


# By page and language, or page, language and words: the modules that run such blocks.
ELSEWHERE = {
    key: path.relative_to(ROOT).as_posix()
    for path in ROOT.glob("test/**/test_*.py")
    if path.name not in PASSED_OVER
    for source in [path.read_text("utf-8")]
    if re.search("from support.documents import .*block", source)
    for key in asked_for(source)
}


def run_by(each: Block) -> list[str]:
    """Returns the other modules that run a block: those that name it, or the page's."""
    named = [
        test
        for (page, language, *words), test in ELSEWHERE.items()
        if (page, language) == (each.page, each.language)
        if words and words[0] in each.code
    ]
    whole = ELSEWHERE.get((each.page, each.language))
    return named or [whole] * bool(whole and not each.reason)


HERE = [each for each in ALL if not each.reason and not run_by(each)]
PYTHON = [each.name for each in HERE if each.language == "python"]
SHELL = {each.name: each.code for each in HERE if each.language == "sh"}


@pytest.mark.parametrize("page", sorted({each.page for each in ALL}))
def test_no_block_escapes(page):
    text, found = read(page), [each for each in ALL if each.page == page]
    assert {each.language for each in found} <= LANGUAGES
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(found)
    excused = [each for each in found if each.reason]
    assert len(re.findall("^<!-- not run:", text, re.MULTILINE)) == len(excused) <= 2
    assert not [each.name for each in excused if run_by(each)]


@pytest.fixture(scope="module")
def raised(tmp_path_factory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("blocks") / "raised"
    words = ("-m", "support.page_blocks", file, *PYTHON)
    python(*words, OMP_NUM_THREADS="1", timeout=300)
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", PYTHON)
def test_a_block_runs(name, raised):
    assert name not in raised, raised[name]


class ParsedError(Exception):
    """A script has understood its command line."""


def parse_args(self, args=None, namespace=None):
    raise ParsedError(PARSE(self, args, namespace))


def commands(code: str) -> list[list[str]]:
    """Returns the words of a block's commands, variables replaced by numbers."""
    code = re.sub(r"\$\(\(.*?\)\)|\$\w+", "1", code.replace("\\\n", ""))
    code = re.sub(r"^until (.*?); do .*; done$", r"\1", code, flags=re.MULTILINE)
    lines = [shlex.split(line, comments=True) for line in code.splitlines()]
    return [words for words in lines if words]


def run_as_main(arguments: list[str]) -> None:
    """Runs what follows ``python`` in a command, by its name in the repository."""
    if arguments[0] == "-c":
        exec(arguments[1], {})
        raise ParsedError
    if arguments[0] == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    script = arguments[0] if arguments[0] == "train.py" else str(ROOT / arguments[0])
    runpy.run_path(script, run_name="__main__")


@pytest.mark.parametrize("name", SHELL)
def test_what_is_called_takes_the_words_of_a_command(name, tmp_path, monkeypatch):
    script, makefile = tmp_path / "train.py", read("Makefile")
    elastic, _, resumable, ordered = blocks("docs/tutorial.md", "diff")
    [ordinary] = blocks("docs/tutorial.md", "python")
    script.write_text(patched(patched(patched(ordinary, elastic), resumable), ordered))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    for program, *arguments in commands(SHELL[name]):
        if program == "make":
            for word in arguments:
                target, is_setting, _ = word.partition("=")
                assert f"\n{target}{' ?=' if is_setting else ':'}" in makefile, word
        elif program in ("pip", "git"):  # test_packaging and test_wheel
            assert arguments[0] in ("install", "clone")
        elif program == "sbatch":
            [script] = [word for word in arguments if word.endswith(".sbatch")]
            assert (ROOT / script).exists()
        elif program == "export":
            assert all(re.fullmatch(r"[A-Z_]+=\S+", word) for word in arguments)
        else:
            assert Path(program).name in ("torchrun", "python"), program
            if program == "torchrun":
                arguments = ["-m", "torch.distributed.run", *arguments]
            monkeypatch.setattr(sys, "argv", arguments[arguments[0] == "-m" :])
            # What another test has imported would be run a second time.
            monkeypatch.delitem(sys.modules, f"{sys.argv[0]}.__main__", raising=False)
            with pytest.raises(ParsedError):
                run_as_main(arguments)
