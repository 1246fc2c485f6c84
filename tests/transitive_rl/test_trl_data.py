"""Trajectories, triples and files: distributions by enumeration, invariants by property, every refusal, damaged files."""
import io
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iclr26.transitive_rl.data import StochasticDynamicsWarning, TrajectoryDataset, TransitiveBatch

LENGTHS = st.lists(st.integers(2, 9), min_size=1, max_size=6)


def make(lengths, *, discrete=False, oracle=False, seed=0) -> TrajectoryDataset:
    "Row r has observation (r, trajectory) and action r/N or r mod 3, so that a batch can be traced back."
    n, rng = sum(lengths), np.random.default_rng(seed)
    trajectory = np.repeat(np.arange(len(lengths)), lengths)
    ends = np.zeros(n, bool)
    ends[np.cumsum(lengths) - 1] = True
    rows = np.arange(n)
    actions = rows % 3 if discrete else np.stack([(rows + 1) / (n + 1), -(rows + 1) / (n + 1)], 1)
    return TrajectoryDataset(np.stack([rows, trajectory], 1).astype(float), actions, ends, rng.standard_normal((n, 3)) if oracle else None, n_actions=3 if discrete else None)


# the data set ------------------------------------------------------------------------------------------------------------
@given(LENGTHS)
def test_bounds(lengths):
    d = make(lengths)
    assert d.ends.tolist() == (np.cumsum(lengths) - 1).tolist() and (d.ends - d.starts + 1).tolist() == lengths
    assert d.ends.dtype == d.starts.dtype == np.int64 and d.n_trajectories == len(lengths) and len(d) == sum(lengths)
    assert (d.obs_dim, d.goal_dim, d.action_dim, d.n_actions) == (2, 2, 2, None)


def test_dtypes_clipping_and_dimensions():
    d = TrajectoryDataset(np.ones((2, 3), np.float64), [[1.0], [-1.0]], [False, True], torch.zeros(2, 5))
    assert d.observations.dtype == d.actions.dtype == d.oracle_reps.dtype == np.float32
    assert d.actions.ravel().tolist() == [np.float32(1 - 1e-5), -np.float32(1 - 1e-5)]
    assert d.goal_dim == 5 and d.action_dim == 1
    d = TrajectoryDataset(torch.ones(2, 3), torch.tensor([4, 0], dtype=torch.int32), [0., 1.])
    assert d.actions.dtype == np.int64 and d.n_actions == 5 and d.action_dim is None
    assert "5 discrete actions" in repr(d)


def test_arrays_are_read_only_and_inputs_untouched():
    obs, act = np.ones((2, 1), np.float32), np.full((2, 1), 3.0, np.float32)
    with pytest.warns(UserWarning, match="outside"): d = TrajectoryDataset(obs, act, [0, 1])
    assert act[0, 0] == 3 and obs.flags.writeable
    with pytest.raises(ValueError): d.observations[0] = 0


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_later_changes_of_the_inputs_do_not_reach_the_data(kind):
    for act in (np.full((2, 1), .5, np.float32), np.array([3, 1])):
        inputs = [kind(x) for x in (np.ones((2, 1), np.float32), act, np.array([False, True]), np.ones((2, 4), np.float32))]
        d = TrajectoryDataset(*inputs)
        kept = [x.copy() for x in (d.observations, d.actions, d.ends, d.oracle_reps)]
        for x in inputs: x[:] = 0
        assert all(np.array_equal(a, b) for a, b in zip(kept, (d.observations, d.actions, d.ends, d.oracle_reps)))


