"""The package: light import, and the built wheel in a clean environment without nbdev."""
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from iclr26.lab.papers import list_papers

TORCH = os.environ.get("TORCH", "torch==2.13.0")
pytestmark = pytest.mark.xdist_group("package")


def run(*command, **kwargs) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_importing_the_package_is_light():
    script = "import sys; before = set(sys.modules); import iclr26; print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    assert run(sys.executable, "-c", script).strip() == "['iclr26']"


@pytest.mark.parametrize("command", [["list"], ["--help"], ["report"]])
def test_listing_imports_no_torch(command):
    script = f"import sys; from iclr26.lab.cli import main; main({command!r}); assert not {{'torch', 'numba', 'matplotlib', 'pandas'}} & set(sys.modules), sys.modules.keys()"
    run(sys.executable, "-c", script)


@pytest.mark.parametrize("paper", [p.name for p in list_papers()])
def test_importing_a_paper_needs_no_extra(paper):
    script = f"import sys, iclr26.{paper}; bad = {{'matplotlib', 'pandas', 'papermill', 'sklearn', 'seaborn', 'nbdev', 'fastcore', 'transformers', 'diffusers', 'zstandard'}} & set(sys.modules); assert not bad, bad"
    run(sys.executable, "-c", script)


@pytest.fixture(scope="module")
def dist(root, tmp_path_factory) -> Path:
    """Wheel and sdist, built from a clean copy of the tracked files."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    archive = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout
    subprocess.run(["tar", "--null", "-T", "-", "-cf", source / "files.tar"], cwd=root, input=archive, check=True)
    subprocess.run(["tar", "-xf", "files.tar"], cwd=source, check=True)
    (source / "files.tar").unlink()
    run(sys.executable, "-m", "build", "--outdir", out, source)
    return out


def test_wheel_carries_notebooks_kernels_and_data(dist, root):
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel: names = set(wheel.namelist())
    for folder in ("nbs", "kernels", "data"):
        files = subprocess.run(["git", "ls-files", folder], cwd=root, capture_output=True, text=True, check=True).stdout.split("\n")
        assert {f"iclr26/share/{f}" for f in files if f} <= names
    assert "iclr26/py.typed" in names and not any("tests" in n.split("/") for n in names)
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist: inside = {n.split("/", 1)[-1] for n in sdist.getnames()}
    assert {"settings.ini", "setup.py", "README.md", "nbs/index.ipynb"} <= inside


ROUND_TRIP = """
import torch
from safetensors.torch import load_file, save_file
w = (torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.float8_e4m3fn)
save_file({"w": w}, "a.safetensors")
import iclr26.ecf8 as ecf8
t = ecf8.encode(w)
assert torch.equal(ecf8.decode(t).view(torch.uint8), w.view(torch.uint8)) and t.nbytes < w.numel()
"""


@pytest.mark.slow
def test_wheel_in_a_clean_environment(dist, tmp_path):
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv)
    python, iclr26 = venv / "bin" / "python", venv / "bin" / "iclr26"
    run(python, "-m", "pip", "install", "-q", "-U", "pip")
    run(python, "-m", "pip", "install", "-q", TORCH, next(dist.glob("*.whl")))
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    there = {"cwd": tmp_path, "env": env}
    installed = run(python, "-m", "pip", "list", **there).lower()
    assert "nbdev" not in installed and "fastcore" not in installed and "papermill" not in installed
    assert all(p.name in run(iclr26, "list", **there) for p in list_papers())
    for paper in list_papers(): run(python, "-c", f"import iclr26.{paper.name}", **there)
    run(python, "-c", ROUND_TRIP, **there)
    run(iclr26, "ecf8", "compress", "a.safetensors", "b.safetensors", **there)
    run(iclr26, "ecf8", "decompress", "b.safetensors", "c.safetensors", **there)
    run(python, "-c", "import torch; from safetensors.torch import load_file as l; a, c = (l(f'{x}.safetensors')['w'].view(torch.uint8) for x in 'ac'); assert torch.equal(a, c)", **there)
    run(iclr26, "notebooks", "copied", **there)
    assert (tmp_path / "copied" / "ecf8" / "reproduction.ipynb").exists()
    missing = subprocess.run([iclr26, "reproduce", "ecf8"], capture_output=True, text=True, **there)
    assert missing.returncode == 1 and missing.stderr.strip().count("\n") == 0 and 'pip install "iclr26[run]"' in missing.stderr
