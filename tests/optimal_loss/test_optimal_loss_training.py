"""Gap reports, the monitor, schedules, training and power laws: exact models, planted bugs, protocol, faults."""
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.datasets import load_digits
from torch import nn

from iclr26.optimal_loss import (BelowOptimumWarning, DenoiserMLP, EDMSchedule, FMUniformSchedule, LogitNormalSchedule, LogUniformSchedule, LossGapSchedule, LossMonitor, MinSNRSchedule,
                                 OptimalDenoiser, OptimalLossCurve, Process, fit_power_law, gaussian_optimal_loss, loss_gap, optimal_loss, rank_gap, train_denoiser)
from iclr26.optimal_loss.estimators import draw_sources
from iclr26.optimal_loss.training import training_target

F64 = torch.float64
G = lambda seed=0: torch.Generator().manual_seed(seed)
DIGITS = torch.from_numpy(load_digits().data)[:400] / 8 - 1
LEVELS = [.6, 1., 2., 6.]


@pytest.fixture(scope="module")
def curve():
    torch.set_num_threads(1)
    return optimal_loss(DIGITS, torch.logspace(-1.5, 2, 40), n_repeats=3)


def speaks(target, process, predict, sigma_data=.5):
    "A model of any target and process built from an x0-predictor of (noisy/alpha, VE sigma)."
    def model(x, time, *labels):
        t = float(time[0])
        if process is None: alpha, sigma, da, ds = 1.0, t, 0.0, 1.0
        else: (alpha, sigma), (da, ds) = process.alpha_sigma(t), process.derivatives(t)
        x0 = predict(x / alpha, sigma / alpha)
        return training_target(target, x0, (x - alpha * x0) / sigma, alpha, sigma, sigma_data=sigma_data, dalpha=da, dsigma=ds)[0]
    return model


@pytest.mark.parametrize("process", [None, Process.ve(), Process.vp(), Process.cosine(), Process.fm()], ids=lambda p: p.name if p else "None")
@pytest.mark.parametrize("target", ["x0", "eps", "score", "v", "velocity", "edm_F"])
def test_the_gap_does_not_depend_on_process_and_target(curve, process, target):
    mean = DIGITS.mean(0)
    predict = lambda x, s: mean + (x - mean) / (1 + s ** 2)
    want = loss_gap(lambda x, s: predict(x, float(s[0])), DIGITS, curve, sigmas=LEVELS, n_noise=100)
    got = loss_gap(speaks(target, process, predict), DIGITS, curve, target=target, process=process, sigmas=LEVELS, n_noise=100, sigma_data=.5)
    assert torch.allclose(got.sigma, want.sigma, rtol=1e-5) and torch.allclose(got.J, want.J, rtol=1e-5) and torch.allclose(got.gap, want.gap, rtol=1e-3, atol=1e-3)


def test_ideal_model_has_no_gap_and_exact_sees_it(curve):
    r = loss_gap(OptimalDenoiser(DIGITS), DIGITS, curve, sigmas=LEVELS, exact=True)
    assert (r.z.abs() < 4).all() and (r.distance < 1e-9).all() and (r.J_star == curve(r.sigma)).all()
    part = loss_gap(OptimalDenoiser(DIGITS[:300]), DIGITS, curve, sigmas=LEVELS, exact=True)
    assert ((part.gap - part.distance).abs() < 4 * part.stderr).all() and (part.distance > 0).all() and torch.allclose(part.relative, part.gap / curve.tr_cov)
    w = torch.rand(400, generator=G(2))
    weighted = optimal_loss(DIGITS, torch.logspace(-1, 2, 20), weights=w, n_repeats=2)
    r = loss_gap(OptimalDenoiser(DIGITS, weights=w), DIGITS, weighted, sigmas=LEVELS, weights=w, exact=True)
    assert (r.z.abs() < 4).all() and (r.distance < 1e-9).all()
    labels = torch.arange(400) % 4
    conditional = optimal_loss(DIGITS, torch.logspace(-1, 2, 20), labels=labels, n_repeats=2)
    r = loss_gap(OptimalDenoiser(DIGITS, labels=labels), DIGITS, conditional, sigmas=LEVELS, labels=labels, exact=True)
    assert (r.z.abs() < 4).all() and (r.distance < 1e-9).all()


