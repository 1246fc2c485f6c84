"""Benchmarks: pairs are interleaved, kept figures are shown, nothing is kept unless asked for."""
import json
import re

import pytest

from iclr26.lab import bench as B


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(B, "resource", lambda name: tmp_path)
    return tmp_path / "results" / "benchmarks" / "demo.json"


def test_pairs_alternate_after_one_warm_up():
    calls = []
    ours, peer = B.paired_times(lambda: calls.append("a"), lambda: calls.append("b"), repeats=3)
    assert "".join(calls) == "ab" * 4 and ours.shape == peer.shape == (3,) and (ours > 0).all()
    with pytest.raises(ValueError, match="repeats=0"): B.paired_times(print, print, repeats=0)


def test_ratio_above_one_means_faster():
    bench = B.Bench("demo", measure=True)
    assert bench.ratio("x", lambda: sum(range(1000)), lambda: sum(range(200_000)), target=1e9) > 5
    assert "no" in bench.table()._cells(bench.rows[0])


def test_figures_are_kept_only_when_measured_as_benchmarks(results):
    look = B.Bench("demo", measure=False)
    look.value("size", 3.0, "MB", target_max=4)
    look.save()
    assert not results.exists()
    measured = B.Bench("demo", measure=True)
    measured.value("size", lambda: 5, "MB", target_max=4)
    measured.save()
    kept = json.loads(results.read_text())
    assert kept["rows"][0]["value"] == 5 and kept["environment"]["cores"] >= 1
    shown = B.Bench("demo", measure=False)
    assert shown.value("size", 3.0) == 5 and "Measured on" in repr(shown.table()) and B.tables()["demo"].rows == kept["rows"]


def test_views_escape():
    table = B.BenchTable([{"name": "a<b|c", "value": 2.0, "unit": "×", "low": 1.5, "high": None, "how": ""}], {})
    assert "a&lt;b|c" in table._repr_html_() and "a<b\\|c" in table._repr_markdown_() and "≥ 1.5 ×" in repr(table)


BENCHMARK = ["# Benchmarks\n> Halving against halving", 'from iclr26.lab.bench import Bench\nb = Bench("demo")\nb.value("size", SIZE, "MB", target_max=4)', "b.save()\nb.table()"]


def measured(library, size) -> tuple:
    from conftest import write_notebook
    write_notebook(library.folder / "nbs" / "demo" / "benchmarks.ipynb", [cell.replace("SIZE", size) for cell in BENCHMARK])
    done, path = library.cli("bench", "demo"), library.folder / "data" / "results" / "benchmarks" / "demo.json"
    return done, json.loads(path.read_text())["rows"][0]["value"]


@pytest.mark.slow
def test_command_measures_keeps_and_says_nothing_else(library):
    done, kept = measured(library, "3.0")
    assert done.returncode == 0 and not re.search("warning|error", done.stderr, re.I) and kept == 3 and "measuring demo" in done.stdout and "size  3 MB  ≤ 4 MB  yes" in done.stdout
    done, kept = measured(library, "1 / 0")
    assert done.returncode == 1 and kept == 3 and "cell 1 raised ZeroDivisionError: division by zero" in done.stdout + done.stderr and "Traceback" not in done.stdout + done.stderr
