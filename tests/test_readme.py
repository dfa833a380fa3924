"""The README's Python runs, and its command lines name options that exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from compiling import QUICK_FLAGS

from deepufm.cli import _main

README = Path(__file__).parents[1] / "README.md"
_FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```\s*$", re.MULTILINE | re.DOTALL)


def blocks(text: str, *languages: str) -> list[tuple[int, str]]:
    """Returns (line number of the first line, source) of every such fenced block."""
    found = []
    for match in _FENCE.finditer(text):
        indent, language, source = match.groups()
        if language in languages:
            line = text.count("\n", 0, match.start(3)) + 1
            found.append((line, re.sub(rf"^{indent}", "", source, flags=re.MULTILINE)))
    return found


def commands(text: str) -> list[list[str]]:
    """Returns the words of every `deepufm` command line in shell blocks."""
    lines = []
    for _, source in blocks(text, "bash", "console", "sh", "shell"):
        for line in re.split(r"\n|&&|;", source.replace("\\\n", " ")):
            command = line.strip().removeprefix("$ ")
            if re.match(r"deepufm\b", command):
                lines.append(shlex.split(command, comments=True)[1:])
    return lines


PYTHON = blocks(README.read_text(encoding="utf-8"), "python")
COMMANDS = commands(README.read_text(encoding="utf-8"))


def test_readme_has_python():
    assert PYTHON


def test_python_blocks_run_in_order(tmp_path):
    """With JAX and matplotlib as a reader has them, in an empty folder."""
    # Every line where the README has it, so that a traceback names its number there.
    lines = [""] * README.read_text(encoding="utf-8").count("\n")
    lines[0] = "import gc; gc.set_threshold(100_000, 50, 50)"  # as in `conftest.py`
    for first, source in PYTHON:
        block = source.splitlines()
        lines[first - 1 : first - 1 + len(block)] = block
    (tmp_path / "README.py").write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "README.py"],
        cwd=tmp_path,
        env=os.environ | {"XLA_FLAGS": QUICK_FLAGS, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command_line_is_understood(words, monkeypatch, capsys):
    # All of `main` but what it would run, and the precision it would set.
    commands = (
        "sweep", "solve", "status", "show", "limit", "landscape", "stability", "basins",
    )  # fmt: skip
    for run in (*(f"run_{name}_command" for name in commands), "_set_precision"):
        monkeypatch.setattr(_main, run, lambda _: 0)
    try:
        status = _main.main(words)
    except SystemExit as leaving:  # --help, and what tyro itself refuses
        status = leaving.code
    assert status in (0, None), capsys.readouterr().err


SAMPLE = """
```python
x = 1
```
```bash
pip install . && deepufm sweep
deepufm sweep --depth 1:3 \\
    --seeds 2  # short
```
1. Indented:
   ```console
   $ deepufm solve --flow reduced
   done
   ```
   ```python
   for _ in range(2):
       x += 1
   ```
"""


def test_blocks_are_found_where_they_are():
    assert blocks(SAMPLE, "python") == [
        (3, "x = 1\n"),
        (16, "for _ in range(2):\n    x += 1\n"),
    ]


def test_commands_are_found_whole():
    assert commands(SAMPLE) == [
        ["sweep"],
        ["sweep", "--depth", "1:3", "--seeds", "2"],
        ["solve", "--flow", "reduced"],
    ]
