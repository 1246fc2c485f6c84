"""Notebooks are clean and the package is in step with them."""
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from iclr26.lab.papers import list_papers, methods, rooms

NOTEBOOKS = sorted(p for p in (Path(__file__).resolve().parents[1] / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_notebook_is_clean_and_begins_with_title_and_description(path):
    cells = json.loads(path.read_text())["cells"]
    dirty = [i for i, c in enumerate(cells) if c["cell_type"] == "code" and (c["outputs"] or c["execution_count"])]
    assert not dirty, f"cells {dirty} have outputs: run `make export`"
    first = "".join(cells[0]["source"])
    assert first.startswith("# ") and "\n> " in first, "first cell: expected '# Title' and '> description'"


def test_export_leaves_no_difference(root, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, tracked):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, copy / name)
    bin = Path(sys.executable).parent
    for command in ("nbdev_clean", "nbdev_export"): subprocess.run([bin / command], cwd=copy, check=True, capture_output=True)
    different = [n for n in tracked if n.startswith(("nbs/", "iclr26/")) and (root / n).is_file() and (root / n).read_bytes() != (copy / n).read_bytes()]
    new = [str(p.relative_to(copy)) for p in (copy / "iclr26").rglob("*.py") if str(p.relative_to(copy)) not in tracked]
    assert not different and not new, "not in step with the notebooks: run `make export`"


@pytest.mark.parametrize("paper", list_papers(), ids=lambda p: p.name)
def test_paper_has_all_rooms(paper):
    names = [r.stem for r in rooms(paper.name)]
    assert names[:2] == ["index", "theory"] and "reproduction" in names and 1 <= len(methods(paper.name)) <= 4


def test_floors(root):
    """Imports go down only: cli -> papers -> blocks -> lab."""
    import ast
    papers, faults = {p.name for p in list_papers()}, []
    for path in (root / "iclr26").rglob("*.py"):
        own = path.relative_to(root / "iclr26").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.Import, ast.ImportFrom)): continue
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [resolve(node, path, root)]
            used = {n.split(".")[1] for n in names if n.startswith("iclr26.") and n.count(".")}
            above = (papers if own in papers | {"blocks", "lab"} else set()) | ({"blocks"} if own == "lab" else set())
            faults += [f"{path.relative_to(root)} imports {u}" for u in used & above - {own}]
    assert not faults, faults


def resolve(node, path, root) -> str:
    if not node.level: return node.module or ""
    package = path.relative_to(root).parts[:-1]
    base = package[:len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [node.names[0].name])])
