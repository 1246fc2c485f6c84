"""A small library with one paper, so that runs, ledger and command line are tested without a real experiment."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import iclr26

ROOT = Path(__file__).resolve().parents[1]
INDEX = '''# Demo
> A paper about halving

- paper: "Halving numbers"
- authors: A. Nobody
- venue: ICLR 2026
- theme: science
- seeds: {smoke: 2, full: 3}
'''
REPRODUCTION = ['''from iclr26.lab.claims import Claim, at_least, holds
from iclr26.lab.runs import Recorder
import os, time, pathlib
claims = [Claim("D1", "Halving halves.", "2", "halve numbers", {"ratio": at_least(1.9)}, seeds=2),
          Claim("D2", "Halving is free.", "0 s", "time it", {"free": holds()}, expect=EXPECT)]''',
                ('profile = "smoke"\nseed = 0\nout = None\nsize = 4\nfail = False\nslow = 0.0', ["parameters"]),
                'rec = Recorder("demo", claims, profile=profile, seed=seed, out=out)\nlog = pathlib.Path(os.environ.get("DEMO_LOG", os.devnull))',
                '''def first():
    with log.open("a") as f: f.write(f"first {seed}\\n")
    return {"ratio": 2.0 + 0.01 * seed + 0 * size}
r = rec.stage("first", first)
time.sleep(slow)''',
                '''if fail: raise ValueError("asked to fail\\nsecond line")
rec.measure("D1", **r)
rec.measure("D2", free=False)
rec.explain("D2", "It takes time.")''',
                'rec.finish()']


def write_notebook(path: Path, cells: list) -> Path:
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}})
    for cell in cells:
        source, tags = cell if isinstance(cell, tuple) else (cell, [])
        new = nbformat.v4.new_markdown_cell if source.startswith("#") and not source.startswith("#|") else nbformat.v4.new_code_cell
        nb.cells.append(new(source, metadata={"tags": tags} if tags else {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)
    return path


class Library:
    """A checkout in the small: the real lab, one demo paper."""

    def __init__(self, folder: Path, expect: str = '"refuted"'):
        self.folder = folder
        package = Path(iclr26.__file__).parent
        (folder / "iclr26").mkdir(parents=True)
        for name in ("__init__.py", "__main__.py"): shutil.copy(package / name, folder / "iclr26" / name)
        shutil.copytree(package / "lab", folder / "iclr26" / "lab", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "settings.ini").write_text("[DEFAULT]\n")
        for name in ("kernels", "data/results"): (folder / name).mkdir(parents=True)
        write_notebook(folder / "nbs" / "demo" / "index.ipynb", [INDEX])
        write_notebook(folder / "nbs" / "demo" / "theory.ipynb", ["# Theory\n> None"])
        cells = [c.replace("EXPECT", expect) if isinstance(c, str) else c for c in REPRODUCTION]
        self.reproduction = write_notebook(folder / "nbs" / "demo" / "reproduction.ipynb", ["# Reproduction\n> Halve", *cells])
        self.env = {**os.environ, "PYTHONPATH": str(folder), "DEMO_LOG": str(folder / "log.txt"), "COLUMNS": "200"}

    def cli(self, *args: str, check: int | None = None, **kwargs) -> subprocess.CompletedProcess:
        done = subprocess.run([sys.executable, "-m", "iclr26", *map(str, args)], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=240, **kwargs)
        if check is not None: assert done.returncode == check, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def popen(self, *args: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", *map(str, args)], cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @property
    def log(self) -> list[str]:
        path = self.folder / "log.txt"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def library(tmp_path) -> Library:
    return Library(tmp_path / "library")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
