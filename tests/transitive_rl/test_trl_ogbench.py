"""Real OGBench environments, headless: data, evaluation, cache, faults."""
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("ogbench")

from iclr26.lab.extras import MissingExtra
from iclr26.transitive_rl import GuideAgent, TrajectoryDataset, collect_manipspace, collect_pointmaze, evaluate, load_ogbench, load_play, pointmaze_cells, rollout
from iclr26.transitive_rl.environments import MAZES, GridMaze, _make, _next_cells

MEDIUM = "pointmaze-medium-v0"


class Straight:
    def act(self, obs, goal): return np.clip(goal - obs, -1, 1)


class Still:
    def act(self, obs, goal): return np.zeros_like(obs)


@pytest.fixture(scope="module")
def play():
    return collect_pointmaze(MEDIUM, episodes=3, max_steps=150, seed=5)


def test_pointmaze_data_have_the_promised_shape(play):
    assert len(play) == 3 * 151 and play.n_trajectories == 3 and play.obs_dim == play.goal_dim == play.action_dim == 2
    assert (np.diff(np.r_[-1, play.ends]) == 151).all() and np.array_equal(play.oracle_reps, play.observations) and play.is_deterministic()


def test_pointmaze_data_obey_the_physics(play):
    inside = np.setdiff1d(np.arange(len(play) - 1), play.ends)
    step = play.observations[inside + 1] - play.observations[inside]
    free = np.abs(step - .2 * play.actions[inside]).max(1) < 1e-3         # not touching a wall
    assert free.mean() > .6 and np.abs(step).max() < .6
    maze, _ = pointmaze_cells(MEDIUM)
    cells = ((play.observations + 4 + 2) / 4).astype(int)
    assert maze.free[cells[:, 1], cells[:, 0]].all()                      # never inside a wall


def test_the_same_seed_gives_the_same_data_and_restores_numpy(play):
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    again = collect_pointmaze(MEDIUM, episodes=3, max_steps=150, seed=5)
    assert (np.random.get_state()[1] == before).all()
    assert np.array_equal(play.observations, again.observations) and np.array_equal(play.actions, again.actions)
    assert not np.array_equal(play.observations, collect_pointmaze(MEDIUM, episodes=3, max_steps=150, seed=6).observations)


def test_without_noise_the_walker_moves_at_full_speed_and_gets_around():
    data = collect_pointmaze(MEDIUM, episodes=2, max_steps=600, noise=0., seed=0)
    assert np.median(np.linalg.norm(data.actions[:600], axis=1)) == pytest.approx(1, abs=1e-4)
    assert len({tuple(c) for c in ((data.observations + 6) / 4).astype(int)}) >= 15     # of 26 cells


@pytest.mark.parametrize("env_id", [MEDIUM, "pointmaze-giant-v0"])
def test_the_tabulated_guide_is_the_environments_own(env_id):
    env, limit = _make(env_id)
    maze, next_cell = _next_cells(env.maze_map)
    assert limit == 1000 and np.array_equal(maze.free, GridMaze(MAZES[env_id.split("-")[1]]).free)
    rng = np.random.default_rng(0)
    for s, g in rng.integers(maze.n_states, size=(150, 2)):
        theirs, bfs = env.get_oracle_subgoal(env.ij_to_xy(maze.cells[s]), env.ij_to_xy(maze.cells[g]))
        assert np.array_equal(theirs, env.ij_to_xy(maze.cells[next_cell[s, g]]))
        assert bfs[tuple(maze.cells[s])] == maze.distances[s, g]


@pytest.mark.parametrize("env_id, obs, goal", [("puzzle-3x3-v0", 55, 9), ("cube-single-v0", 28, 3), ("scene-v0", 40, 7)])
def test_manipulation_play(env_id, obs, goal):
    data = collect_manipspace(env_id, episodes=2, max_steps=30, seed=1)
    assert (len(data), data.obs_dim, data.goal_dim, data.action_dim) == (62, obs, goal, 5) and data.ends.tolist() == [30, 61]
    assert np.abs(np.diff(data.observations[:31], axis=0)).max() > 1e-3
    again = collect_manipspace(env_id, episodes=1, max_steps=30, seed=1)
    assert np.array_equal(again.observations, data.observations[:31])


def test_puzzle_buttons_flip_their_neighbours():
    data = collect_manipspace("puzzle-3x3-v0", episodes=1, max_steps=80, seed=0)
    states = data.oracle_reps.reshape(-1, 3, 3)
    changes = [np.argwhere(states[t + 1] != states[t]) for t in range(80)]
    pressed = [c for c in changes if len(c)]
    assert pressed
    for c in pressed:   # a button and its direct neighbours: some cell at distance <= 1 of all others, 3 to 5 of them
        assert 3 <= len(c) <= 5 and any(np.abs(c - centre).sum(1).max() <= 1 for centre in c)


