"""The command line: round trip, resuming, exit codes, nothing half written."""
import json

import numpy as np
import pytest
import torch

from iclr26.lab.cli import main
from iclr26.transitive_rl import GridMaze, TrajectoryDataset, TRLAgent, collect_pointmaze
from iclr26.transitive_rl.agents import Agent

OPTIONS = "--hidden 16,16 --batch-size 32 --lr 0.003 --discount 0.9 --lam 1 --alpha 1 --seed 3".split()
run = lambda *args: main(["transitive_rl", *map(str, args)])


@pytest.fixture
def log(tmp_path):
    maze = GridMaze(["......"])
    maze.to_dataset(*maze.collect(10, 20, rng=0)).save(tmp_path / "log.npz")
    return tmp_path / "log.npz"


def same(a, b):
    x, y = a._state(), b._state()
    return x.keys() == y.keys() and all((x[k] == y[k]).all() for k in x) and a.steps_done == b.steps_done


def test_train_in_one_go_and_in_two_are_equal(log, tmp_path, capsys):
    assert run("train", log, "--out", tmp_path / "whole", "--steps", 30, "--save-every", 7, *OPTIONS) == 0
    assert run("train", log, "--out", tmp_path / "parts", "--steps", 12, *OPTIONS) == 0
    assert run("train", log, "--out", tmp_path / "parts", "--steps", 30, *OPTIONS) == 0
    assert "continuing" in capsys.readouterr().out
    whole = TRLAgent.load(tmp_path / "whole")
    assert same(whole, TRLAgent.load(tmp_path / "parts")) and whole.steps_done == 30 and whole.config.policy == "discrete"
    python = TRLAgent.for_dataset(whole.config, TrajectoryDataset.load(log))
    python.fit(TrajectoryDataset.load(log), 30)
    assert same(whole, python)


@pytest.mark.parametrize("kind, extra", [("td", ["--n", 3]), ("mc", []), ("gcbc", []), ("gciql", []), ("crl", []), ("qrl", [])])
def test_every_kind_trains(log, tmp_path, kind, extra):
    assert run("train", log, "--out", tmp_path / "agent", "--agent", kind, *extra, "--steps", 2, *OPTIONS) == 0
    agent = Agent.load(tmp_path / "agent")
    assert agent.kind == kind and agent.steps_done == 2
    if kind == "td": assert agent.n == 3


def test_distance_prints_the_agents_answer(log, tmp_path, capsys):
    run("train", log, "--out", tmp_path / "agent", "--steps", 5, *OPTIONS)
    capsys.readouterr()
    assert run("distance", tmp_path / "agent", log, 0, 7) == 0
    data, agent = TrajectoryDataset.load(log), TRLAgent.load(tmp_path / "agent")
    expected = float(agent.distance(data.observations[0].copy(), data.observations[7].copy()))
    assert capsys.readouterr().out.strip() == f"{expected:.1f} steps"


def test_collect_train_evaluate(tmp_path, capsys):
    pytest.importorskip("ogbench")
    play, agent = tmp_path / "play.npz", tmp_path / "agent"
    assert run("collect", "pointmaze-medium-v0", "--episodes", 2, "--steps", 50, "--out", play) == 0
    data = TrajectoryDataset.load(play)
    assert len(data) == 102 and data.goal_dim == 2
    assert run("collect", "pointmaze-medium-v0", "--episodes", 1, "--steps", 50, "--out", play) == 1     # exists
    assert len(TrajectoryDataset.load(play)) == 102
    assert run("collect", "pointmaze-medium-v0", "--episodes", 1, "--steps", 50, "--out", play, "--force") == 0
    assert len(TrajectoryDataset.load(play)) == 51
    assert run("train", play, "--env", "pointmaze-medium-navigate", "--out", agent, "--steps", 3, *OPTIONS) == 0
    assert TRLAgent.load(agent).config.discount == .9 and TRLAgent.load(agent).config.policy == "rpg"
    capsys.readouterr()
    assert run("evaluate", agent, "pointmaze-medium-v0", "--tasks", "1,3", "--episodes", 1, "--max-steps", 5, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["success"]) == {"1", "3"} and all(n <= 5 for v in found["lengths"].values() for n in v)
    assert run("evaluate", agent, "pointmaze-medium-v0", "--tasks", "1", "--episodes", 1, "--max-steps", 5, "--oracle") == 0


