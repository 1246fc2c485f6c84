"""Runs: reuse, resumption after SIGKILL, two processes on one folder, failing cells, Dask."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from iclr26.lab import runs
from iclr26.lab.claims import Claim, at_least

json_like = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                         lambda s: st.lists(s, max_size=4) | st.dictionaries(st.text().filter(lambda k: not k.startswith("__")), s, max_size=4), max_leaves=20)


def run_folder(library, seed=0) -> Path:
    found = list((library.folder / "runs" / "demo" / "smoke").glob(f"seed{seed}-*[0-9a-f]/"))
    assert len(found) == 1, found
    return found[0]


@given(json_like)
def test_json_round_trip_keeps_every_value(value):
    assert repr(runs.from_json(runs.to_json(value))) == repr(value)


@settings(max_examples=50)
@given(st.sampled_from(["float32", "float64", "int8", "uint64", "bool"]), st.lists(st.integers(0, 3), max_size=3))
def test_json_round_trip_keeps_arrays(dtype, shape):
    a = (np.arange(int(np.prod(shape))) * 1.5).astype(dtype).reshape(shape)
    b = runs.from_json(runs.to_json(a))
    assert a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)


def test_json_refuses_what_it_cannot_keep():
    with pytest.raises(TypeError, match="Path.*cannot be stored"): runs.to_json({"x": Path(".")})


def test_recorder_checks_before_it_stores(tmp_path):
    rec = runs.Recorder("demo", [Claim("D1", "s", "", "t", {"x": at_least(1)})], out=tmp_path)
    for bad in (lambda: rec.measure("D2", x=1), lambda: rec.measure("D1", y=1), lambda: rec.explain("D2", "r"), lambda: rec.not_tested("D2", "r")):
        with pytest.raises(ValueError, match="D2|y"): bad()
    with pytest.raises(TypeError, match="x="): rec.measure("D1", x="high")
    assert runs.read_metrics(tmp_path)["claims"]["D1"]["values"] == {}
    with pytest.raises(ValueError, match="D1"): runs.Recorder("demo", [Claim("D1", "s", "", "t")] * 2, out=tmp_path)
    with pytest.raises(ValueError, match="profile='huge'"): runs.Recorder("demo", [], profile="huge", out=tmp_path)
    for name in ("../x", "a/b", ""):
        with pytest.raises(ValueError, match="name="): rec.stage(name, lambda: 1)


def test_time_of_an_interrupted_attempt_counts(tmp_path):
    claims = [Claim("D1", "s", "", "t", {"x": at_least(1)})]
    first = runs.Recorder("demo", claims, out=tmp_path)
    first.started -= 100
    first.save()
    runs.Recorder("demo", claims, out=tmp_path)
    assert 100 <= runs.read_metrics(tmp_path)["seconds"] < 110


def test_damaged_metrics_are_named(tmp_path):
    for content in ("", "{", "[]", '{"claims": {}}', "\xff"):
        (tmp_path / "metrics.json").write_text(content)
        with pytest.raises(ValueError, match="metrics.json"): runs.read_metrics(tmp_path)


def test_reproduce_twice_runs_once(library):
    first = library.cli("reproduce", "demo", check=0)
    assert library.log == ["first 0", "first 1"] and "D1   supported" in first.stdout and "D2   refuted" in first.stdout
    second = library.cli("reproduce", "demo", check=0)
    assert library.log == ["first 0", "first 1"] and second.stdout.count("reused") == 2
    library.cli("reproduce", "demo", "--force", check=0)
    assert len(library.log) == 4
    folder = run_folder(library)
    assert {"executed.ipynb", "metrics.json", "done.json"} <= {p.name for p in folder.iterdir()}
    done = json.loads((folder / "done.json").read_text())
    assert done["environment"]["versions"]["numpy"] == np.__version__ and done["seconds"] > 0


def test_changed_notebook_changes_the_key(library):
    library.cli("reproduce", "demo", "--seeds", "1", check=0)
    text = library.reproduction.read_text()
    library.reproduction.write_text(text.replace("0.01 * seed", "0.02 * seed"))
    library.cli("reproduce", "demo", "--seeds", "1", check=0)
    assert library.log == ["first 0", "first 0"]


@pytest.mark.slow
def test_killed_run_resumes_behind_its_finished_stages(library):
    args = ("iclr26", "reproduce", "demo", "--seeds", "0,1", "-p", "slow=20", "--jobs", "1")
    process = library.popen(*args)
    wait_for(lambda: list((library.folder / "runs").rglob("stages/first.json")), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    stages = list((library.folder / "runs").rglob("stages/first.json"))
    assert len(stages) == 1 and not list((library.folder / "runs").rglob("done.json"))
    # the key holds the parameters, so the same command resumes; shorten the wait through the environment of time.sleep
    (library.folder / "sitecustomize.py").write_text("import time\ntime.sleep, _sleep = (lambda s: _sleep(min(s, 0.01))), time.sleep\n")
    library.cli(*args[1:], check=0)
    assert library.log == ["first 0", "first 1"]


@pytest.mark.slow
def test_sources_edited_during_a_run_rename_nothing(library):
    process = library.popen("iclr26", "reproduce", "demo", "--profile", "full", "-p", "slow=2", "--jobs", "1")
    wait_for(lambda: library.log, process)
    library.reproduction.write_text(library.reproduction.read_text().replace("0.01 * seed", "0.02 * seed"))
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0 and "D1" in output, output


@pytest.mark.slow
def test_two_processes_share_a_folder(library):
    both = [library.popen("iclr26", "reproduce", "demo", "--seeds", "0,", "-p", "slow=1") for _ in range(2)]
    outputs = [p.communicate(timeout=200)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    assert library.log == ["first 0"] and sum("reused" in o for o in outputs) == 1


def test_failing_cell_keeps_the_partial_notebook(library):
    done = library.cli("reproduce", "demo", "--seeds", "0,", "-p", "fail=true", check=1)
    assert re.search(r"cell \d+ of demo/reproduction.ipynb raised ValueError: asked to fail; partial notebook: .*partial.ipynb", done.stdout)
    assert "second line" not in done.stdout.split("failed:")[-1]
    partial = json.loads((run_folder(library) / "partial.ipynb").read_text())
    outputs = [o for c in partial["cells"] for o in c.get("outputs", [])]
    assert any(o["output_type"] == "error" for o in outputs) and not (run_folder(library) / "done.json").exists()
    library.cli("report", "demo", check=0)


def test_full_run_writes_the_committed_ledger_and_overrides_do_not(library):
    path = library.folder / "data" / "results" / "demo.json"
    library.cli("reproduce", "demo", "--profile", "full", "-p", "size=5", check=0)
    assert not path.exists()
    library.cli("reproduce", "demo", "--profile", "full", check=0)
    ledger = json.loads(path.read_text())
    assert ledger["seeds"] == [0, 1, 2] and ledger["claims"][0]["measures"][0]["values"] == pytest.approx([2.0, 2.01, 2.02])


def test_strict_speaks_of_contradicted_expectations(tmp_path):
    from conftest import Library
    contradicted = Library(tmp_path / "a", expect='"supported"')
    assert "contradicts expectation: demo D2: refuted, expected supported" in contradicted.cli("reproduce", "demo", "--strict", check=2).stdout
    contradicted.cli("reproduce", "demo", check=0)
    Library(tmp_path / "b").cli("reproduce", "demo", "--strict", check=0)


def wait_for(ready, process=None, seconds=120):
    end = time.time() + seconds
    while not ready():
        assert time.time() < end and (process is None or process.poll() is None), process and process.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
def test_local_cluster_of_two_worker_processes(library):
    script = library.folder / "cluster.py"
    script.write_text("""
