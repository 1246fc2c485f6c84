"""Papers are found by their index notebooks; faults are named."""
import json

import pytest

from iclr26.lab import extras, papers, paths
from conftest import INDEX, write_notebook


@pytest.fixture
def nbs(tmp_path):
    write_notebook(tmp_path / "demo" / "index.ipynb", [INDEX])
    return tmp_path


def test_a_new_folder_is_found(nbs):
    write_notebook(nbs / "alpha" / "index.ipynb", [INDEX.replace("theme: science", "theme: generative video").replace("seeds: {smoke: 2, full: 3}", "extras: run, video")])
    write_notebook(nbs / "lab" / "index.ipynb", ["# The lab\n> Shared"])
    alpha, demo = papers.list_papers(nbs)
    assert {alpha: 1}[alpha] == 1
    assert (alpha.name, alpha.extras, alpha.seeds["full"]) == ("alpha", ("run", "video"), 3) and (demo.title, demo.seeds["smoke"]) == ("Demo", 2)


@pytest.mark.parametrize("cell, words", [
    (INDEX.replace("- venue: ICLR 2026\n", ""), "lacks ['venue']"), (INDEX.replace("theme: science", "theme: cooking"), "theme='cooking'"),
    (INDEX + "- colour: red\n", "does not know ['colour']"), ("Demo", "needs a line '# Title'"),
])
def test_faults_of_the_first_cell_are_named(nbs, cell, words):
    write_notebook(nbs / "bad" / "index.ipynb", [cell + " " if cell == "Demo" else cell])
    with pytest.raises(ValueError, match="bad") as error: papers.list_papers(nbs)
    assert words in str(error.value)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"cells": []}', '{"cells": [3]}'])
def test_damaged_notebooks_are_named(tmp_path, content):
    (tmp_path / "x.ipynb").write_text(content)
    with pytest.raises(ValueError, match="x.ipynb"): papers.front_matter(tmp_path / "x.ipynb")


def test_write_atomic_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = paths.write_atomic(tmp_path / "a.txt", "old")
    with pytest.raises(TypeError): paths.write_atomic(path, 3)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_missing_extra_is_told_from_a_broken_package(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import another_missing_one")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="another_missing_one") as error: extras.require("broken_package", "run")
    assert not isinstance(error.value, extras.MissingExtra)
    with pytest.raises(extras.MissingExtra, match=r'pip install "iclr26\[run\]"'): extras.require("missing_package.sub", "run")