def test_actions_outside_the_range_are_clipped_with_a_warning():
    with pytest.warns(UserWarning, match=r"25\.0% .*outside \[-1, 1\].*largest is 7 .*scale actions to \[-1, 1\]"):
        d = TrajectoryDataset(np.zeros((3, 1)), [[.5, -7.], [0., 1.], [.2, .2]], [0, 0, 1])
    assert d.actions[0].tolist() == [.5, -np.float32(1 - 1e-5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrajectoryDataset(np.zeros((3, 1)), [[1 + 1e-7, -1.], [0., 1.], [99., np.float32(-50)]], [0, 0, 1])     # the last row's action is never used


GOOD = dict(observations=[[0.], [1.], [2.], [3.]], actions=[[0.], [0.], [0.], [0.]], terminals=[0, 1, 0, 1])


@pytest.mark.parametrize("change, message", [
    (dict(observations=[0., 1., 2., 3.]), "observations has shape"),
    (dict(observations=np.zeros((4, 0))), "observations has shape"),
    (dict(observations=[[0.], [1.], [np.nan], [3.]]), r"observations\[2, 0\]=nan"),
    (dict(observations=[[0.], [1.], [1e300], [3.]]), r"observations\[2, 0\]=inf"),
    (dict(observations=[["a"]] * 4), "observations has dtype"),
    (dict(actions=[[0.], [np.inf], [0.], [0.]]), r"actions\[1, 0\]=inf"),
    (dict(actions=[0., 0., 0., 0.]), "actions has shape"),
    (dict(actions=[[0], [0], [0], [0]]), "actions of dtype"),
    (dict(actions=[True] * 4), "actions of dtype"),
    (dict(actions=[[0.]] * 3), "actions has 3 rows: expected 4"),
    (dict(actions=[0, -1, 0, 0]), "actions range over -1"),
    (dict(actions=[0, 2, 0, 0], n_actions=2), r"0\.\.2: expected integers in 0\.\.1"),
    (dict(actions=[0, 0, 0, 0], n_actions=0), "n_actions=0"),
    (dict(n_actions=3), "n_actions=3: expected None"),
    (dict(terminals=[0, 1, 0, 0]), "terminals"),
    (dict(terminals=[0, 1, 1, 1]), "trajectory at row 2 has 1 row"),
    (dict(terminals=[0, 2, 0, 1]), "terminals holds 2"),
    (dict(terminals=[[0], [1], [0], [1]]), "terminals has shape"),
    (dict(terminals=[0, 1]), "terminals has 2 rows"),
    (dict(oracle_reps=[[0.]] * 5), "oracle_reps has 5 rows"),
    (dict(oracle_reps=[[0.], [0.], [0.], [-np.inf]]), r"oracle_reps\[3, 0\]=-inf"),
    (dict(observations=np.zeros((0, 1)), actions=np.zeros((0, 1)), terminals=[]), "0 rows"),
])
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message): TrajectoryDataset(**GOOD | change)


# triples -----------------------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.booleans(), st.booleans(), st.sampled_from(["geometric", "uniform"]), st.one_of(st.sampled_from(["uniform", "end"]), st.integers(1, 12)), st.sampled_from([0., .5, 1.]), st.integers(0, 999))
def test_batch_invariants(lengths, discrete, oracle, goal, midpoint, p_random, seed):
    d = make(lengths, discrete=discrete, oracle=oracle)
    b = d.sample_transitive(64, .8, goal=goal, midpoint=midpoint, actor_goal="geometric", actor_p_random=p_random, rng=seed)
    i, k, j, actor_j = (x.numpy() for x in (b.i, b.k, b.j, b.actor_j))
    end = d.ends[np.searchsorted(d.ends, i)]
    assert len(b) == 64 and all(x.dtype == torch.int64 for x in (b.i, b.k, b.j, b.actor_j, b.d_first, b.d_second))
    assert ((i < j) & (j <= end)).all() and (b.d_first.numpy() == k - i).all() and (b.d_second.numpy() == j - k).all()
    if midpoint == "uniform": assert ((i <= k) & (k < j)).all()
    else: assert (k == (j if midpoint == "end" else np.minimum(i + midpoint, j))).all()
    assert (actor_j < len(d)).all() and (p_random > 0 or ((i < actor_j) & (actor_j <= end)).all())
    for name, rows in (("obs", i), ("mid_obs", k), ("goal_obs", j)): assert np.array_equal(getattr(b, name).numpy(), d.observations[rows])
    for name, rows in (("goal", j), ("mid_goal", k), ("actor_goal", actor_j)): assert np.array_equal(getattr(b, name).numpy(), (d.oracle_reps if oracle else d.observations)[rows])
    assert np.array_equal(b.act.numpy(), d.actions[i])
    last = np.isin(k, d.ends)
    assert not b.mid_act.numpy()[last].any() and np.array_equal(b.mid_act.numpy()[~last], d.actions[k[~last]])
    assert b.act.dtype == (torch.int64 if discrete else torch.float32)


def exact_pairs(lengths, goal, discount):
    "Probability of each (i, j)."
    total, p, first = sum(n - 1 for n in lengths), {}, 0
    for n in lengths:
        for i in range(first, first + n - 1):
            left = first + n - 1 - i
            for step in range(1, left + 1):
                p[i, i + step] = (1 / left if goal == "uniform" else (1 - discount) * discount ** (step - 1) if step < left else discount ** (left - 1)) / total
        first += n
    return p


@pytest.mark.parametrize("goal", ["geometric", "uniform"])
def test_distribution_of_triples(goal):
    "Every (i, k, j) within five standard deviations of its exact probability, trajectories of unequal lengths."
    lengths, n = [2, 5, 3], 200_000
    d, pairs = make(lengths), exact_pairs([2, 5, 3], goal, .7)
    assert sum(pairs.values()) == pytest.approx(1)
    b = d.sample_transitive(n, .7, goal=goal, rng=3)
    triples, counts = np.unique(np.stack([b.i, b.k, b.j], 1), axis=0, return_counts=True)
    expected = {(i, k, j): p / (j - i) for (i, j), p in pairs.items() for k in range(i, j)}
    assert {tuple(t) for t in triples.tolist()} == set(expected)
    for t, c in zip(triples.tolist(), counts):
        p = expected[tuple(t)]
        assert abs(c - n * p) < 5 * np.sqrt(n * p * (1 - p)), t


def test_random_actor_goals_reach_every_row():
    b = make([2, 3]).sample_transitive(20_000, .9, actor_p_random=1.0, rng=0)
    counts = np.bincount(b.actor_j, minlength=5)
    assert abs(counts - 4000).max() < 5 * np.sqrt(20_000 * .16)
    half = make([2, 3]).sample_transitive(20_000, .9, actor_goal="uniform", actor_p_random=0.5, rng=0)
    first = half.i.numpy() == 0                                             # in the trajectory only row 1 can follow row 0
    assert abs((half.actor_j.numpy()[first] == 1).mean() - (.5 + .5 / 5)) < .03


def test_seeds_and_generators():
    d = make([5, 7])
    same = lambda a, b: all(torch.equal(getattr(a, f), getattr(b, f)) for f in ("i", "k", "j", "actor_j", "obs", "act"))
    assert same(d.sample_transitive(50, .9, rng=1), d.sample_transitive(50, .9, rng=np.random.default_rng(1)))
    rng = np.random.default_rng(1)
    assert not same(d.sample_transitive(50, .9, rng=rng), d.sample_transitive(50, .9, rng=rng))


def test_tiny_and_huge_horizons():
    d = make([9])
    assert (d.sample_transitive(200, 1e-12, rng=0).d_second + d.sample_transitive(200, 1e-12, rng=0).d_first == 1).all()
    assert (d.sample_transitive(200, 1 - 1e-15, rng=0).j == 8).all()


def test_batch_moves_between_devices():
    b = make([4]).sample_transitive(3, .9, rng=0).to("meta")
    assert isinstance(b, TransitiveBatch) and b.obs.device.type == b.i.device.type == "meta"


@pytest.mark.parametrize("change, message", [
    (dict(batch_size=0), "batch_size=0"), (dict(batch_size=2.5), "batch_size=2.5"), (dict(discount=1.0), "discount=1.0"), (dict(discount=0), "discount=0"), (dict(discount=float("nan")), "discount=nan"),
    (dict(goal="end"), "goal='end'"), (dict(actor_goal="near"), "actor_goal='near'"), (dict(midpoint=0), "midpoint=0"), (dict(midpoint="half"), "midpoint='half'"), (dict(midpoint=1.5), "midpoint=1.5"),
    (dict(actor_p_random=1.1), "actor_p_random=1.1"), (dict(actor_p_random=-.1), "actor_p_random"), (dict(rng=-1), "rng=-1"), (dict(rng=None), "rng=None"),
])
def test_sampling_refusals(change, message):
    d = make([4])
    arguments = dict(batch_size=2, discount=.9, rng=0) | change
    with pytest.raises(ValueError, match=message): d.sample_transitive(arguments.pop("batch_size"), arguments.pop("discount"), **arguments)


# determinism -------------------------------------------------------------------------------------------------------------
def brute_deterministic(d):
    seen = {}
    for r in sorted(set(range(len(d))) - set(d.ends.tolist())):
        key = d.observations[r].tobytes() + d.actions[r].tobytes()
        if seen.setdefault(key, d.observations[r + 1].tobytes()) != d.observations[r + 1].tobytes(): return False
    return True


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(0, 10**6), st.booleans(), st.integers(2, 6))
def test_determinism_by_brute_force(lengths, seed, discrete, states):
    rng, n = np.random.default_rng(seed), sum(lengths)
    d = TrajectoryDataset(rng.integers(0, states, (n, 1)), rng.integers(0, 2, n) if discrete else rng.integers(0, 2, (n, 1)) * .5, np.isin(np.arange(n), np.cumsum(lengths) - 1))
    assert d.is_deterministic() == brute_deterministic(d)