from distributed import LocalCluster
from iclr26.lab import runs
if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        results = runs.reproduce(runs.grid(["demo"], "smoke"), "elsewhere", scheduler=cluster.scheduler_address)
    assert [r.error for r in results] == ["", ""], results
    assert all(runs.is_finished(r.folder) for r in results)
""")
    done = subprocess.run([sys.executable, str(script)], cwd=library.folder, env=library.env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(library.log) == ["first 0", "first 1"]


@pytest.mark.slow
def test_separately_started_scheduler_and_worker(library, tmp_path):
    info = tmp_path / "scheduler.json"
    scheduler = library.popen("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", info)
    worker = None
    try:
        wait_for(info.exists, scheduler)
        address = json.loads(info.read_text())["address"]
        worker = library.popen("distributed.cli.dask_worker", address, "--nworkers", "1", "--nthreads", "1", "--no-dashboard", "--local-directory", tmp_path / "scratch")
        done = library.cli("reproduce", "demo", "--scheduler", address, check=0)
        assert "D1   supported" in done.stdout and sorted(library.log) == ["first 0", "first 1"]
    finally:
        for process in (worker, scheduler):
            if process: process.terminate(), process.wait(30)


def test_folder_of_a_worker_without_our_disk_is_unpacked_whole(tmp_path):
    source, target = tmp_path / "there", tmp_path / "here" / "seed0"
    (source / "figures").mkdir(parents=True)
    (source / "figures" / "a.png").write_bytes(b"png")
    (source / "done.json").write_text("{}")
    runs._unpack(runs._pack(source), target)
    assert (target / "figures" / "a.png").read_bytes() == b"png" and runs.is_finished(target)
    assert [p.name for p in target.parent.iterdir()] == ["seed0"]


def test_dead_scheduler_is_one_line(library):
    done = library.cli("reproduce", "demo", "--scheduler", "tcp://127.0.0.1:9", check=1)
    assert done.stderr.strip().splitlines()[-1].startswith("iclr26: scheduler='tcp://127.0.0.1:9' does not answer")


@pytest.mark.parametrize("args, words", [
    (["reproduce", "dmo"], "did you mean demo"),
    (["reproduce", "demo", "--profile", "big"], "profile='big': expected one of smoke, full, gpu"),
    (["reproduce", "demo", "--seeds", "x"], "seeds='x': expected a number of seeds"),
    (["reproduce", "demo", "--seeds", "-1,2"], "seeds='-1,2'"),
    (["reproduce", "demo", "-p", "size"], "-p 'size': expected name=value"),
    (["reproduce", "demo", "-p", "length=3"], "['length'] is unknown to demo: expected fail, size, slow"),
    (["reproduce", "demo", "-p", "seed=3"], "['seed'] is unknown"),
    (["reproduce", "demo", "--out", "settings.ini"], "out='settings.ini': expected a folder"),
    (["reproduce", "demo", "--jobs", "0"], "--jobs"),
    (["show", "nothing"], "paper='nothing' is not in the library"),
    (["nonsense"], "nonsense"),
])
def test_bad_input_is_one_line_and_leaves_no_trace(library, args, words):
    done = library.cli(*args, check=1)
    assert words in done.stderr and done.stderr.strip().count("\n") == 0 and "Traceback" not in done.stderr
    assert library.log == [] and not (library.folder / "runs").exists()


@pytest.mark.slow
def test_interrupt_stops_at_once_and_the_same_command_resumes(library):
    process = subprocess.Popen([sys.executable, "-m", "iclr26", "reproduce", "demo", "--seeds", "0,", "-p", "slow=60"], cwd=library.folder, env=library.env,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    wait_for(lambda: library.log, process)
    os.killpg(process.pid, signal.SIGINT)
    started = time.time()
    _, errors = process.communicate(timeout=50)
    assert process.returncode == 130 and time.time() - started < 40 and errors.strip() == "iclr26: interrupted; the same command resumes"
    assert not list((library.folder / "runs").rglob("done.json"))