def test_how_the_model_is_called(curve):
    calls = []
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.drop = nn.Dropout(.5)
        def forward(self, x, t, labels):
            calls.append((x.shape, x.dtype, t.shape, t.dtype, labels.dtype, self.training, torch.is_grad_enabled(), float(t[0])))
            class Out: sample = x
            return Out()
    net = Net().train()
    data = DIGITS.view(400, 1, 8, 8)
    loss_gap(net, data, curve, sigmas=LEVELS, n_noise=130, labels=torch.zeros(400, dtype=torch.long), batch=50)
    assert net.training and len(calls) == 3 * 4 and {c[0][0] for c in calls} == {50, 30} and {c[7] for c in calls} == set(LEVELS)
    assert all(c[0][1:] == (1, 8, 8) and c[1] == F64 and c[2] == c[0][:1] and c[3] == F64 and c[4] == torch.long and not c[5] and not c[6] for c in calls)


def test_tables_of_diffusers(curve):
    diffusers = pytest.importorskip("diffusers")
    p = Process.from_diffusers(diffusers.DDPMScheduler())
    seen = set()
    def model(x, t):
        seen.add((t.dtype, int(t[0])))
        alpha, sigma = p.alpha_sigma(int(t[0]))
        return x * sigma / (alpha ** 2 * .3 + sigma ** 2)
    r = loss_gap(model, DIGITS, curve, target="eps", process=p, sigmas=[.1, .100001, 1., 5.], n_noise=60)
    assert len(r.sigma) == 3 and (r.sigma.diff() > 0).all() and {d for d, _ in seen} == {torch.long} and torch.allclose(r.sigma, p.snr_sigma(p.time_of(torch.tensor([.1, 1., 5.], dtype=F64))))
    flow = Process.from_diffusers(diffusers.FlowMatchEulerDiscreteScheduler())
    r = loss_gap(lambda x, t: x * 0, DIGITS.float(), curve, target="velocity", process=flow, sigmas=[.5, 2., 1e9], n_noise=60)
    assert torch.isfinite(r.J).all() and (r.J > 0).all()


def test_planted_bugs_are_found(curve):
    answers = DIGITS[draw_sources(400, 200, G(), True)]
    leak = lambda x, s: answers
    with pytest.warns(BelowOptimumWarning, match="loss below the optimum: check for a leak"): r = loss_gap(leak, DIGITS, curve, sigmas=LEVELS, n_noise=200)
    assert (r.z < -3).all() and "below the optimum" in r.summary()
    with pytest.warns(BelowOptimumWarning): loss_gap(OptimalDenoiser(DIGITS[:40]), DIGITS[:40], curve, sigmas=LEVELS)              # other data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "largest gap" in loss_gap(lambda x, s: x, DIGITS, curve, sigmas=LEVELS, n_noise=100).summary()


@pytest.mark.parametrize("kwargs, match", [(dict(target="noise"), "target"), (dict(model=lambda x, s: x[:, :3]), "shape"), (dict(model=lambda x, s: x * (math.nan if s[0] == 2 else 1)), "sigma=2"),
                                           (dict(model=lambda x, s: None), "NoneType"), (dict(target="edm_F"), "sigma_data"), (dict(data=DIGITS[:, :5]), "dimensions"), (dict(n_noise=0), "n_noise"),
                                           (dict(labels=torch.zeros(3)), "labels"), (dict(sigmas=[2., 1.]), "sigmas")])
def test_loss_gap_refuses(curve, kwargs, match):
    args = dict(model=lambda x, s: x, data=DIGITS, sigmas=LEVELS, n_noise=20) | kwargs
    with pytest.raises(ValueError, match=match): loss_gap(args.pop("model"), args.pop("data"), curve, **args)


