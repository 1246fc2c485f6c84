"""Exact tables of transitive RL: closed forms, brute force, the notes' integers, bad input."""
import itertools
import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import brentq

from iclr26.transitive_rl.theory import (compounded_error, expected_leaf_depth, initial_values, refreshes_to_converge, shortest_paths,
                                         sweeps_to_converge, tabular_fixed_point, td_sweep, transitive_closure, transitive_sweep)

CHAIN = np.eye(5, k=1, dtype=bool)
A, B = [0, 1, 2, 9, 10, 11, 4], [0, 5, 6, 7, 2, 3, 4]


def graphs(max_n=9):
    return st.integers(1, max_n).flatmap(lambda n: st.lists(st.booleans(), min_size=n * n, max_size=n * n).map(lambda b: np.array(b).reshape(n, n)))


@settings(deadline=None)
@given(graphs())
def test_shortest_paths_equal_networkx(edges):
    found = dict(nx.all_pairs_shortest_path_length(nx.from_numpy_array(edges, create_using=nx.DiGraph)))
    n = len(edges)
    assert shortest_paths(edges).tolist() == [[found[s].get(g, -1) for g in range(n)] for s in range(n)]
    assert shortest_paths(edges).dtype == np.int64


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 10**6), st.floats(0, 1), st.integers(1, 9))
def test_closure_equals_floyd_warshall(n, seed, density, chunk):
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random((n, n)) < density, rng.integers(0, 9, (n, n)), np.inf)
    before, D = lengths.copy(), lengths.copy()
    np.fill_diagonal(D, 0)
    for k, i, j in itertools.product(range(n), repeat=3): D[i, j] = min(D[i, j], D[i, k] + D[k, j])
    assert np.array_equal(transitive_closure(lengths, chunk=chunk), D) and np.array_equal(lengths, before)


def test_closure_of_a_long_chain_is_exact_and_needs_no_cube():
    n = 344
    lengths = np.full((n, n), np.inf)
    lengths[np.arange(n - 1), np.arange(1, n)] = 1
    D = transitive_closure(lengths)
    assert np.array_equal(D, np.where(np.subtract.outer(range(n), range(n)) <= 0, -np.subtract.outer(range(n), range(n)), np.inf))


@settings(deadline=None)
@given(graphs(), st.floats(.1, .95))
def test_sweeps_equal_their_definition(edges, gamma):
    n = len(edges)
    V = np.random.default_rng(0).random((n, n))
    kept = V.copy()
    for sweep in (transitive_sweep, td_sweep):
        new = sweep(V, edges, gamma)
        for s, g in itertools.product(range(n), repeat=2):
            after = [V[x, g] for x in range(n) if edges[s, x]]
            other = max(V[s, w] * V[w, g] for w in range(n)) if sweep is transitive_sweep else gamma * max(after, default=0)
            assert new[s, g] == pytest.approx(1 if s == g else gamma if edges[s, g] else other, abs=1e-15)
    assert np.array_equal(V, kept)


@settings(deadline=None)
@given(graphs(12))
def test_transitive_values_are_exact_within_powers_of_two(edges):
    d, V = shortest_paths(edges), initial_values(edges, .9)
    for k in range(4):
        assert np.allclose(V, np.where((d >= 0) & (d <= 2**k), .9 ** d.clip(0), 0), atol=1e-12)
        V = transitive_sweep(V, edges, .9)
    diameter = int(d.max())
    assert sweeps_to_converge(edges, .9) == (math.ceil(math.log2(diameter)) if diameter > 1 else 0)
    assert sweeps_to_converge(edges, .9, rule="td") == max(diameter - 1, 0)


def test_chain_of_32_edges_needs_5_sweeps_and_td_31():
    chain = np.eye(33, k=1, dtype=bool)
    assert (sweeps_to_converge(chain, .9), sweeps_to_converge(chain, .9, rule="td")) == (5, 31)


def test_over_estimates_persist_under_the_hard_maximum_only():
    hard = td = initial_values(CHAIN, .9, fill=.99)
    for _ in range(50): hard, td = transitive_sweep(hard, CHAIN, .9), td_sweep(td, CHAIN, .9)
    assert hard[0, 4] == .99 and td[0, 4] == pytest.approx(.6561)
    assert tabular_fixed_point([[0, 1, 2, 3, 4]], 5, .9, init=.99)[0, 4] == pytest.approx(.6561, abs=1e-9)


@pytest.mark.parametrize("kappa", [.2, .5, .7, .95])
@pytest.mark.parametrize("midpoint", ["uniform", 1, 3, "end"])
def test_a_simple_trajectory_gives_exact_values(kappa, midpoint):
    V = tabular_fixed_point([range(9)], 9, .9, expectile=kappa, midpoint=midpoint, tol=1e-15)
    i, j = np.triu_indices(9)
    assert np.abs(V[i, j] - .9 ** (j - i)).max() < 1e-12
    assert (V[np.tril_indices(9, -1)] == 1e-6).all()


