"""What is left out for speed changes nothing: constant coordinates, weightless pairs; the summary of the data against NumPy."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.datasets import load_digits

from iclr26.optimal_loss import optimal_loss, subset_estimates
from iclr26.optimal_loss.estimators import _Scan

F64 = torch.float64
DIGITS = torch.from_numpy(load_digits().data).float() / 8 - 1
LEVELS = [.1, .4, 1., 5.]


def bordered(n=60, d=80, live=24, seed=0):
    x = torch.randn(n, d, dtype=F64, generator=torch.Generator().manual_seed(seed))
    x[:, torch.randperm(d, generator=torch.Generator().manual_seed(1))[live:]] = 3.0
    return x


def shaken(x):
    "The same points, but no coordinate is constant any more."
    return x + 1e-9 * torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("live", [1, 7, 24, 70])
@pytest.mark.parametrize("more", [dict(), dict(form="a_minus_b"), dict(form="mse"), dict(form="pair"), dict(method="knn", subset=30, neighbors=5), dict(method="cdol", subset=20), dict(method="snis", subset=20),
                                  dict(labels=[0, 1] * 30), dict(weights=list(range(60)))], ids=str)
def test_constant_coordinates_change_nothing(more, live):
    x = bordered(live=live)
    a, b = (optimal_loss(v, LEVELS, dtype=F64, n_noise=90, **more) for v in (x, shaken(x)))
    assert torch.allclose(a.value, b.value, rtol=1e-6, atol=1e-6) and torch.allclose(a.stderr, b.stderr, rtol=1e-5, atol=1e-6)
    assert a.dim == b.dim == 80 and a.n_distinct == 60 and math.isclose(a.tr_cov, b.tr_cov, rel_tol=1e-6) and math.isclose(a.A, b.A, rel_tol=1e-6)


def test_constant_coordinates_of_maps_and_equal_points(tmp_path):
    x = bordered().float()
    np.save(tmp_path / "x.npy", x.numpy())
    a, b = optimal_loss(x, LEVELS), optimal_loss(tmp_path / "x.npy", LEVELS)
    assert torch.equal(a.value, b.value) and a.dim == b.dim == 80
    same = optimal_loss(torch.ones(5, 80), LEVELS)
    assert (same.value == 0).all() and same.n_distinct == 1 and same.tr_cov == 0


@pytest.mark.parametrize("C", [1., 30.])
def test_pairs_without_weight_change_nothing(C):
    "Levels from all weight on the source to all pairs carrying weight; float64 adds every pair."
    eps, levels = torch.randn(400, 64, dtype=F64, generator=torch.Generator().manual_seed(0)), torch.logspace(-1, 1, 16)
    a, b = (subset_estimates(DIGITS[:400].to(t), eps.to(t), DIGITS.to(t), levels, C=C, self_index=torch.arange(400)) for t in (torch.float32, F64))
    assert torch.allclose(a.xhat.double(), b.xhat, atol=2e-5)
    for name in ("condvar", "pair"): assert torch.allclose(getattr(a, name).double(), getattr(b, name), rtol=1e-4, atol=1e-9)
    assert torch.allclose(a.mse.double(), b.mse, rtol=1e-3, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(1, 30), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, F64]), st.booleans(), st.integers(0, 99))
def test_summary_of_the_data(n, d, block, dtype, weighted, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (n, d), generator=g).to(dtype) / 8 + (torch.randint(0, 3, (d,), generator=g) * 100).to(dtype)
    x[torch.rand(n, d, generator=g) < .2] = 0
    x = torch.where((x == 0) & (torch.rand(n, d, generator=g) < .5), -x, x)              # zeros of either sign
    w = torch.rand(n, dtype=F64, generator=g) * (torch.rand(n, generator=g) < .7) if weighted else None
    if weighted and w.sum() == 0: w[0] = 1.0
    scan = _Scan(w)
    for part in x.split(block): scan.add(part)
    norm, trace, distinct = scan.result()
    y, p = x.double().numpy(), (torch.ones(n, dtype=F64) if w is None else w).numpy()
    p = p / p.sum()
    mean = p @ y
    assert distinct == len(np.unique(y + 0.0, axis=0)) and (scan.varies == (y != y[0]).any(0)).all()
    assert math.isclose(norm, p @ (y ** 2).sum(1), rel_tol=1e-12, abs_tol=1e-12) and math.isclose(trace, p @ ((y - mean) ** 2).sum(1), rel_tol=1e-9, abs_tol=1e-9)


def test_keys_of_one_point_in_two_precisions_agree():
    x = DIGITS[:40]
    assert _Scan().add(x).add(x.double()).result()[2] == _Scan().add(x).result()[2] == 40


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, F64])
def test_values_that_are_no_numbers_are_named(bad, dtype):
    x = torch.ones(5000, 3, dtype=dtype)
    x[4500, 1] = bad
    with pytest.raises(ValueError, match="data: .*points 4096 to 4999"): optimal_loss(x, [1.])