def test_last_rows_say_nothing_about_dynamics():
    d = TrajectoryDataset([[0.], [1.], [1.], [0.]], [[.5], [.5], [.5], [.5]], [0, 1, 0, 1])   # row 1 is last, row 2 has the same observation and action
    assert d.is_deterministic()
    assert not TrajectoryDataset([[0.], [1.], [0.], [-0.]], [[0.]] * 4, [0, 1, 0, 1]).is_deterministic()
    assert issubclass(StochasticDynamicsWarning, UserWarning)


# OGBench -----------------------------------------------------------------------------------------------------------------
def ogbench(lengths, reps=False, discrete=False):
    "Compact and regular arrays of the same trajectories of states."
    rng, compact, regular = np.random.default_rng(0), [], []
    for n in lengths:
        s, a, r = rng.standard_normal((n, 3)).astype("f4"), rng.integers(0, 4, n) if discrete else rng.uniform(-1, 1, (n, 2)).astype("f4"), rng.standard_normal((n, 2)).astype("f4")
        end = np.arange(n) >= n - 2
        compact.append(dict(observations=s, actions=a, terminals=end.astype("f4"), valids=(np.arange(n) < n - 1).astype("f4"), oracle_reps=r))
        regular.append(dict(observations=s[:-1], next_observations=s[1:], actions=a[:-1], terminals=(np.arange(n - 1) == n - 2).astype("f4"), oracle_reps=r[:-1]))
    join = lambda parts: {key: np.concatenate([p[key] for p in parts]) for key in parts[0] if reps or key != "oracle_reps"}
    return join(compact), join(regular)