def literal_targets(V, trajectories, gamma, midpoint, lam):
    found = {}
    for t in trajectories:
        T = len(t) - 1
        for i, j in itertools.combinations(range(T + 1), 2):
            for k in range(i, j) if midpoint == "uniform" else [j] if midpoint == "end" else [min(i + midpoint, j)]:
                first = gamma ** (k - i) if k - i <= 1 or midpoint != "uniform" else V[t[i], t[k]]
                second = gamma ** (j - k) if j - k <= 1 else V[t[k], t[j]]
                y, draws = first * second, (j - i if midpoint == "uniform" else 1)
                found.setdefault((t[i], t[j]), []).append((y, (1 + math.log(y) / math.log(gamma)) ** -lam / (T - i) / draws))
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=9), min_size=1, max_size=4), st.sampled_from([.3, .5, .7, .9]), st.sampled_from([0, .5, 2]), st.sampled_from(["uniform", 1, 2, 3, "end"]))
def test_fixed_point_satisfies_the_literal_equation(trajectories, kappa, lam, midpoint):
    V = tabular_fixed_point(trajectories, 5, .9, expectile=kappa, lam=lam, midpoint=midpoint, tol=1e-13)
    targets = literal_targets(V, trajectories, .9, midpoint, lam)
    for (s, g), atoms in targets.items():
        y, w = np.array(atoms).T
        balance = lambda q: np.sum(w * np.where(y >= q, kappa, 1 - kappa) * (q - y))
        expected = 1 if s == g else y[0] if np.ptp(y) < 1e-14 else brentq(balance, y.min(), y.max(), xtol=1e-14)
        assert V[s, g] == pytest.approx(expected, rel=1e-8, abs=1e-10)
    for s, g in itertools.product(range(5), repeat=2):
        if (s, g) not in targets: assert V[s, g] == (1 if s == g else 1e-6)
    d = shortest_paths(np.array([[any((a, b) == (s, g) for t in trajectories for a, b in zip(t, t[1:])) for g in range(5)] for s in range(5)]))
    assert (V <= np.where(d < 0, 1e-6, .9 ** d.clip(0)) + 1e-12).all()   # from below, never above V*


def test_stitching_beats_monte_carlo_and_grows_with_kappa():
    mc = tabular_fixed_point([A, B], 12, .9, midpoint="end")[0, 4]
    values = [tabular_fixed_point([A, B], 12, .9, expectile=k)[0, 4] for k in (.5, .7, .9, .99)]
    assert mc == pytest.approx(.9**6) and values == sorted(values) and values[1] > mc and values[-1] < .9**4


def test_pairs_without_a_common_trajectory_keep_their_value():
    assert tabular_fixed_point([[0, 1, 2], [2, 3, 4]], 6, .9, init=.01)[0, 4] == .01


@pytest.mark.parametrize("T, row", [(16, [4, 15, 3, 1, 13, 9, 7]), (32, [5, 31, 7, 2, 16, 12, 9]), (64, [6, 63, 13, 3, 19, 14, 10])])
def test_refreshes_are_the_notes_integers(T, row):
    found = [refreshes_to_converge(T, midpoint=m) for m in ("half", 1, 5, 25)] + [refreshes_to_converge(T, expectile=k) for k in (.5, .7, .9)]
    assert found == row


def slow_refreshes(T, kappa, gamma, horizon=80):
    V, bad = {d: 1.0 if d == 0 else gamma if d == 1 else 1e-6 for d in range(T + 1)}, -1
    for refresh in range(horizon):
        if max(abs(math.log(V[d]) / math.log(gamma) / d - 1) for d in range(1, T + 1)) >= .1: bad = refresh
        new = dict(V)
        for d in range(2, T + 1):
            y = np.array([V[k] * V[d - k] for k in range(d)])
            balance = lambda q: np.sum(np.where(y >= q, kappa, 1 - kappa) * (q - y))
            new[d] = y[0] if np.ptp(y) == 0 else brentq(balance, y.min(), y.max(), xtol=1e-18, rtol=1e-14)
        V = new
    return bad + 1


@pytest.mark.parametrize("kappa", [.5, .8])
def test_refreshes_equal_a_slow_count(kappa):
    assert refreshes_to_converge(20, expectile=kappa, discount=.93) == slow_refreshes(20, kappa, .93)


@settings(deadline=None)
@given(st.integers(2, 90), st.integers(1, 30))
def test_n_step_refreshes_have_a_closed_form(T, n):
    # after r refreshes offsets up to r * n + 1 are exact, all others are far off
    assert refreshes_to_converge(T, midpoint=n) == math.ceil((T - 1) / n)