# Monitor ---------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("process, target", [(None, "x0"), (Process.fm(), "velocity"), (Process.vp(), "eps")])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_monitor_agrees_with_the_report(curve, process, target, reduction):
    mean = DIGITS.mean(0)
    predict = lambda x, s: mean + (x - mean) / (1 + s[:, None] ** 2)
    monitor = LossMonitor(curve, process, target=target, bins=6, memory=1e9, reduction=reduction)
    g, losses, seen = G(1), [], []
    for _ in range(60):
        x0, eps = DIGITS[torch.randint(400, (100,), generator=g)], torch.randn(100, 64, generator=g, dtype=F64)
        s = torch.exp(torch.rand(100, generator=g, dtype=F64) * 7 - 2.5)
        x0_hat = predict(x0 + s[:, None] * eps, s)
        seen.append(torch.stack([s, (x0_hat - x0).square().sum(1)]))
        if process is None: t, got, want = s, x0_hat, x0
        else:
            t = process.time_of(s)
            (alpha, sigma), (da, ds) = process.alpha_sigma(t), process.derivatives(t)
            noise_hat = (x0 + s[:, None] * eps - x0_hat) / s[:, None]
            got, want = (noise_hat, eps) if target == "eps" else (da[:, None] * x0_hat + ds[:, None] * noise_hat, da[:, None] * x0 + ds[:, None] * eps)
        loss = monitor.mse_loss(got, want, t) if reduction == "mean" else monitor.update((got - want).square().sum(1), t)
        if reduction == "mean": losses.append(float(loss) - float(nn.functional.mse_loss(got, want)))
    assert all(abs(v) < 1e-9 for v in losses)
    r = monitor.report()
    s, J = torch.cat(seen, 1)
    cell = torch.bucketize(s.log(), torch.linspace(*(float(v) for v in curve.sigma[[0, -1]].log()), 7, dtype=F64), right=True) - 1
    for k in range(6):                                        # means of what was seen, cell by cell, over each sample's own optimum
        own = (J - curve(s))[cell == k]
        assert math.isclose(float(r.gap[k]), float(own.mean()), rel_tol=1e-5) and math.isclose(float(r.sigma[k]), float(s[cell == k].log().mean().exp()), rel_tol=1e-6)
        assert float(r.stderr[k]) >= .99 * float(own.std(unbiased=False) / len(own) ** .5)
    assert len(r.sigma) == 6
    log = monitor.log()
    assert len(log) == 8 and math.isclose(log["loss_gap/max"], float(r.relative.max())) and all(isinstance(v, float) for v in log.values())
    again = LossMonitor(curve, process, target=target, bins=6, reduction=reduction)
    again.load_state_dict(monitor.state_dict())
    assert torch.equal(again.report().gap, r.gap)


def test_monitor_reads_diffusers_clocks_and_forgets(curve):
    diffusers = pytest.importorskip("diffusers")
    flow = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    monitor = LossMonitor(curve, flow, bins=4)
    assert monitor.target == "velocity" and LossMonitor(curve, diffusers.DDPMScheduler()).target == "eps"
    i = torch.tensor([500, 900])
    s, scale = monitor._levels(flow.timesteps[i], None)
    sigma = flow.sigmas[i].double()
    assert torch.allclose(s, sigma / (1 - sigma), rtol=1e-5) and torch.allclose(scale, 1 / sigma ** 2, rtol=1e-5)
    ve = LossMonitor(curve, bins=2, memory=2., reduction="sum")
    for loss in [100.] * 20 + [30.] * 20: ve.update(torch.full((8,), loss), sigma=torch.full((8,), 5.))
    assert abs(float(ve.report().J) - 30) < .1


def test_monitor_warns_and_refuses(curve):
    monitor = LossMonitor(curve, bins=4, reduction="sum")
    with pytest.raises(ValueError, match="nothing"): monitor.report()
    with pytest.raises(ValueError): monitor.update(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError): monitor.update(torch.tensor([math.nan]), torch.ones(1))
    with pytest.raises(ValueError): monitor.update(torch.ones(1))
    monitor.update(torch.full((50,), 1e-3) * torch.rand(50, generator=G()), torch.full((50,), 5.))
    with pytest.warns(BelowOptimumWarning): monitor.report()
    for bad in (dict(bins=0), dict(memory=0.), dict(reduction="none"), dict(target="edm_F"), dict(target="noise")):
        with pytest.raises(ValueError): LossMonitor(curve, **bad)
    with pytest.raises(TypeError): LossMonitor(curve, object())


