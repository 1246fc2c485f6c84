"""Flow matching: shapes, identities, warps, loss and the exact velocity of a finite data set."""
import math

import pytest
import torch
from hypothesis import given, strategies as st

from iclr26.blocks.flow import (EmpiricalDenoiser, euler_step, expand_sigma, flow_matching_loss, interpolate, sample_sigma, to_noise, to_velocity, to_x0, unwarp, velocity, warp)

G = lambda seed=0: torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sigma, shape, want", [(.3, (2, 3), ()), (torch.tensor(.3), (2, 3), ()), (torch.rand(2), (2, 3, 4), (2, 1, 1)), (torch.rand(2, 4), (2, 3, 4, 5, 5), (2, 1, 4, 1, 1)),
                                                (torch.rand(2, 1, 1), (2, 3, 4), (2, 1, 1)), (torch.rand(2, 3, 4), (2, 3, 4), (2, 3, 4))])
def test_expand_sigma(sigma, shape, want):
    x = torch.zeros(shape, dtype=torch.float64)
    s = expand_sigma(sigma, x)
    assert s.shape == want and s.dtype == x.dtype and (x + s).shape == x.shape


@pytest.mark.parametrize("sigma, shape", [(torch.rand(3), (2, 3)), (torch.rand(2, 4), (2, 3, 4, 5)), (torch.rand(2, 5), (2, 3, 4, 5, 5)), (torch.rand(2, 2), (2, 3)), (torch.rand(1, 2, 1), (2, 3, 4))])
def test_expand_sigma_refuses(sigma, shape):
    with pytest.raises(ValueError, match="sigma has shape"): expand_sigma(sigma, torch.zeros(shape))


def test_identities_in_float64():
    x0, noise, s = torch.randn(5, 3, generator=G(), dtype=torch.float64), torch.randn(5, 3, generator=G(1), dtype=torch.float64), torch.linspace(.1, 1, 5, dtype=torch.float64)
    x, v = interpolate(x0, noise, s), velocity(x0, noise)
    for got, want in ((to_x0(x, v, s), x0), (to_noise(x, v, s), noise), (to_velocity(x, x0, s), v), (euler_step(x, v, s, 0.), x0), (euler_step(x, v, s, 1.), noise)):
        assert got.dtype == torch.float64 and torch.allclose(got, want, atol=1e-12)
    with pytest.raises(ValueError, match="sigma is 0"): to_velocity(x, x0, 0.)


def test_euler_step_keeps_digits_of_half_precision():
    x, v = torch.full((4,), 1000., dtype=torch.bfloat16), torch.full((4,), 1., dtype=torch.bfloat16)
    out = x
    for k in range(8): out = euler_step(out.float(), v.float(), k / 8, (k + 1) / 8)
    assert (out == 1001).all() and euler_step(x, v, 0., 1.).dtype == torch.bfloat16


@given(st.floats(0, 1), st.floats(.1, 20))
def test_warp_is_inverted(sigma, shift):
    w = warp(sigma, shift)
    assert isinstance(w, float) and 0 <= w <= 1 + 1e-12 and math.isclose(unwarp(min(w, 1.0), shift), sigma, abs_tol=1e-9)


@pytest.mark.parametrize("args", [(.5, 0.), (.5, -1.), (1.5, 2.), (-.1, 2.), (.5, math.nan), (math.nan, 2.)])
def test_warp_refuses(args):
    for f in (warp, unwarp):
        with pytest.raises(ValueError): f(*args)


def test_sample_sigma():
    s = sample_sigma(4000, shift=3., generator=G())
    assert s.shape == (4000,) and s.min() >= .02 and s.max() <= .98 and torch.equal(s, sample_sigma(4000, shift=3., generator=G()))
    k = unwarp(s.double(), 3.) * 1000
    inside = (s > .02) & (s < .98)
    assert (k[inside] - k[inside].round()).abs().max() < .01 and abs(float(k.mean()) - 500) < 25


def test_loss_is_the_mean_square_and_detaches_data():
    x0, noise = torch.randn(6, 2, generator=G(), requires_grad=True), torch.randn(6, 2, generator=G(1))
    w = torch.tensor(2., requires_grad=True)
    loss = flow_matching_loss(lambda x, s, gain: gain * x * w, x0, .5, noise=noise, gain=.5)
    want = (.5 * 2 * (.5 * x0 + .5 * noise) - (noise - x0)).square().mean()
    loss.backward()
    assert torch.allclose(loss, want) and x0.grad is None and w.grad is not None
    f = lambda x, s: x
    assert flow_matching_loss(f, x0, .5, generator=G(3)) == flow_matching_loss(f, x0, .5, generator=G(3)) != flow_matching_loss(f, x0, .5, generator=G(4))


def test_denoiser_matches_brute_force():
    data, x = torch.randn(20, 2, 3, generator=G(), dtype=torch.float64), torch.randn(4, 2, 3, generator=G(1), dtype=torch.float64)
    s = torch.tensor([.05, .3, .7, 1.], dtype=torch.float64)
    teacher = EmpiricalDenoiser(data)
    for b in range(4):
        w = torch.stack([torch.exp(-(x[b] - (1 - s[b]) * y).square().sum() / (2 * s[b] ** 2)) for y in data])
        want = (w[:, None, None] * data).sum(0) / w.sum() if w.sum() > 0 else None
        got = teacher.x0(x, s)[b]
        if want is not None: assert torch.allclose(got, want, atol=1e-9)
    assert torch.allclose(teacher(x, s, text=["a"] * 4), (x - teacher.x0(x, s)) / s.view(-1, 1, 1))
    assert torch.allclose(teacher.x0(x, 1.), data.mean(0).expand_as(x))


def test_denoiser_is_stable_and_excludes():
    data = torch.tensor([[0.], [1.], [3.]])
    teacher = EmpiricalDenoiser(data)
    assert teacher.x0(torch.tensor([[.9], [2.5]]), 1e-4).flatten().tolist() == [1., 3.]
    out = teacher.x0(torch.tensor([[.9], [.9]]), 1e-4, exclude=torch.tensor([1, 0])).flatten()
    assert out.tolist() == [0., 1.]


@pytest.mark.parametrize("data", [torch.empty(0, 2), torch.tensor([[1., math.nan]]), torch.tensor([[1, 2]])])
def test_denoiser_refuses_data(data):
    with pytest.raises(ValueError, match="data"): EmpiricalDenoiser(data)


@pytest.mark.parametrize("sigma", [0., 1.5, -.1, math.nan])
def test_denoiser_refuses_sigma(sigma):
    with pytest.raises(ValueError, match="sigma"): EmpiricalDenoiser(torch.zeros(2, 1)).x0(torch.zeros(1, 1), sigma)