def test_a_guide_that_knows_the_maze_always_arrives_and_a_still_one_never():
    state = np.random.get_state()[1].copy()
    good = evaluate(GuideAgent(MEDIUM), MEDIUM, episodes=2, seed=3)
    assert good.overall == 1 and set(good.success) == {1, 2, 3, 4, 5} and all(len(v) == 2 for v in good.lengths.values())
    maze, _ = pointmaze_cells(MEDIUM)
    tasks = {1: ((1, 1), (6, 6)), 2: ((6, 1), (1, 6)), 3: ((5, 3), (4, 2)), 4: ((6, 5), (6, 1)), 5: ((2, 6), (1, 1))}
    index = {tuple(c): i for i, c in enumerate(maze.cells)}
    for t, (a, b) in tasks.items():     # at least the straight part of the way, at most twice the way along cell centres
        steps = 20 * maze.distances[index[a], index[b]]
        assert all(.5 * steps - 30 <= n <= 2 * steps + 40 for n in good.lengths[t]), (t, good.lengths[t], steps)
    still = evaluate(Still(), MEDIUM, tasks=[2], episodes=2, max_steps=20)
    assert still.success == {2: 0.0} and still.lengths == {2: [20, 20]} and still.overall == 0
    assert (np.random.get_state()[1] == state).all()


def test_episodes_do_not_depend_on_the_other_tasks():
    whole = evaluate(Straight(), MEDIUM, episodes=2, seed=1, max_steps=60)
    part = evaluate(Straight(), MEDIUM, tasks=[4], episodes=2, seed=1, max_steps=60)
    assert part.lengths[4] == whole.lengths[4] and part.success[4] == whole.success[4]
    assert whole == evaluate(Straight(), MEDIUM, episodes=2, seed=1, max_steps=60)
    path, goal, _ = rollout(Straight(), MEDIUM, 4, seed=1, episode=0, max_steps=60)
    assert len(path) - 1 == whole.lengths[4][0] and goal.shape == (2,)


@pytest.mark.parametrize("env_id, goal_dim", [(MEDIUM, 2), ("puzzle-3x3-v0", 9)])
def test_oracle_goals(env_id, goal_dim):
    seen = []

    class Spy:
        def act(self, obs, goal):
            seen.append(goal.shape)
            return np.zeros(2 if goal_dim == 2 else 5)
    evaluate(Spy(), env_id, tasks=[1], episodes=1, max_steps=2, oracle=True)
    assert set(seen) == {(goal_dim,)}


def test_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ICLR26_CACHE", str(tmp_path))
    first = load_play(MEDIUM, episodes=2, max_steps=20, seed=1)
    file, = tmp_path.rglob("*.npz")
    modified = file.stat().st_mtime_ns
    again = load_play(MEDIUM, episodes=2, max_steps=20, seed=1)
    assert file.stat().st_mtime_ns == modified and np.array_equal(first.observations, again.observations)
    file.write_bytes(file.read_bytes()[:100])                        # damaged: collected anew
    assert np.array_equal(load_play(MEDIUM, episodes=2, max_steps=20, seed=1).observations, first.observations)
    load_play(MEDIUM, episodes=2, max_steps=20, seed=2)
    assert len(list(tmp_path.rglob("*.npz"))) == 2


def test_ogbench_files(tmp_path, play):
    raw = dict(observations=play.observations, actions=play.actions, terminals=np.isin(np.arange(len(play)), play.ends), qpos=play.observations, qvel=0 * play.observations)
    np.savez(tmp_path / "x.npz", **raw)
    with pytest.raises(FileNotFoundError, match="x-val.npz"): load_ogbench("pointmaze-medium-navigate-v0", tmp_path / "x.npz")
    np.savez(tmp_path / "x-val.npz", **raw)
    data = load_ogbench("pointmaze-medium-navigate-v0", tmp_path / "x.npz")
    assert np.array_equal(data.observations, play.observations) and np.array_equal(data.ends, play.ends) and np.array_equal(data.oracle_reps, play.oracle_reps)
    for file in ("x.npz", "no.npz"):     # the name is judged first
        with pytest.raises(ValueError, match="name='nothing-play'"): load_ogbench("nothing-play", tmp_path / file)
    with pytest.raises(FileNotFoundError): load_ogbench("pointmaze-medium-navigate-v0", tmp_path / "no.npz")