def test_leaf_depth():
    L = [0.0, 0.0]
    for T in range(2, 40): L.append(T + 2 / (T - 1) * sum(L[1:T]))
    assert [expected_leaf_depth(T) for T in range(1, 40)] == pytest.approx([L[T] / T for T in range(1, 40)])
    assert expected_leaf_depth(8) == pytest.approx(3.4357, abs=1e-4) and expected_leaf_depth(1024) == pytest.approx(13.018, abs=1e-3)


@settings(deadline=None)
@given(st.integers(0, 12), st.floats(-.1, .1))
def test_compounded_errors(power, rho):
    T = 2**power
    assert compounded_error(T, rho, "halves") == pytest.approx((1 + rho) ** power - 1, abs=1e-12)
    d = 1 if rho == 0 else None
    geometric = T if d else (1 + rho) ** (T - 1) + sum((1 + rho) ** k for k in range(1, T))
    assert compounded_error(T, rho) == pytest.approx(geometric / T - 1, rel=1e-8, abs=1e-9)
    assert compounded_error(64, .01) == pytest.approx(.40497, abs=1e-5) and compounded_error(64, .01, "halves") == pytest.approx(.06152, abs=1e-5)


def test_luck_is_composed():
    rng = np.random.default_rng(0)
    paths = [[0, 1, 15] if u < .25 else [0, *range(2, 15), 15] for u in rng.random(200)]
    values = [tabular_fixed_point(paths, 16, .9, expectile=k)[0, 15] for k in (.5, .7, .9, .99)]
    assert .25 * .81 + .75 * .9**14 < values[0] and values == sorted(values)


@pytest.mark.parametrize("call, words", [
    (lambda: shortest_paths(np.ones((2, 3))), "edges"), (lambda: shortest_paths(np.full((2, 2), .5)), "edges"), (lambda: shortest_paths(np.ones((0, 0))), "edges"),
    (lambda: transitive_closure([[0, -1], [1, 0]]), "lengths"), (lambda: transitive_closure([[0, np.nan], [1, 0]]), "lengths"), (lambda: transitive_closure([[0, 1]]), "lengths"),
    (lambda: transitive_closure([[0.]], chunk=0), "chunk=0"), (lambda: initial_values(CHAIN, 1.0), "discount=1.0"),
    (lambda: transitive_sweep(np.ones((4, 4)), CHAIN, .9), "V: "), (lambda: td_sweep(np.full((5, 5), np.nan), CHAIN, .9), "V: "),
    (lambda: sweeps_to_converge(CHAIN, .9, rule="mc"), "rule='mc'"), (lambda: sweeps_to_converge(CHAIN, .9, tol=-1), "tol=-1"),
    (lambda: tabular_fixed_point([[0, 5]], 5, .9), "trajectories[0]: state 5"), (lambda: tabular_fixed_point([[0, 1], [-1, 0]], 5, .9), "trajectories[1]: state -1"),
    (lambda: tabular_fixed_point([[0]], 5, .9), "trajectories[0]"), (lambda: tabular_fixed_point([], 5, .9), "trajectories"), (lambda: tabular_fixed_point([[0., 1.]], 5, .9), "whole numbers"),
    (lambda: tabular_fixed_point([[0, 1]], 5, 0), "discount=0"), (lambda: tabular_fixed_point([[0, 1]], 5, .9, expectile=1), "expectile=1"), (lambda: tabular_fixed_point([[0, 1]], 5, .9, lam=-1), "lam=-1"),
    (lambda: tabular_fixed_point([[0, 1]], 5, .9, midpoint="half"), "midpoint='half'"), (lambda: tabular_fixed_point([[0, 1]], 5, .9, midpoint=0), "midpoint=0"), (lambda: tabular_fixed_point([[0, 1]], 5, .9, init=0), "init=0"),
    (lambda: refreshes_to_converge(1), "T=1"), (lambda: refreshes_to_converge(8, midpoint="end"), "midpoint='end'"), (lambda: refreshes_to_converge(8, tol=0), "tol=0"),
    (lambda: expected_leaf_depth(0), "T=0"), (lambda: compounded_error(6, .01, "halves"), "T=6"), (lambda: compounded_error(8, .01, "mc"), "scheme='mc'"), (lambda: compounded_error(8, -1), "rho=-1"),
])
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError) as error: call()
    assert words in str(error.value)


def test_running_out_of_sweeps_is_an_error():
    with pytest.raises(RuntimeError, match="max_sweeps=2"): tabular_fixed_point([range(9)], 9, .9, max_sweeps=2)
    with pytest.raises(RuntimeError, match="tol"): sweeps_to_converge(np.eye(40, k=1, dtype=bool), .9, tol=0)
