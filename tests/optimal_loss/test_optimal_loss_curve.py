"""The curve as a function and as a file; data that are streamed."""
import json
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.utils.data import DataLoader, Dataset, TensorDataset

from iclr26.optimal_loss import OptimalLossCurve, Process, convert_loss, memory_map, optimal_loss

F64 = torch.float64
X = torch.randn(900, 6, generator=torch.Generator().manual_seed(0))


def curve(sigma=(.1, 1., 10.), value=(0., 2., 8.), tr_cov=10., dim=4, **more): return OptimalLossCurve(sigma=list(sigma), value=list(value), tr_cov=tr_cov, dim=dim, **more)


def test_between_and_beyond_the_nodes():
    c = curve()
    assert [c(s) for s in (.1, 1., 10.)] == [0., 2., 8.] and isinstance(c(1.), float) and c(1., "mean") == .5
    grid = torch.logspace(-2, 3, 400, dtype=F64)
    y = c(grid)
    assert (y.diff() >= -1e-12).all() and y.min() == 0 and y.max() <= 10 and y.shape == grid.shape
    assert c(0.) == 0 and c(math.inf) == 10 and math.isclose(c(20.), 10 - 2 * .25) and c(grid.view(20, 20)).shape == (20, 20)
    wild = curve(value=(-1., 12., 9.))
    assert [wild(s) for s in (.1, 1., 10.)] == [0., 10., 10.] and wild.value.tolist() == [-1., 12., 9.]
    assert curve([2.], [3.])(1.) == 3 and curve([2.], [3.])(4.) == 10 - 7 / 4
    for bad in (-1., math.nan):
        with pytest.raises(ValueError): c(bad)
    with pytest.raises(ValueError): c(1., "max")


def test_defaults_and_refusals():
    c = curve()
    assert (c.stderr == 0).all() and torch.equal(c.lo, c.value) and c.method == c.form == "given" and c.meta == {}
    for bad in (dict(sigma=(1., .5, 2.)), dict(value=(0., 1.)), dict(value=(0., 1., math.nan)), dict(tr_cov=-1.), dict(tr_cov=None), dict(dim=0)):
        with pytest.raises(ValueError): curve(**bad)


def test_sigma_star():
    c = curve(sigma=torch.logspace(-2, 2, 60), value=10 * torch.logspace(-2, 2, 60) ** 2 / (1 + torch.logspace(-2, 2, 60) ** 2))
    for tau in (1e-3, .1, .9):
        s = c.sigma_star(tau)
        assert c(s) <= 10 * tau < c(s * (1 + 2e-6)) and math.isclose(s, math.sqrt(tau / (1 - tau)), rel_tol=1e-2)
    for tau in (1e-6, .99999):
        with pytest.raises(ValueError, match="grid"): c.sigma_star(tau)
    assert math.isclose(curve(value=(0., 0., 8.)).sigma_star(0.), 1., rel_tol=1e-6)


def test_integrals_and_conversions():
    s = torch.logspace(-2, 2, 400, dtype=F64)
    c = OptimalLossCurve(sigma=s, value=s ** 2 / (1 + s ** 2), tr_cov=1., dim=1)
    want = .5 * math.log((1 + 1e-4) / 1e-4) - .5 * math.log((1 + 1e4) / 1e4) + .5e-4
    assert math.isclose(c.information(), want, rel_tol=1e-4)
    assert math.isclose(c.total(lambda s: 1 / s ** 2), c.information() - .5e-4, rel_tol=1e-12)
    assert torch.allclose(c.convert("eps"), c.value / s ** 2) and torch.allclose(c.convert("velocity"), c.value / s ** 2)
    fm = Process.fm()
    t = fm.time_of(s)
    assert torch.allclose(c.convert("velocity", fm), convert_loss(c.value, alpha=1 - t, sigma=t, dst="velocity", dalpha=-torch.ones_like(t), dsigma=torch.ones_like(t)))
    with pytest.raises(ValueError): c.convert("edm_F")


def test_files_are_bit_exact(tmp_path):
    c = optimal_loss(X[:80], [.3, 1., 3.], method="snis", subset=20)
    c.save(tmp_path / "c.json")
    d = OptimalLossCurve.load(tmp_path / "c.json")
    assert all(torch.equal(getattr(c, n), getattr(d, n)) for n in ("sigma", "value", "stderr", "lo", "hi")) and (c.A, c.tr_cov, c.method, c.form, c.n, c.n_distinct, c.dim, c.meta) == (d.A, d.tr_cov, d.method, d.form, d.n, d.n_distinct, d.dim, d.meta)
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
    text = (tmp_path / "c.json").read_text()
    content = json.loads(text)
    for damage in (text[:-5], "[]", "{}", json.dumps(content | {"value": [1.]}), json.dumps(content | {"format": "x"}), json.dumps(content | {"more": 1}), json.dumps(content | {"sigma": "abc"}), "\x00"):
        (tmp_path / "bad.json").write_text(damage)
        with pytest.raises(ValueError, match="bad.json"): OptimalLossCurve.load(tmp_path / "bad.json")
    with pytest.raises(FileNotFoundError): OptimalLossCurve.load(tmp_path / "none.json")


