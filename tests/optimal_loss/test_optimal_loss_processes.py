"""Conversions between targets and processes: closed forms, brute force on samples, diffusers tables, faults."""
import math

import pytest
import torch

from iclr26.optimal_loss import TARGETS, Process, convert_loss, snr_sigma, target_scale
from iclr26.optimal_loss.training import training_target

PROCESSES = {"ve": Process.ve(), "vp": Process.vp(), "cosine": Process.cosine(), "fm": Process.fm()}
F64 = torch.float64


def test_snr_sigma():
    assert snr_sigma(.5, 2.) == 4. and snr_sigma(0., 1.) == math.inf and isinstance(snr_sigma(1, 2), float)
    out = snr_sigma(torch.tensor([.5, 1.]), 2.)
    assert out.tolist() == [4., 2.] and out.dtype == torch.float32
    assert snr_sigma(torch.ones(3, 1), torch.ones(2)).shape == (3, 2)
    for bad in ((0., 0.), (-1., 1.), (1., -1.), (math.nan, 1.)):
        with pytest.raises(ValueError): snr_sigma(*bad)


@pytest.mark.parametrize("target, alpha, sigma, more, want", [
    ("x0", .3, .7, {}, 1.), ("eps", .6, .8, {}, .5625), ("score", .6, .8, {}, .36 / .4096), ("v", .6, .8, {}, 1 / .64), ("v", 1., 2., {}, 6.25),
    ("velocity", .75, .25, dict(dalpha=-1., dsigma=1.), 16.), ("edm_F", 1., 2., dict(sigma_data=.5), 4.25), ("edm_F", .5, 1., dict(sigma_data=.5), 4.25)])
def test_closed_forms(target, alpha, sigma, more, want):
    got = target_scale(target, alpha=alpha, sigma=sigma, **more)
    assert isinstance(got, float) and math.isclose(got, want, rel_tol=1e-12)
    assert math.isclose(convert_loss(3., alpha=alpha, sigma=sigma, src="x0", dst=target, **more), 3 * want, rel_tol=1e-12)
    assert math.isclose(convert_loss(3 * want, alpha=alpha, sigma=sigma, src=target, dst="x0", **more), 3., rel_tol=1e-12)


@pytest.mark.parametrize("kwargs", [dict(target="noise", sigma=1.), dict(target="eps", sigma=0.), dict(target="eps", sigma=-1.), dict(target="velocity", sigma=1.), dict(target="edm_F", sigma=1.),
                                    dict(target="edm_F", sigma=1., sigma_data=0.), dict(target="score", sigma=math.nan)])
def test_target_scale_refuses(kwargs):
    with pytest.raises(ValueError): target_scale(kwargs.pop("target"), **kwargs)


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("target", TARGETS)
def test_regression_losses_convert(name, target):
    "The loss of a wrong prediction, said in each target, is c^2 times its x0-loss; c has the right sign."
    p = PROCESSES[name]
    g = torch.Generator().manual_seed(1)
    x0, eps, wrong = (torch.randn(7, 4, generator=g, dtype=F64) for _ in range(3))
    for share in (.2, .5, .8):
        t = p.t_min + share * (p.t_max - p.t_min)
        (alpha, sigma), (da, ds) = p.alpha_sigma(t), p.derivatives(t)
        more = dict(sigma_data=.6, dalpha=da, dsigma=ds)
        want, c = training_target(target, x0, eps, alpha, sigma, **more)
        xt = alpha * x0 + sigma * eps
        said, _ = training_target(target, wrong, (xt - alpha * wrong) / sigma, alpha, sigma, **more)
        loss = (said - want).square().sum(1)
        assert torch.allclose(loss, target_scale(target, alpha=alpha, sigma=sigma, **more) * (wrong - x0).square().sum(1), rtol=1e-8)
        assert torch.allclose((said - want) / c, wrong - x0, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", PROCESSES)
def test_time_of_inverts(name):
    p = PROCESSES[name]
    t = torch.linspace(p.t_min, p.t_max, 41, dtype=F64)[1:-1]
    assert (p.time_of(p.snr_sigma(t)) - t).abs().max() < 1e-8
    assert p.time_of(0.0) == p.t_min and p.time_of(1e12) == p.t_max and isinstance(p.time_of(1.0), float)
    a, s = p.alpha_sigma(t)
    with torch.no_grad(): da, ds = p.derivatives(t)
    h = 1e-6
    (a1, s1), (a0, s0) = p.alpha_sigma(t + h), p.alpha_sigma(t - h)
    assert torch.allclose((a1 - a0) / (2 * h), da, atol=1e-5) and torch.allclose((s1 - s0) / (2 * h), ds, atol=1e-5) and a.dtype == F64


def test_custom_process_and_ends():
    p = Process(lambda t: 1 / (1 + t), lambda t: t / (1 + t), t_min=0.01, t_max=5.)
    assert math.isclose(p.time_of(2.), 2., abs_tol=1e-8)
    assert torch.allclose(torch.tensor(p.derivatives(1.)), torch.tensor([-.25, .25]))
    assert Process.cosine().alpha_sigma(1.)[1] == 1. and Process.fm().alpha_sigma(0.) == (1., 0.)
    assert abs(Process.cosine().alpha_sigma(1.)[0]) < 1e-15
    with pytest.raises(ValueError): Process(lambda t: t, lambda t: t, t_min=1., t_max=1.)


def test_diffusers_tables():
    diffusers = pytest.importorskip("diffusers")
    ddpm = diffusers.DDPMScheduler()
    p = Process.from_diffusers(ddpm)
    alpha, sigma = p.alpha_sigma(700)
    assert math.isclose(alpha ** 2, float(ddpm.alphas_cumprod[700]), rel_tol=1e-6) and math.isclose(alpha ** 2 + sigma ** 2, 1, rel_tol=1e-9) and p.prediction == "eps" and p.model_time(700) == 700
    for s in (.01, .3, 1., 20.): assert abs(math.log(p.snr_sigma(p.time_of(s)) / s)) <= (p.table.log() - math.log(s)).abs().min() + 1e-12
    with pytest.raises(ValueError): p.derivatives(3)
    with pytest.raises(ValueError): p.alpha_sigma(3.5)
    with pytest.raises(ValueError): p.alpha_sigma(1000)

    edm = Process.from_diffusers(diffusers.EDMEulerScheduler())
    assert edm.prediction == "edm_F" and edm.sigma_data == .5 and edm.sigma[-1] > 0 and math.isclose(edm.alpha_sigma(0)[1], 80, rel_tol=1e-6)
    i = edm.time_of(1.0)
    assert math.isclose(edm.model_time(i), .25 * math.log(edm.snr_sigma(i)), abs_tol=1e-5)

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    flow = Process.from_diffusers(scheduler)
    assert flow.prediction == "velocity" and flow.snr_sigma(0) == math.inf
    x0, eps, i = torch.randn(2, 3), torch.randn(2, 3), 400
    alpha, sigma = flow.alpha_sigma(i)
    noisy = scheduler.scale_noise(x0, scheduler.timesteps[i].expand(2), eps)
    assert torch.allclose(noisy, alpha * x0 + sigma * eps, atol=1e-5) and flow.model_time(i) == scheduler.timesteps[i].item()
    assert Process.from_diffusers(diffusers.DDIMScheduler(prediction_type="v_prediction")).prediction == "v"
    assert Process.from_diffusers(diffusers.DDPMScheduler(prediction_type="sample")).prediction == "x0"
    with pytest.raises(TypeError): Process.from_diffusers(object())
