"""Grid mazes against a search by hand; walks obey the walls."""
import itertools
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from iclr26.transitive_rl.environments import MAZES, GridMaze

layouts = st.integers(1, 5).flatmap(lambda w: st.lists(st.text("#.", min_size=w, max_size=w), min_size=1, max_size=5)).filter(lambda rows: any("." in r for r in rows))


@settings(deadline=None, max_examples=40)
@given(layouts, st.integers(1, 2))
def test_distances_and_moves_by_hand(rows, subdivide):
    maze = GridMaze(rows, subdivide=subdivide)
    free = {(r, c) for r in range(len(rows) * subdivide) for c in range(len(rows[0]) * subdivide) if rows[r // subdivide][c // subdivide] == "."}
    assert [tuple(c) for c in maze.cells] == sorted(free) and maze.n_states == len(free)
    number = {cell: i for i, cell in enumerate(sorted(free))}
    for cell, i in number.items():
        for a, (dr, dc) in enumerate([(-1, 0), (1, 0), (0, -1), (0, 1)]):
            assert maze.step(i, a) == number.get((cell[0] + dr, cell[1] + dc), i)
        seen, queue = {cell: 0}, deque([cell])
        while queue:
            r, c = queue.popleft()
            for n in ((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)):
                if n in free and n not in seen: seen[n] = seen[r, c] + 1; queue.append(n)
        assert maze.distances[i].tolist() == [seen.get(c, -1) for c in sorted(free)]
        assert {j for j in range(len(free)) if maze.adjacency[i, j]} == {number[c] for c, d in seen.items() if d == 1}


@settings(deadline=None, max_examples=25)
@given(layouts, st.sampled_from(["navigate", "random"]), st.integers(0, 99))
def test_walks_obey_the_maze_and_the_seed(rows, behaviour, seed):
    maze = GridMaze(rows)
    states, actions = maze.collect(3, 7, eps=.3, behaviour=behaviour, rng=seed)
    assert len(states) == len(actions) == 3 and all(s.shape == (8,) and a.shape == (7,) for s, a in zip(states, actions))
    for s, a in zip(states, actions): assert all(maze.step(x, m) == y for x, m, y in zip(s, a, s[1:]))
    again = maze.collect(3, 7, eps=.3, behaviour=behaviour, rng=seed)
    assert np.array_equal(states, again[0]) and np.array_equal(actions, again[1])


def test_navigation_without_noise_takes_shortest_paths():
    maze = GridMaze(MAZES["giant"])
    states, _ = maze.collect(20, 60, eps=0., rng=1)
    for s in states:
        assert (np.diff(s) != 0).all()                                   # never into a wall
        assert max(maze.distances[s[i], s[j]] == j - i for i, j in [(0, 1)]) and maze.distances[s[:-1], s[1:]].max() == 1
    random_walks, _ = maze.collect(20, 60, behaviour="random", rng=1)
    reach = lambda walks: np.mean([len(set(s.tolist())) for s in walks])
    assert reach(states) > 1.5 * reach(random_walks)


def test_ogbench_floor_plans():
    assert GridMaze(MAZES["giant"]).n_states == 86 and GridMaze(MAZES["medium"]).n_states == 26
    assert GridMaze(MAZES["giant"], subdivide=2).n_states == 344


def test_greedy_accuracy():
    maze = GridMaze(MAZES["medium"])
    assert maze.greedy_accuracy(.9 ** maze.distances) == 1
    assert maze.greedy_accuracy(-(.9 ** maze.distances)) < .2
    line = GridMaze(["..."])
    V = np.array([[9, 0, 0], [1, 9, 1], [5, 0, 9]], float)
    # pairs (0,1) (0,2) (1,0) (1,2) (2,0) (2,1): ends have one neighbour, always closer; from 1 toward 0 the larger of V(0,0)=9, V(2,0)=5; toward 2 of V(0,2)=0, V(2,2)=9
    assert line.greedy_accuracy(V) == 1
    V[0, 2] = 10
    assert line.greedy_accuracy(V) == pytest.approx(5 / 6)


def test_datasets():
    maze = GridMaze(["..", ".#"])
    states, actions = maze.collect(4, 5, rng=0)
    onehot, scaled = maze.to_dataset(states, actions), maze.to_dataset(states, actions, onehot=False)
    assert onehot.observations.argmax(1).tolist() == np.concatenate(states).tolist() and (onehot.observations.sum(1) == 1).all()
    assert scaled.observations[0].tolist() == (2 * maze.cells[states[0][0]] - 1).tolist()
    for data in (onehot, scaled):
        assert data.n_actions == 4 and data.n_trajectories == 4 and len(data) == 24 and data.is_deterministic()
        for k, a in enumerate(actions): assert data.actions[data.starts[k]:data.ends[k]].tolist() == a.tolist()


@pytest.mark.parametrize("call, words", [
    (lambda: GridMaze(["#x"]), "'x'"), (lambda: GridMaze(["#.", "#"]), "layout"), (lambda: GridMaze([]), "layout"), (lambda: GridMaze(["##"]), "free cell"), (lambda: GridMaze(["."], subdivide=0), "subdivide=0"),
    (lambda: GridMaze([".."]).step(2, 0), "state=2"), (lambda: GridMaze([".."]).step(0, 4), "action=4"),
    (lambda: GridMaze([".."]).collect(0, 5, rng=0), "episodes=0"), (lambda: GridMaze([".."]).collect(1, 0, rng=0), "max_steps=0"), (lambda: GridMaze([".."]).collect(1, 1, eps=2, rng=0), "eps=2"),
    (lambda: GridMaze([".."]).collect(1, 1, behaviour="fly", rng=0), "behaviour='fly'"), (lambda: GridMaze([".."]).greedy_accuracy(np.ones((3, 3))), "V: "),
    (lambda: GridMaze([".."]).greedy_accuracy(np.full((2, 2), np.nan)), "V: "), (lambda: GridMaze(["."]).greedy_accuracy([[1.]]), "no pair"),
    (lambda: GridMaze([".."]).to_dataset([np.zeros(3, int)], [np.zeros(3, int)]), "states"),
])
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError) as error: call()
    assert words in str(error.value)