# Schedules --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("schedule, density", [
    (EDMSchedule(.5), lambda s: np.exp(-.5 * ((np.log(s) + 1.2) / 1.2) ** 2)), (FMUniformSchedule(), lambda s: s / (1 + s) ** 2), (LogitNormalSchedule(.3, .8), lambda s: np.exp(-.5 * ((np.log(s) - .3) / .8) ** 2)),
    (MinSNRSchedule(), lambda s: s / (1 + s ** 2)), (LogUniformSchedule(.5, .1, 10.), lambda s: ((s > .1) & (s < 10.)).astype(float))], ids=["edm", "fm", "logit", "minsnr", "uniform"])
def test_samples_follow_their_density(schedule, density):
    s = schedule.sample(40_000, G())
    assert s.dtype == torch.float32 and (s > 0).all() and torch.equal(s, schedule.sample(40_000, G()))
    edges = np.linspace(-4.6, 4.6, 24)
    middle = np.exp(np.linspace(-4.6, 4.6, 24 * 64 - 63))
    fine = density(middle)
    want = np.array([fine[64 * k:64 * k + 64].mean() for k in range(23)])
    got = np.histogram(s.log().numpy(), edges)[0]
    assert np.abs(got / got.sum() - want / want.sum()).max() < .01
    schedule.update(s, s); schedule.load_state_dict(schedule.state_dict())
    assert schedule.weight(torch.tensor([.5, 2.], dtype=F64)).dtype == F64


def test_weights_of_the_baselines():
    s = torch.tensor([.5, 2.], dtype=F64)
    t = s / (1 + s)
    assert torch.allclose(EDMSchedule(.5).weight(s), (s ** 2 + .25) / (s * .5) ** 2) and torch.allclose(FMUniformSchedule().weight(s), 1 / t ** 2)
    assert torch.allclose(LogitNormalSchedule().weight(s), 1 / t ** 2) and torch.allclose(MinSNRSchedule(3.).weight(s), torch.tensor([3., .25], dtype=F64))


def test_gap_schedule_formulas(curve):
    s = LossGapSchedule(curve, bins=32, rho=.2)
    sd = math.sqrt(curve.tr_cov / 64)
    assert s.edges.shape == (33,) and math.isclose(float(s.edges[0]), .04 * sd, rel_tol=1e-9) and math.isclose(float(s.edges[-1]), 80 * sd, rel_tol=1e-9)
    assert torch.allclose(s.centers, (s.edges[1:] * s.edges[:-1]).sqrt()) and torch.allclose(s.loss_ema, curve.tr_cov * s.centers ** 2 / (s.centers ** 2 + sd ** 2))
    w = (1 / curve(s.centers)).clamp_max(8 / curve.tr_cov)
    mu = math.log(curve.sigma_star()) - 1
    w = w + 40 / curve.tr_cov * torch.exp(-.5 * ((s.centers.log() - mu) / .8) ** 2) / (.8 * math.sqrt(2 * math.pi)) * (s.centers < curve.sigma_star())
    q = w * (s.loss_ema - curve(s.centers)).clamp_min(0)
    assert torch.allclose(s.base_weight(s.centers), w) and torch.allclose(s.probabilities, .8 * q / q.sum() + .2 / 32) and math.isclose(float(s.probabilities.sum()), 1, rel_tol=1e-12)
    assert torch.allclose(s.weight(s.centers), w / (32 * s.probabilities)) and s.weight(s.centers.float()).dtype == torch.float32
    literal = LossGapSchedule(curve, bins=32, rho=.2, importance_correct=False)
    assert torch.allclose(literal.weight(s.centers), w)
    outside = torch.tensor([1e-6, 1e6], dtype=F64)
    assert torch.allclose(s.weight(outside), s.base_weight(outside) / (32 * s.probabilities[[0, -1]]))


