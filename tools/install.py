"""Installs packages into an environment as pip would, by uv where it can be had.

    python tools/install.py [--python PYTHON] [ARGUMENTS OF PIP INSTALL]

uv takes half of pip's time for a large torch, and seconds for one that it installed
before: its cache and the environments share files. What pip has been told (indexes,
links, a certificate) holds for it, too; a variable UV_... counts more.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

# A setting of pip, and the variable by which uv is told it.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
# pip takes the best version of all indexes, and waits as long.
LIKE_PIP = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_HTTP_TIMEOUT": "180"}


def variables(settings: str) -> dict[str, str]:
    """Returns what tells uv the settings that ``pip config list`` has printed.

    Those of the environment are among them, and count more than those of a file.
    """
    found = re.findall(r"^(\S+)\.([\w-]+)=(.*)$", settings, re.MULTILINE)
    found.sort(key=lambda setting: setting[0] == ":env:")
    return LIKE_PIP | {
        VARIABLES[name]: ast.literal_eval(value).replace("\n", " ").strip()
        for _, name, value in found
        if name in VARIABLES
    }


def command(python: str, has_uv: bool) -> list[str]:
    """Returns the command that installs what is appended to it."""
    if has_uv:
        return [sys.executable, "-m", "uv", "pip", "install", "--python", python]
    pip = [sys.executable, "-m", "pip", "--python", python]
    return [*pip, "install", "--no-compile"]  # most files are never imported


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    python = sys.executable
    if arguments[:1] == ["--python"]:
        python, arguments = arguments[1], arguments[2:]
    has_uv = importlib.util.find_spec("uv") is not None
    told = subprocess.check_output(
        [sys.executable, "-m", "pip", "config", "list"], text=True
    )
    return subprocess.call(
        [*command(python, has_uv), "--quiet", *arguments],
        env={**variables(told), **environment},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