@pytest.mark.parametrize("call, words", [
    (lambda: collect_pointmaze("pointmaze-tiny-v0"), "env_id='pointmaze-tiny-v0'"), (lambda: collect_pointmaze("puzzle-3x3-v0"), "pointmaze-medium-v0"), (lambda: collect_pointmaze(episodes=0), "episodes=0"),
    (lambda: collect_pointmaze(max_steps=0), "max_steps=0"), (lambda: collect_pointmaze(noise=-1), "noise=-1"), (lambda: collect_pointmaze(noise=float("nan")), "noise=nan"),
    (lambda: collect_manipspace(MEDIUM, episodes=1, max_steps=1), "env_id="), (lambda: collect_manipspace("puzzle-3x3-v0", episodes=True, max_steps=1), "episodes=True"),
    (lambda: collect_pointmaze(seed=-1), "seed=-1"), (lambda: evaluate(Still(), MEDIUM, seed=.5), "seed=0.5"), (lambda: load_play("antmaze-large-v0"), "env_id='antmaze-large-v0'"),
    (lambda: evaluate(Still(), MEDIUM, tasks=[6]), "tasks=[6]"), (lambda: evaluate(Still(), MEDIUM, tasks=[]), "tasks=[]"), (lambda: evaluate(Still(), MEDIUM, episodes=0), "episodes=0"),
    (lambda: evaluate(Still(), MEDIUM, max_steps=0), "max_steps=0"), (lambda: evaluate(Still(), "CartPole-v1"), "env_id='CartPole-v1'"),
])
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError) as error: call()
    assert words in str(error.value)


@pytest.mark.parametrize("env_id, oracle, dims, words", [
    (MEDIUM, False, dict(obs_dim=55, goal_dim=55), "env_id='pointmaze-medium-v0' has observations of 2 numbers, the agent takes 55"),
    ("puzzle-3x3-v0", False, dict(obs_dim=2, goal_dim=2), "env_id='puzzle-3x3-v0' has observations of 55 numbers, the agent takes 2"),
    ("puzzle-3x3-v0", True, dict(obs_dim=55, goal_dim=55), "env_id='puzzle-3x3-v0' has goals of 9 numbers with oracle=True, the agent takes 55"),
    ("puzzle-3x3-v0", False, dict(obs_dim=55, goal_dim=9), "env_id='puzzle-3x3-v0' has goals of 55 numbers with oracle=False, the agent takes 9"),
])
def test_an_agent_of_other_widths_is_refused_before_the_first_episode(env_id, oracle, dims, words):
    class Learned(Still):
        def act(self, obs, goal): raise AssertionError("an episode began")
    agent = Learned()
    vars(agent).update(dims)
    before = np.random.get_state()[1].copy()
    with pytest.raises(ValueError) as error: evaluate(agent, env_id, tasks=[1], episodes=1, oracle=oracle)
    assert words in str(error.value) and (np.random.get_state()[1] == before).all()


def test_the_check_of_widths_changes_no_episode():
    class Learned(Straight): obs_dim = goal_dim = 2
    plain = [len(rollout(Straight(), MEDIUM, 2, seed=3, episode=e, max_steps=300)[0]) - 1 for e in range(3)]
    assert evaluate(Learned(), MEDIUM, tasks=[2], episodes=3, seed=3, max_steps=300).lengths == {2: plain}


def test_without_the_extra(monkeypatch):
    """The rest of the package works, and the error names the extra."""
    for name in [m for m in sys.modules if m.split(".")[0] in ("ogbench", "gymnasium")]: monkeypatch.delitem(sys.modules, name)

    class Nothing:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("ogbench", "gymnasium"): raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
    monkeypatch.setattr(sys, "meta_path", [Nothing(), *sys.meta_path])
    with pytest.raises(MissingExtra, match=r"iclr26\[rl\]"): collect_pointmaze(episodes=1, max_steps=1)
    assert GridMaze([".."]).to_dataset(*GridMaze([".."]).collect(1, 2, rng=0)).n_actions == 4


def test_no_display_is_needed_and_a_choice_is_kept():
    code = "import os; from iclr26.transitive_rl.environments import _ogbench; _ogbench(); print(os.environ['MUJOCO_GL'])"
    run = lambda **env: subprocess.run([sys.executable, "-c", code], env={**{k: v for k, v in os.environ.items() if k not in ("MUJOCO_GL", "DISPLAY")}, **env}, capture_output=True, text=True, check=True).stdout.split()[-1]
    assert run() == "disable" and run(MUJOCO_GL="glfw") == "glfw"
    heavy = subprocess.run([sys.executable, "-c", "import sys, iclr26.transitive_rl; print([m for m in ('mujoco', 'gymnasium', 'ogbench', 'matplotlib', 'pandas', 'sklearn') if m in sys.modules])"], capture_output=True, text=True, check=True)
    assert heavy.stdout.strip() == "[]"