def test_correction_keeps_the_objective(curve):
    "E_p[weight f] = mean over ln sigma of w f, whatever p has become."
    s = LossGapSchedule(curve, bins=16)
    for _ in range(100): s.update(s.centers, torch.rand(16, generator=G(3), dtype=F64) * 20)
    x = s.sample(200_000, G()).double()
    even = (s.edges[0].log() + torch.linspace(0, 1, 100_001, dtype=F64) * (s.edges[-1] / s.edges[0]).log()).exp()
    for f in (torch.ones_like, lambda v: v / (1 + v)):
        got, want = (s.weight(x) * f(x)).mean(), (s.base_weight(even) * f(even)).mean()
        assert abs(float(got / want) - 1) < .02
    count = torch.histogram(x.log(), s.edges.log()).hist
    assert (count / 200_000 - s.probabilities).abs().max() < .004


def test_gap_schedule_update(curve):
    s = LossGapSchedule(curve, bins=8, ema=.75, update_every=2)
    before, p = s.loss_ema.clone(), s.probabilities.clone()
    a, b = float(s.centers[2]), float(s.centers[5])
    s.update(torch.tensor([a, a, b, 1e-9, 1e9]), torch.tensor([1., 3., 10., 5., 5.]))
    want = before.clone(); want[2] = .75 * want[2] + .25 * 2; want[5] = .75 * want[5] + .25 * 10
    assert torch.allclose(s.loss_ema, want) and torch.equal(s.probabilities, p)
    s.update(torch.tensor([a]), torch.tensor([2.]))
    assert not torch.equal(s.probabilities, p)
    t = LossGapSchedule(curve, bins=8, ema=.75, update_every=2)
    t.load_state_dict(s.state_dict())
    for v in (s, t): v.update(torch.tensor([b]), torch.tensor([50.]))
    assert torch.equal(s.loss_ema, t.loss_ema) and torch.equal(s.weight(s.centers), t.weight(s.centers)) and torch.equal(s.sample(50, G()), t.sample(50, G()))
    for _ in range(60): s.update(s.centers, torch.full((8,), -1.))      # below the optimum everywhere: nothing to gain
    assert torch.allclose(s.probabilities, torch.full((8,), 1 / 8, dtype=F64))
    with pytest.raises(ValueError): s.update(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError): s.update(torch.ones(1), torch.tensor([math.inf]))
    with pytest.raises(ValueError): s.load_state_dict(LossGapSchedule(curve, bins=4).state_dict())


@pytest.mark.parametrize("kwargs", [dict(bins=1), dict(rho=-.1), dict(rho=1.1), dict(ema=1.), dict(ema=-.1), dict(update_every=0), dict(sigma_min=2., sigma_max=1.), dict(tau=2.)])
def test_gap_schedule_refuses(curve, kwargs):
    with pytest.raises(ValueError): LossGapSchedule(curve, **kwargs)


# Training ----------------------------------------------------------------------------------------------------------------------------

def test_denoiser_at_the_start():
    x, s = torch.randn(5, 7, generator=G()), torch.tensor([.1, .5, 1., 5., 50.])
    assert torch.allclose(DenoiserMLP(7, 16, sigma_data=.5)(x, s), .25 / (.25 + s[:, None] ** 2) * x) and torch.equal(DenoiserMLP(7, 16, sigma_data=.5, prediction="eps")(x, 3.), x)
    for bad in (dict(sigma_data=0.), dict(sigma_data=.5, prediction="v")):
        with pytest.raises(ValueError): DenoiserMLP(7, **bad)


def test_training_is_deterministic_closes_the_gap_and_stops(curve):
    def run(steps=120, callback=None):
        torch.manual_seed(0)
        net = DenoiserMLP(64, 32, sigma_data=.54)
        return net, train_denoiser(net, DIGITS.float(), LossGapSchedule(curve, update_every=20), steps=steps, batch_size=64, generator=G(1), callback=callback)
    (a, h), (b, k) = run(), run()
    assert h == k and len(h) == 120 and all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    fresh = DenoiserMLP(64, 32, sigma_data=.54)
    after, before = (loss_gap(n, DIGITS.float(), curve, sigmas=LEVELS, n_noise=200).gap for n in (a, fresh))
    assert (after < before).all() and (after[:3] < .9 * before[:3]).all()
    seen = []
    _, h = run(callback=lambda step, loss: seen.append((step, loss)) or step == 4)
    assert len(h) == 5 and seen == list(enumerate(h))