@pytest.mark.parametrize("discrete", [False, True])
def test_both_layouts_agree(discrete):
    compact, regular = ogbench([3, 6, 2], discrete=discrete)
    a, b = TrajectoryDataset.from_ogbench(compact), TrajectoryDataset.from_ogbench(regular)
    assert np.array_equal(a.observations, b.observations) and a.ends.tolist() == b.ends.tolist() == [2, 8, 10] and len(a) == 11
    used = np.setdiff1d(np.arange(11), a.ends)
    assert np.array_equal(a.actions[used], b.actions[used]) and not b.actions[b.ends].any()


def test_oracle_representations():
    compact, regular = ogbench([3, 6], reps=True)
    a, b = TrajectoryDataset.from_ogbench(compact), TrajectoryDataset.from_ogbench(regular)
    assert np.array_equal(a.oracle_reps, compact["oracle_reps"]) and a.ends.tolist() == [2, 8]
    assert np.array_equal(b.oracle_reps, regular["oracle_reps"]) and b.ends.tolist() == [1, 6] and len(b) == 7     # kept as they are
    assert (a.sample_transitive(500, .99, rng=0).j == 8).any()                                                     # the very last state is a goal


@pytest.mark.parametrize("drop, extra, message", [
    ("valids", {}, "one of valids, next_observations"), ("actions", {}, "expected observations, actions"), ("observations", {}, "expected observations"), (None, {"valids": np.full(9, 2)}, "valids holds 2"),
])
def test_from_ogbench_refusals(drop, extra, message):
    compact, regular = ogbench([3, 6])
    data = {key: x for key, x in (compact | extra).items() if key != drop}
    with pytest.raises(ValueError, match=message): TrajectoryDataset.from_ogbench(data)
    with pytest.raises(ValueError, match="mapping"): TrajectoryDataset.from_ogbench(list(regular))
    with pytest.raises(ValueError, match="next_observations"): TrajectoryDataset.from_ogbench(regular | {"next_observations": regular["next_observations"][:-1]})
    with pytest.raises(ValueError, match="terminals"): TrajectoryDataset.from_ogbench(regular | {"terminals": np.zeros(7)})


