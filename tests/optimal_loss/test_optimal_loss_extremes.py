"""The compiled float32 pass against float64 where numbers are extreme, and inputs that cannot be meant."""
import math
import warnings

import numpy as np
import pytest
import torch

from iclr26.optimal_loss import LossGapSchedule, LossMonitor, optimal_loss, subset_estimates


def draws(n, d, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(k, d, generator=g) for k in (n, n, n + 1)]


@pytest.mark.parametrize("C", [1e-30, 1.0, 1e30, 1e36, 1e40, 1e60, math.inf])
@pytest.mark.parametrize("sigma", [1e-4, 1e-2, .3, 3.0, 1e4])
@pytest.mark.parametrize("d", [1, 64, 784])
def test_float32_agrees_with_float64(C, sigma, d):
    x, e, y = draws(6, d)
    found, exact = (subset_estimates(x.to(t), e.to(t), y.to(t), [sigma], C=C) for t in (torch.float32, torch.float64))
    for name in ("pair", "condvar", "mse"):
        u, v = getattr(found, name).double(), getattr(exact, name)
        assert torch.isfinite(u).all(), name
        near_tie = 2e-7 * (1 + (1e-3 / sigma) ** 2) * d                      # logits of 1e9 carry an error of hundreds in float32
        if near_tie < 1: assert torch.allclose(u, v, rtol=1e-3 + near_tie, atol=1e-5 * float(y.square().sum(1).max())), name


@pytest.mark.parametrize("form", ["a_minus_b", "condvar", "pair", "mse", "cross"])
def test_snis_at_noise_far_below_the_data(form):
    x = torch.randn(397, 9, generator=torch.Generator().manual_seed(1))
    assert torch.isfinite(optimal_loss(x, [1e-5, 1.0], method="snis", subset=200, form=form).value).all()


def test_raw_pixels_as_floats():
    images = torch.randint(0, 256, (60, 784), generator=torch.Generator().manual_seed(1)).float()
    found, exact = (optimal_loss(images, [.02, 1., 100.], method="snis", subset=20, form="pair", dtype=t).value for t in (torch.float32, torch.float64))
    assert torch.allclose(found, exact, rtol=.05)


@pytest.mark.parametrize("scale", [1e18, 1e-22])
def test_data_out_of_range_are_named_before_the_work(scale):
    x = scale * torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="data: .*float64"): optimal_loss(x, [scale])
    assert torch.isfinite(optimal_loss(x, [scale], dtype=torch.float64).value).all()


def test_items_that_are_no_points_are_named():
    x = torch.randn(8, 3)
    with pytest.raises(TypeError, match=r"data: .*keys \['pixel_values'\]"): optimal_loss([{"pixel_values": x}], [1.])
    with pytest.raises(TypeError, match="data: .*list"): optimal_loss([x.tolist()], [1.])
    assert optimal_loss([(x, 0)], [1.]).dim == optimal_loss([x], [1.]).dim == 3


def test_leaves_with_gradients_and_lists_of_levels():
    x = torch.randn(30, 4)
    curve = optimal_loss(x.clone().requires_grad_(), [.5, 2.])
    assert torch.equal(curve.value, optimal_loss(x, [.5, 2.]).value)
    assert curve([.5, 1.]).shape == (2,) and curve(np.array([.5, 1.])).shape == (2,) and isinstance(curve(np.float64(.5)), float)
    with pytest.raises(ValueError, match="prediction has shape"): LossMonitor(curve).mse_loss(torch.zeros(8, 3), torch.zeros(8, 3), sigma=torch.ones(8))


def test_levels_that_lie_nowhere_are_ignored_without_a_word():
    "Schedule: outside of its range, zero and NaN change no cell. Monitor: outside of the curve, zero; what is no level is named."
    curve = optimal_loss(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.logspace(-2, 2, 20))
    schedule, monitor = LossGapSchedule(curve), LossMonitor(curve)
    before, ones = schedule.loss_ema.clone(), torch.ones(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.update(torch.tensor([0., 1e-9, 1e9, math.nan]), ones)
        assert torch.equal(schedule.loss_ema, before) and torch.isfinite(schedule.weight(torch.tensor([0., 1e-9, 1e9, math.inf]))).all()
        monitor.update(ones, sigma=torch.tensor([0., 1e-9, 1e9, math.inf]))
        assert (monitor.sums == 0).all()
    for bad in (-1., math.nan):
        with pytest.raises(ValueError, match="sigma=.*>= 0"): monitor.update(ones, sigma=torch.tensor([1., bad, 1., 1.]))
    assert (monitor.sums == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (3, 1), (0,)])
def test_weights_keep_shape_and_dtype(dtype, shape):
    curve = optimal_loss(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.logspace(-2, 2, 20))
    s = torch.full(shape, .5, dtype=dtype, requires_grad=True)
    for weight in (LossGapSchedule(curve).weight, LossGapSchedule(curve).base_weight): assert weight(s).shape == shape and weight(s).dtype == dtype and not weight(s).requires_grad
