"""Every notebook runs from top to bottom, somewhere else than in the repository."""

from pathlib import Path

import nbformat
import pytest
from compiling import QUICK_FLAGS
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 240  # a compilation takes some seconds, on a busy machine many more
# Programs that compile in half the time, and take somewhat longer to run.
# As in `conftest.py`.
STARTUP = "import gc\n\ngc.set_threshold(100_000, 50, 50)\n"


@pytest.fixture
def kernel_home(tmp_path, monkeypatch):
    """Makes `python3` this interpreter, and keeps IPython's own files out of sight."""
    write_kernel_spec(tmp_path / "jupyter" / "kernels" / "python3")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("XLA_FLAGS", QUICK_FLAGS)
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "collector.py").write_text(STARTUP)
    # The notebooks' figures are inline whatever backend the tests draw with.
    monkeypatch.delenv("MPLBACKEND", raising=False)
    work = tmp_path / "work"
    work.mkdir()
    return work


def _code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_runs(file, kernel_home):
    notebook = nbformat.read(file, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(kernel_home)}},
    )
    client.execute()
    outputs = [output for cell in _code_cells(notebook) for output in cell.outputs]
    kinds = {output.output_type for output in outputs}
    assert "error" not in kinds
    assert "display_data" in kinds or "execute_result" in kinds
    # A reader of the notebook would see them first.
    warned = [o.text for o in outputs if o.get("name") == "stderr"]
    assert not warned


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_is_stored_without_outputs(file):
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in _code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None