# files -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("discrete, oracle", [(False, False), (False, True), (True, False), (True, True)])
def test_files_come_back(tmp_path, discrete, oracle):
    d = make([3, 4], discrete=discrete, oracle=oracle)
    d.save(tmp_path / "data.npz")
    again = TrajectoryDataset.load(str(tmp_path / "data.npz"))
    assert [p.name for p in tmp_path.iterdir()] == ["data.npz"]
    assert all(np.array_equal(getattr(d, f), getattr(again, f)) for f in ("observations", "actions", "starts", "ends"))
    assert again.n_actions == d.n_actions and (again.oracle_reps is None) == (d.oracle_reps is None)
    assert torch.equal(d.sample_transitive(9, .9, rng=0).goal, again.sample_transitive(9, .9, rng=0).goal)
    with np.load(tmp_path / "data.npz", allow_pickle=False) as z: TrajectoryDataset(**{key: z[key] if z[key].ndim else int(z[key]) for key in z.files})


@pytest.mark.parametrize("keep", [0, 10, 100, 0.5, 0.95])
def test_truncated_files(tmp_path, keep):
    path = tmp_path / "data.npz"
    make([30, 40]).save(path)
    blob = path.read_bytes()
    path.write_bytes(blob[:int(keep if isinstance(keep, int) else keep * len(blob))])
    with pytest.raises(ValueError, match="data.npz"): TrajectoryDataset.load(path)


def test_flipped_bits_and_foreign_files(tmp_path):
    path = tmp_path / "data.npz"
    make([30, 40]).save(path)
    blob = bytearray(path.read_bytes())
    at = blob.index(np.float32(17).tobytes())
    blob[at + 1] ^= 255
    path.write_bytes(bytes(blob))
    with pytest.raises(ValueError, match="data.npz"): TrajectoryDataset.load(path)
    np.savez(path, observations=np.zeros((2, 1)), rewards=np.zeros(2))
    with pytest.raises(ValueError, match="rewards"): TrajectoryDataset.load(path)
    np.savez(path, observations=np.array([{}], dtype=object), actions=np.zeros((2, 1)), terminals=[0, 1])
    with pytest.raises(ValueError, match="data.npz"): TrajectoryDataset.load(path)                # pickles are not read
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="data.npz"): TrajectoryDataset.load(path)
    with pytest.raises(FileNotFoundError): TrajectoryDataset.load(tmp_path / "none.npz")


def test_file_messages_name_the_path_and_advise_no_pickle(tmp_path):
    path = tmp_path / "data.npz"
    with pytest.raises(FileNotFoundError, match="path='.*missing/x.npz': there is no folder .*missing$"): make([3]).save(tmp_path / "missing" / "x.npz")
    assert not list(tmp_path.iterdir())
    path.write_text("observations,actions,terminals\n")
    with pytest.raises(ValueError, match="data.npz is no readable npz file .*not a zip archive") as error: TrajectoryDataset.load(path)
    assert "pickle" not in str(error.value)


def test_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path, d = tmp_path / "data.npz", make([3])
    d.save(path)
    before = path.read_bytes()
    def broken(f, **arrays):
        f.write(b"half")
        raise OSError("disk full")
    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(OSError, match="disk full"): make([5]).save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["data.npz"]