# Streams -----------------------------------------------------------------------------------------------------------------------

class Points(Dataset):
    "A map-style Dataset of (image, label) that counts what is read."
    def __init__(self, rows): self.rows, self.reads = rows, 0
    def __len__(self): return len(self.rows)
    def __getitem__(self, i):
        self.reads += 1
        return self.rows[i].view(2, 3), i % 3


LEVELS = [.5, 1., 3.]


@pytest.mark.parametrize("make", [lambda: DataLoader(TensorDataset(X, torch.arange(900)), batch_size=70), lambda: Points(X), lambda: [X[:400], X[400:]], lambda: X.numpy()], ids=["loader", "dataset", "list", "array"])
def test_anything_that_fits_is_stacked(make):
    a, b = optimal_loss(X, LEVELS, method="cdol"), optimal_loss(make(), LEVELS, method="cdol")
    assert torch.equal(a.value, b.value) and (a.n, a.n_distinct, a.A, a.tr_cov) == (b.n, b.n_distinct, b.A, b.tr_cov)


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
@pytest.mark.parametrize("method", ["full", "knn"])
def test_memory_maps_give_the_same_bits(tmp_path, suffix, method):
    path = tmp_path / f"x.{suffix}"
    np.save(path, X.numpy()) if suffix == "npy" else save_file({"x": X.numpy(), "other": np.zeros(3, np.float32)}, path)
    data = memory_map(path, None if suffix == "npy" else "x")
    assert isinstance(data, np.memmap) and np.array_equal(data, X.numpy())
    a, b = optimal_loss(X, LEVELS, method=method, n_noise=200), optimal_loss(data, LEVELS, method=method, n_noise=200)
    assert torch.equal(a.value, b.value) and torch.equal(a.stderr, b.stderr)
    if suffix == "npy": assert torch.equal(optimal_loss(path, LEVELS, method=method, n_noise=200).value, a.value)


def test_memory_map_refuses(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"nonsense"); (tmp_path / "x.safetensors").write_bytes(b"\xff" * 40); (tmp_path / "x.pt").write_bytes(b"")
    save_file({"a": np.zeros((2, 2), np.float32), "b": np.zeros((2, 2), np.int32)}, tmp_path / "two.safetensors")
    for name, key in (("x.npy", None), ("x.safetensors", None), ("x.pt", None), ("two.safetensors", None), ("two.safetensors", "c"), ("two.safetensors", "b")):
        with pytest.raises(ValueError): memory_map(tmp_path / name, key)
    with pytest.raises(FileNotFoundError): memory_map(tmp_path / "no.npy")


def test_a_stream_is_read_twice_and_agrees():
    loader = DataLoader(TensorDataset(X), batch_size=64)
    passes = []
    class Counted:
        def __iter__(self): passes.append(1); return iter(loader)
    c = optimal_loss(Counted(), LEVELS, method="snis", subset=60, n_noise=240, n_repeats=6, max_bytes=42_000)
    truth = optimal_loss(X, LEVELS, method="snis", subset=60, n_noise=900, n_repeats=6)
    assert len(passes) == 2 and c.n == 900 and c.n_distinct == 900 and c.meta["candidate_groups"] >= 1
    assert math.isclose(c.tr_cov, truth.tr_cov, rel_tol=1e-9) and math.isclose(c.A, truth.A, rel_tol=1e-9)
    assert ((c.value - truth.value).abs() < 5 * (c.stderr ** 2 + truth.stderr ** 2).sqrt() + .1 * truth.value).all()


def test_stream_weights_and_refusals():
    loader = DataLoader(TensorDataset(X), batch_size=64)
    w = torch.zeros(900); w[:40] = 1
    few = optimal_loss(loader, LEVELS, method="snis", subset=60, weights=w, n_noise=100, max_bytes=42_000)
    assert math.isclose(few.tr_cov, float(X[:40].double().var(0, unbiased=False).sum()), rel_tol=1e-6)
    assert optimal_loss(loader, LEVELS, n_noise=50, max_bytes=42_000).method == "cdol"
    for bad in (w[:-1], torch.ones(901)):
        with pytest.raises(ValueError, match="weights"): optimal_loss(loader, LEVELS, method="snis", weights=bad, max_bytes=42_000)
    for kwargs in (dict(method="full"), dict(method="knn", subset=100), dict(labels=torch.zeros(900, dtype=torch.long)), dict(n_noise=900, subset=900)):
        with pytest.raises(ValueError): optimal_loss(loader, LEVELS, **{"method": "cdol", **kwargs}, max_bytes=40_000)
    with pytest.raises(TypeError): optimal_loss((x for x in [X]), LEVELS)
    with pytest.raises(TypeError): optimal_loss(DataLoader(TensorDataset(torch.zeros(9, 2, dtype=torch.long)), batch_size=3), LEVELS)
    with pytest.raises(ValueError): optimal_loss([torch.zeros(3, 2), torch.zeros(3, 4)], LEVELS)
    with pytest.raises(ValueError): optimal_loss([torch.full((3, 2), math.nan)], LEVELS)
    with pytest.raises(ValueError): optimal_loss([torch.zeros(1, 2)], LEVELS)