def test_training_refuses_and_names_the_step():
    net = DenoiserMLP(2, 8, sigma_data=1.)
    class Broken(EDMSchedule):
        calls = 0
        def weight(self, sigma):
            self.calls += 1
            return sigma * (math.nan if self.calls == 3 else 1)
    with pytest.raises(RuntimeError, match="step 2"): train_denoiser(net, torch.randn(20, 2), Broken(1.), steps=5)
    for bad in (dict(steps=0), dict(steps=1, batch_size=0), dict(steps=1, lr=0.)):
        with pytest.raises(ValueError): train_denoiser(net, torch.randn(20, 2), EDMSchedule(1.), **bad)


# Power laws -----------------------------------------------------------------------------------------------------------------------------

@settings(max_examples=40, deadline=None)
@given(st.floats(-2, -.05), st.floats(.1, 100), st.floats(0, 5))
def test_power_law_recovers(alpha, beta, star):
    F = np.logspace(1, 4, 6)
    law = fit_power_law(F, beta * F ** alpha + star, star) if (beta * F ** alpha).min() > 1e-9 * max(star, 1) else None
    if law is None: return
    assert math.isclose(law.alpha, alpha, rel_tol=1e-4, abs_tol=1e-4) and math.isclose(law.beta, beta, rel_tol=1e-3) and law.n == 6 and law.ci.low <= law.alpha <= law.ci.high
    assert np.allclose(law.predict(F), beta * F ** alpha + star, rtol=1e-6)


def test_power_law_fits_the_offset():
    F = torch.logspace(1, 5, 7)
    law = fit_power_law(F, 3 * F ** -.5 + .7, "fit")
    assert abs(law.j_star - .7) < 1e-3 and abs(law.alpha + .5) < 1e-2
    straight = fit_power_law(F, 3 * F ** -.5, "fit")
    assert straight.j_star < 1e-3 and abs(straight.alpha + .5) < 1e-2 and abs(straight.corr + 1) < 1e-6


def test_analytic_scaling_law():
    lam, ranks = np.arange(1, 100_001) ** -1.5, [16, 32, 64, 128, 256, 512, 1024]
    star, gap = gaussian_optimal_loss(lam, 1.), rank_gap(lam, 1., ranks)
    raw, sub = fit_power_law(ranks, gap + star), fit_power_law(ranks, gap + star, star)
    assert abs(star - 1.945696) < 1e-5 and abs(sub.alpha + 1.985) < 1e-3 and sub.corr < -.9999 and abs(raw.corr + .75) < .01


def test_the_interval_covers():
    rng, hit = np.random.default_rng(0), 0
    F = np.logspace(1, 4, 8)
    for _ in range(300):
        law = fit_power_law(F, np.exp(.1 * rng.standard_normal(8)) * F ** -.3)
        hit += law.ci.low <= -.3 <= law.ci.high
    assert .91 < hit / 300 < .99


@pytest.mark.parametrize("F, J, star", [([1, 2], [1, 2], 0.), ([1, 2, 3], [3, 2, 1], "fit"), ([1, 2, 3], [1, 2], 0.), ([0, 1, 2], [3, 2, 1], 0.), ([1, 2, 3], [3, 2, math.nan], 0.), ([1, 2, 3], [3, 2, 1], 1.),
                                        ([1, 2, 3], [3, 2, 1], math.nan), ([1, 2, 3], [3, 2, 1], "auto"), ([1, 1, 1], [3, 2, 1], 0.), ([1, 2, 3, 4], [3, 2, 1, -1], "fit")])
def test_power_law_refuses(F, J, star):
    with pytest.raises(ValueError): fit_power_law(F, J, star)


def test_public_names():
    import iclr26.optimal_loss as package
    assert set(package._all_ if hasattr(package, "_all_") else package.__all__) <= set(dir(package)) and package.frechet_distance
