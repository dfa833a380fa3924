"""The README's Python runs, and its command lines name options that exist."""

import re
import shlex
from pathlib import Path

import jax
import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

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


@pytest.fixture
def user_settings(tmp_path, monkeypatch):
    """JAX and matplotlib as a reader has them, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    before = {
        name: getattr(jax.config, name)
        for name in (
            "jax_enable_x64",
            "jax_numpy_dtype_promotion",
            "jax_numpy_rank_promotion",
        )
    }
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    with mpl.rc_context():
        plt.switch_backend("Agg")
        yield
        plt.close("all")
    for name, value in before.items():
        jax.config.update(name, value)


def test_readme_has_python():
    assert PYTHON


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive:UserWarning")
@pytest.mark.usefixtures("user_settings")
def test_python_blocks_run_in_order():
    assert PYTHON
    namespace = {"__name__": "__main__"}
    for line, source in PYTHON:
        # Blank lines in front make a traceback name the README's own line.
        exec(compile("\n" * (line - 1) + source, str(README), "exec"), namespace)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command_line_is_understood(words, monkeypatch, capsys):
    # All of `main` but what it would run, and the precision it would set.
    commands = ("sweep", "solve", "status", "show")
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