def test_faults_end_with_one_line_and_change_nothing(log, tmp_path, capsys):
    out = tmp_path / "agent"
    (tmp_path / "bad.npz").write_bytes(b"no npz")
    cases = [(("train", log, "--out", out, "--steps", 0), "steps=0"), (("train", log, "--out", out, "--agent", "sac"), "agent='sac'"), (("train", log, "--out", out, "--n", 3), "n=3"),
             (("train", log, "--out", out, "--hidden", "a,b"), "hidden='a,b'"), (("train", log, "--out", out, "--env", "go"), "name='go'"), (("train", log, "--out", out, "--discount", 1), "discount=1"),
             (("train", tmp_path / "no.npz", "--out", out), "no.npz"), (("train", tmp_path / "bad.npz", "--out", out), "bad.npz"), (("train", log, "--out", out, "--policy", "rpg"), "policy='rpg'"),
             (("train", log, "--out", out, "--save-every", 0), "save_every=0"), (("distance", out, log, 0, 1), "config.json"), (("train", log), "out")]
    for args, words in cases:
        assert run(*args) == 1, args
        error = capsys.readouterr().err
        assert words in error and len(error.strip().splitlines()) == 1, error
        assert not out.exists()
    run("train", log, "--out", out, "--steps", 2, *OPTIONS)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    capsys.readouterr()
    assert run("train", log, "--out", out, "--steps", 4, *OPTIONS, "--lam", 0) == 1
    assert "lam 1.0, not 0.0" in capsys.readouterr().err
    assert run("train", log, "--out", out, "--steps", 4, "--agent", "mc", *OPTIONS) == 1
    assert run("distance", out, log, 0, 10_000) == 1 and run("distance", out, log, -1, 0) == 1
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert run("train", log, "--out", out, "--steps", 1, "--agent", "mc", "--force", *OPTIONS) == 0
    assert Agent.load(out).kind == "mc"


def test_an_unknown_environment_lists_both_kinds(tmp_path, capsys):
    pytest.importorskip("ogbench")
    for name in ("nope-v0", "pointmaze-nope-v0", "antmaze-large-v0"):
        assert run("collect", name, "--out", tmp_path / "x.npz") == 1
        error = capsys.readouterr().err
        assert f"env_id='{name}'" in error and "pointmaze-medium-v0" in error and "puzzle-3x3-v0" in error and len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("extra", [[], ["--force"]])
def test_foreign_folders_are_refused_before_any_update(log, tmp_path, capsys, monkeypatch, extra):
    keep = tmp_path / "keep"
    keep.mkdir()
    assert run("train", log, "--out", keep, "--steps", 1, *OPTIONS, *extra) == 0           # an empty folder is new
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    monkeypatch.setattr(TRLAgent, "update", None)
    for out in (foreign, foreign / "thesis.tex"):
        capsys.readouterr()
        assert run("train", log, "--out", out, "--steps", 1, *OPTIONS, *extra) == 1
        error = capsys.readouterr().err
        assert f"folder='{out}' exists and is no saved agent" in error and "Errno" not in error and len(error.strip().splitlines()) == 1
    assert [p.name for p in foreign.iterdir()] == ["thesis.tex"]


def test_a_missing_device_and_missing_oracle_goals_end_with_one_line(log, tmp_path, capsys):
    device = "cuda:77" if torch.cuda.is_available() else "cuda"
    for extra, words in ((["--device", device], f"device='{device}': "), (["--oracle-distill"], "oracle_distill=True")):
        assert run("train", log, "--out", tmp_path / "agent", "--steps", 1, *OPTIONS, *extra) == 1
        error = capsys.readouterr().err
        assert words in error and len(error.strip().splitlines()) == 1 and not (tmp_path / "agent").exists()


def test_an_agent_of_another_machine_answers_and_continues_here(log, tmp_path, capsys):
    agent = tmp_path / "agent"
    run("train", log, "--out", agent, "--steps", 2, *OPTIONS)
    capsys.readouterr()
    assert run("distance", agent, log, 0, 7) == 0
    here = capsys.readouterr().out
    device = "cuda:77" if torch.cuda.is_available() else "cuda"
    saved = json.loads((agent / "config.json").read_text())
    saved["config"]["device"] = device
    (agent / "config.json").write_text(json.dumps(saved))
    evaluation = ("evaluate", agent, "pointmaze-medium-v0", "--tasks", "1", "--episodes", 1, "--max-steps", 2)
    for command in (("distance", agent, log, 0, 7), evaluation):
        assert run(*command) == 1
        error = capsys.readouterr().err
        assert f"device='{device}': " in error and len(error.strip().splitlines()) == 1
    assert run("distance", agent, log, 0, 7, "--device", "cpu") == 0
    assert capsys.readouterr().out == here
    assert run("train", log, "--out", agent, "--steps", 3, *OPTIONS) == 0                  # continues on the device of this command
    assert Agent.load(agent).config.device == "cpu" and Agent.load(agent).steps_done == 3


def test_evaluate_takes_a_device(tmp_path, capsys):
    pytest.importorskip("ogbench")
    collect_pointmaze(episodes=1, max_steps=20).save(tmp_path / "play.npz")
    run("train", tmp_path / "play.npz", "--out", tmp_path / "agent", "--steps", 1, *OPTIONS)
    command = ("evaluate", tmp_path / "agent", "pointmaze-medium-v0", "--tasks", "1", "--episodes", 1, "--max-steps", 2, "--device")
    assert run(*command, "cpu") == 0 and run(*command, "nonsense") == 1
    assert "device='nonsense'" in capsys.readouterr().err


def test_help_teaches(capsys):
    for command in ([], ["collect"], ["train"], ["evaluate"], ["distance"]):
        assert run(*command, "--help") == 0
    text = capsys.readouterr().out
    assert "collect pointmaze-medium-v0" in text and "continues after an interruption" in text
