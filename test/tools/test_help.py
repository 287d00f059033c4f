"""Every script explains itself from any folder, in a checkout that is not installed."""

import pytest
from support.documents import ROOT
from support.scripts import run_script

pytest.importorskip("sklearn")

SCRIPTS = [
    path
    for path in [*ROOT.glob("tools/*/*.py"), *ROOT.glob("examples/*/*.py")]
    if "__main__" in path.read_text(encoding="utf-8")
]
# One process runs them all, because each would import torch. What a script found in the
# checkout is forgotten before the next one, which must find it again.
RUN_ALL = """
import argparse, runpy, sys
show = argparse.ArgumentParser.print_help
def print_help(self):
    show(self)
    for action in self._actions:
        if not action.help:
            print("NOT EXPLAINED:", self.prog, action.dest)
argparse.ArgumentParser.print_help = print_help
path = sys.path.copy()
for script in sys.argv[1:]:
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[:], sys.argv = path, [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
    print("END OF HELP")
"""


def test_the_help_of_every_script(tmp_path):
    run_all = tmp_path / "run_all.py"
    run_all.write_text(f"OURS = {{'tools', 'examples'}}\n{RUN_ALL}")
    text = run_script(run_all, *SCRIPTS, cwd=tmp_path)
    assert "NOT EXPLAINED" not in text
    assert "default: None" not in text
    texts = text.split("END OF HELP")[:-1]
    for script, shown in zip(SCRIPTS, texts, strict=True):
        assert "--" in shown.replace("--help", "") or "positional" in shown, script
        first_line = script.read_text(encoding="utf-8").split('"""')[1].splitlines()[0]
        assert first_line in shown, script
        if script.parent.name == "studies":
            assert "--quick" in shown
            assert "default: " in shown
