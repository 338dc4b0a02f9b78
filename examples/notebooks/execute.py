"""Run the notebooks beside this file and keep what they print: python examples/notebooks/execute.py."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
PARAMETERS = "parameters"
"""Tag of the one cell of a notebook whose assignments may be replaced."""


def executed(notebook: Path, work: Path, timeout: int = 900, **values: Any) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in a new kernel in the folder ``work``.

    ``values`` are assigned behind the cell with the tag ``parameters``. ``ValueError`` where there is no such cell or
    it does not name one of them; an error of a cell is nbclient's ``CellExecutionError``.
    """
    content = nbformat.read(notebook, as_version=4)
    tagged = [cell for cell in content.cells if PARAMETERS in cell.metadata.get("tags", [])]
    unknown = [name for name in values if len(tagged) != 1 or f"{name} = " not in tagged[0].source]
    if unknown:
        raise ValueError(f"got {unknown} for {notebook.name}, expected names that its cell of parameters assigns")
    source = tagged[0].source if tagged else ""
    if values:
        tagged[0].source = "\n".join([source, *(f"{name} = {value!r}" for name, value in values.items())])
    client = NotebookClient(
        content,
        timeout=timeout,
        record_timing=False,
        resources={"metadata": {"path": str(work)}},
        kernel_name="python3",
    )
    client.execute()
    if values:
        tagged[0].source = source
    return content


def stripped(content: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what differs from machine to machine: versions, times, warnings of libraries."""
    content.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in content.cells:
        cell.metadata = {key: value for key, value in cell.metadata.items() if key == "tags"}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return content


def main(notebooks: list[Path]) -> None:
    for notebook in notebooks:
        with tempfile.TemporaryDirectory() as work:
            nbformat.write(stripped(executed(notebook, Path(work))), notebook)
        print(notebook.name)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")))
