"""F2SA-p and F2SA against hand-written loops, counting, draws, faults and resumption."""
import itertools
import math

import pytest
import torch

from iclr26.f2sa_p import (AIDCG, ITD, MRBO, VRBO, BilevelProblem, F2SA, F2SAp, FeasibilityWarning, PrecisionWarning, StocBiO, fd_coefficients, fd_nodes,
                           implicit_hypergradient, sfo_per_step, suggest_p)

torch.set_num_threads(1)
f64 = lambda v: torch.tensor(v, dtype=torch.float64)
ALL = [F2SAp, F2SA, StocBiO, MRBO, VRBO, AIDCG, ITD]
TARGET = f64([1., -2., .5])


def toy(batched=False, noise=.1, **kw):
    draw = lambda g: noise * torch.randn(3, generator=g, dtype=torch.float64)
    up = lambda x, y, n: ((y - TARGET) ** 2 / 2 + n * y + .1 * x**2).sum(-1)
    low = lambda x, y, n: ((y - x) ** 2 + .1 * torch.cosh(y) + n * y + n * x).sum(-1)
    return BilevelProblem(up, low, upper_batches=draw, lower_batches=draw, batched=batched, **kw)


def make(cls, problem=None, **kw):
    options = dict(inner_lr=.1, outer_lr=.05, inner_steps=3) | kw
    if "outer_optimizer" in options: options.pop("outer_lr")
    return cls(problem or toy(), torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), **options)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_equals_a_hand_written_loop_on_the_documented_draws(p, coupled):
    K, S, nu, eta, lr, problem, g = 3, 2, .2, .1, .05, toy(), torch.Generator().manual_seed(5)
    opt = make(F2SAp, p=p, nu=nu, outer_batches=S, coupled=coupled, generator=torch.Generator().manual_seed(5))
    draw = lambda: .1 * torch.randn(3, generator=g, dtype=torch.float64)
    x, ys, alpha = torch.zeros(3, dtype=torch.float64), {j: torch.zeros(3, dtype=torch.float64) for j in fd_nodes(p)}, fd_coefficients(p)
    def batches():
        if coupled:
            low, up = draw(), draw()
            return {j: (low, up) for j in ys}
        return {j: (draw(), draw() if j else None) for j in ys}
    def grad(fn, wrt, x, y, n):
        v = dict(x=x.clone().requires_grad_(), y=y.clone().requires_grad_())
        return torch.autograd.grad(fn(v["x"], v["y"], n), v[wrt], allow_unused=True)[0]
    for _ in range(4):
        for _ in range(K):
            b = batches()
            for j in ys: ys[j] = ys[j] - eta * (grad(problem.lower, "y", x, ys[j], b[j][0]) + (j * nu * grad(problem.upper, "y", x, ys[j], b[j][1]) if j else 0))
        phi = 0
        for _ in range(S):
            b = batches()
            phi = phi + sum(alpha[j] * (grad(problem.lower, "x", x, ys[j], b[j][0]) / nu + (j * grad(problem.upper, "x", x, ys[j], b[j][1]) if j else 0)) for j in ys) / S
        x = x - lr * phi / phi.norm()
        info = opt.step()
        assert torch.allclose(opt.phi, phi, atol=1e-11) and torch.allclose(opt.x, x, atol=1e-11) and math.isclose(info.phi_norm, phi.norm().item(), rel_tol=1e-10)
    for j in ys: assert torch.allclose(opt.y(j), ys[j], atol=1e-12)


@pytest.mark.parametrize("init", ["warm", "mean"])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_stacked_equals_loop(p, coupled, init):
    loop, stacked = (make(F2SAp, toy(b), p=p, coupled=coupled, init=init, outer_batches=2) for b in (False, True))
    for opt in (loop, stacked): opt.run(5)
    assert torch.allclose(loop.x, stacked.x, atol=1e-11) and all(torch.allclose(loop.y(j), stacked.y(j), atol=1e-11) for j in fd_nodes(p))
    assert loop.cost == stacked.cost and torch.equal(loop.generator.get_state(), stacked.generator.get_state())
    fresh = make(F2SAp, toy(True), p=p, coupled=coupled, init=init, outer_batches=2)
    fresh.load_state_dict(loop.state_dict())
    assert torch.equal(fresh.y(), loop.y())


def test_mean_restart():
    opt = make(F2SAp, toy(noise=0.0), p=4, init="mean", nu=.3)
    opt.step()
    before = {j: opt.y(j) for j in opt.nodes}
    twin = make(F2SAp, toy(noise=0.0), p=4, nu=.3)
    state = opt.state_dict()
    state["estimator"]["y"] = torch.stack([(before[-2] + before[-1]) / 2] * 2 + [(before[1] + before[2]) / 2] * 2)
    twin.load_state_dict(state)
    opt.step(); twin.step()
    assert torch.allclose(opt.x, twin.x, atol=1e-14)


@pytest.mark.parametrize("depends", [True, False])
@pytest.mark.parametrize("p,K,S", [(1, 2, 1), (2, 3, 2), (3, 2, 3), (4, 1, 1)])
def test_every_call_is_counted(p, K, S, depends):
    calls, draws = dict(upper=0, lower=0), dict(upper=0, lower=0)
    def counted(name, fn, table):
        def wrapped(*args):
            table[name] += 1
            return fn(*args)
        return wrapped
    base = toy()
    problem = BilevelProblem(counted("upper", lambda x, y, n: ((y - TARGET) ** 2).sum(), calls), counted("lower", base.lower, calls),
                             upper_batches=counted("upper", base.upper_batches, draws), lower_batches=counted("lower", base.lower_batches, draws), upper_depends_on_x=depends)
    opt = make(F2SAp, problem, p=p, inner_steps=K, outer_batches=S)
    info = opt.step()
    assert (info.sfo_upper, info.sfo_lower, info.hvp) == (calls["upper"], calls["lower"], 0) == (opt.sfo_upper, opt.sfo_lower, opt.hvp)
    assert opt.cost == sfo_per_step(p, K, S, depends) == opt.step_cost and draws == calls


def test_batched_functions_are_called_once_for_all_nodes():
    sizes = []
    up = lambda x, y, _: (sizes.append(("upper", len(y))), (y**2).sum(-1))[1]
    low = lambda x, y, _: (sizes.append(("lower", len(y))), ((y - x) ** 2).sum(-1))[1]
    make(F2SAp, BilevelProblem(up, low, batched=True), p=3, inner_steps=2).step()
    assert sizes == [("lower", 4), ("upper", 3)] * 3


@pytest.mark.parametrize("cls,expected", [(StocBiO, (1, 3, 11)), (AIDCG, (1, 3, 11)), (ITD, (1, 3, 3))])
def test_costs_of_second_order_methods(cls, expected):
    opt = make(cls)
    info = opt.step()
    assert (info.sfo_upper, info.sfo_lower, info.hvp) == expected and opt.cost == expected[0] + expected[1] + 2 * expected[2]


@pytest.mark.parametrize("cls", ALL)
def test_step_cost_predicts_cost_and_budgets_are_respected(cls):
    opt = make(cls)
    for _ in range(5):
        before, predicted = opt.cost, opt.step_cost
        info = opt.step()
        assert opt.cost - before == predicted == info.sfo_upper + info.sfo_lower + 2 * info.hvp
    budget = opt.cost + 3 * opt.step_cost + 1
    opt.run(sfo_budget=budget)
    assert opt.cost <= budget < opt.cost + opt.step_cost


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("cls,options", [(c, {}) for c in ALL] + [(F2SA, dict(schedule="kwon")), (F2SAp, dict(p=3, coupled=True)), (VRBO, dict(restart_every=3))])
def test_resumes_bit_for_bit(cls, options, batched, adam, tmp_path):
    if adam: options = options | dict(outer_optimizer=lambda ps: torch.optim.Adam(ps, lr=.05))
    whole, first, second = (make(cls, toy(batched), **options) for _ in range(3))
    infos = whole.run(7)
    first.run(4)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    more = second.run(3)
    assert torch.equal(whole.x, second.x) and torch.equal(whole.y(), second.y()) and torch.equal(whole.phi, second.phi)
    assert whole.cost == second.cost and [i[:5] for i in infos[4:]] == [i[:5] for i in more]
    assert whole.step().phi_norm == second.step().phi_norm


@pytest.mark.parametrize("cls", ALL)
def test_global_generator_is_untouched_and_default_is_reproducible(cls):
    before = torch.get_rng_state()
    a, b = make(cls), make(cls)
    a.run(2); b.run(2)
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(a.x, b.x)


def test_states_of_others_are_refused():
    state = make(F2SAp).state_dict()
    for other in (make(F2SAp, p=4), make(F2SA), make(StocBiO), F2SAp(toy(), torch.zeros(4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), inner_lr=.1, outer_lr=.1)):
        before = other.x
        with pytest.raises(ValueError): other.load_state_dict(state)
        assert torch.equal(other.x, before)
    with pytest.raises(ValueError): make(F2SAp, outer_optimizer=lambda ps: torch.optim.SGD(ps, lr=.1)).load_state_dict(state)
    with pytest.raises(ValueError): make(F2SAp).load_state_dict({})


def test_f2sa_constant_is_p1_and_settles_at_the_closed_form():
    a, b = make(F2SA, penalty=5.0), make(F2SAp, p=1, nu=.2, normalize=False)
    for _ in range(4): a.step(); b.step(); assert torch.equal(a.x, b.x)
    scalar = BilevelProblem(lambda x, y, _: y**2 / 2, lambda x, y, _: (y - x) ** 2, upper_depends_on_x=False)
    for eta, K in itertools.product((.1, .05), (10, 50)):
        opt = F2SA(scalar, f64(1.5), f64(0.), inner_lr=eta, inner_steps=K, outer_lr=1e-13)
        opt.run(1500 // K)
        assert abs(opt.phi - 10 / 7) < 1e-8


def test_kwon_schedule_written_out():
    problem, lam, x, y0, y1 = toy(noise=0.0), 10.0, torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    n = torch.zeros(3, dtype=torch.float64)
    gy, fy = (torch.func.grad(lambda y, x, fn=fn: fn(x, y, n)) for fn in (problem.lower, problem.upper))
    gx, fx = (torch.func.grad(lambda x, y, fn=fn: fn(x, y, n)) for fn in (problem.lower, problem.upper))
    opt = make(F2SA, problem, schedule="kwon", penalty=10.0, penalty_growth=.3)
    for k in range(1, 5):
        for _ in range(3): y0, y1 = y0 - .1 / k ** (4 / 7) * gy(y0, x), y1 - .1 / k ** (5 / 7) * (lam * gy(y1, x) + fy(y1, x))
        phi = fx(x, y1) + lam * (gx(x, y1) - gx(x, y0))
        x = x - .05 / k ** (4 / 7) * phi
        lam += .3 / k ** (1 / 7)
        opt.step()
        assert torch.allclose(opt.x, x, atol=1e-12) and math.isclose(opt.penalty, lam)


class NoDoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return (y**2).sum()
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g): return 2 * g * ctx.saved_tensors[0]


def test_only_first_derivatives_are_taken():
    problem = BilevelProblem(lambda x, y, _: NoDoubleBackward.apply(y - TARGET), lambda x, y, _: NoDoubleBackward.apply(y - x))
    opt = make(F2SAp, problem)
    opt.run(3)
    assert opt.hvp == 0 and opt.x.abs().sum() > 0
    for cls in (StocBiO, AIDCG, ITD):
        with pytest.raises(RuntimeError, match="second derivative"): make(cls, problem).step()


@pytest.mark.parametrize("cls", ALL)
def test_zero_estimate_leaves_x_exactly(cls):
    still = BilevelProblem(lambda x, y, _: torch.tensor(1.0, dtype=torch.float64), lambda x, y, _: (y**2).sum())
    for kw in ({}, dict(normalize=True), dict(outer_optimizer=lambda ps: torch.optim.AdamW(ps, lr=.1, weight_decay=.5))):
        if "outer_optimizer" in kw: opt = cls(still, f64([1., 2., 3.]), f64([1., 1., 1.]), inner_lr=.1, **kw)
        else: opt = cls(still, f64([1., 2., 3.]), f64([1., 1., 1.]), inner_lr=.1, outer_lr=.1, **kw)
        assert opt.step().phi_norm == 0 and opt.x.tolist() == [1., 2., 3.]


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_normalised_step_survives_tiny_and_huge_estimates(scale):
    problem = BilevelProblem(lambda x, y, _: scale * (x * f64([3., 4.]).to(x.dtype)).sum(), lambda x, y, _: (y**2).sum())
    opt = F2SAp(problem, torch.zeros(2), torch.zeros(1), inner_lr=.1, outer_lr=1.0, nu=.5)
    info = opt.step()
    assert torch.allclose(opt.x, torch.tensor([-.6, -.8]), atol=1e-6) and math.isclose(info.phi_norm, 5 * scale, rel_tol=1e-5)


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("cls", ALL)
def test_non_finite_values_change_nothing(cls, batched, adam):
    bad = {"on": False}
    base = toy(batched)
    def lower(x, y, n): return base.lower(x, y, n) * (math.nan if bad["on"] else 1.0)
    problem = BilevelProblem(base.upper, lower, upper_batches=base.upper_batches, lower_batches=base.lower_batches, batched=batched)
    opt = make(cls, problem, **(dict(outer_optimizer=lambda ps: torch.optim.Adam(ps, lr=.1)) if adam else {}))
    opt.run(3)
    before, y, cost, rng = opt.x, opt.y(), opt.cost, opt.generator.get_state()
    bad["on"] = True
    with pytest.raises(FloatingPointError, match=r"node -?\d+.*step 3"): opt.step()
    assert torch.equal(opt.x, before) and torch.equal(opt.y(), y) and opt.cost == cost and torch.equal(opt.generator.get_state(), rng)
    bad["on"] = False
    opt.run(2)
    clean = make(cls, toy(batched), **(dict(outer_optimizer=lambda ps: torch.optim.Adam(ps, lr=.1)) if adam else {}))
    clean.run(5)
    assert torch.allclose(opt.x, clean.x, atol=1e-13)


@pytest.mark.parametrize("batched", [False, True])
def test_the_bad_node_is_named(batched):
    # node 2 of p = 3: the only one whose y exceeds 1.9
    lower = lambda x, y, _: ((y - x) ** 2).sum(-1) + torch.where(y.detach() > 1.9, math.inf, 0.0).mul(x).sum(-1)
    up = lambda x, y, _: -10.0 * y.sum(-1)
    opt = F2SAp(BilevelProblem(up, lower, batched=batched), f64([1.]), f64([1.]), p=3, nu=.1, inner_steps=100, inner_lr=.2, outer_lr=.1)
    with pytest.raises(FloatingPointError, match="node 2, step 0"): opt.step()


def test_x_that_overflows_is_caught_with_its_optimiser():
    opt = make(F2SAp, outer_optimizer=lambda ps: torch.optim.SGD(ps, lr=.1, momentum=.9))
    opt.run(2)
    before, momentum = opt.x, opt.outer_optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    opt.outer_optimizer.param_groups[0]["lr"] = math.inf
    with pytest.raises(FloatingPointError, match="step 2"): opt.step()
    assert torch.equal(opt.x, before) and torch.equal(opt.outer_optimizer.state_dict()["state"][0]["momentum_buffer"], momentum)


def test_outer_optimiser_gets_the_hypergradient():
    a, b = make(F2SAp, outer_optimizer=lambda ps: torch.optim.SGD(ps, lr=.05)), make(F2SAp)
    for _ in range(3): a.step(); b.step()
    assert torch.allclose(a.x, b.x, atol=1e-15)


def test_inputs_are_copied_and_results_detached():
    x0, y0 = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    opt = F2SAp(toy(), x0, y0, inner_lr=.1, outer_lr=.1)
    assert opt.phi is None
    opt.step()
    opt.x.add_(1), opt.y().add_(1), opt.phi.add_(1)
    assert x0.abs().sum() == y0.abs().sum() == 0 and not opt.x.requires_grad and opt.x.abs().max() < .2


def test_which_y():
    opt = make(F2SAp, p=4)
    opt.step()
    assert torch.equal(opt.y(), (opt.y(-1) + opt.y(1)) / 2)
    with pytest.raises(ValueError, match="node"): opt.y(0)
    odd = make(F2SAp, p=3)
    assert torch.equal(odd.y(), odd.y(0))
    with pytest.raises(ValueError, match="node"): make(StocBiO).y(1)


@pytest.mark.parametrize("cls", ALL)
def test_bad_arguments(cls):
    for kw, name in ((dict(inner_lr=0.0), "inner_lr"), (dict(outer_lr=-1.0), "outer_lr"), (dict(inner_steps=0), "inner_steps"), (dict(outer_batches=0), "outer_batches"), (dict(inner_lr=math.nan), "inner_lr")):
        with pytest.raises(ValueError, match=name): make(cls, **kw)
    zeros = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="exactly one"): cls(toy(), zeros, zeros, inner_lr=.1)
    with pytest.raises(ValueError, match="exactly one"): cls(toy(), zeros, zeros, inner_lr=.1, outer_lr=.1, outer_optimizer=lambda ps: torch.optim.SGD(ps, lr=.1))
    with pytest.raises(TypeError, match="dtype"): cls(toy(), torch.zeros(3), zeros, inner_lr=.1, outer_lr=.1)
    with pytest.raises(TypeError, match="x0"): cls(toy(), torch.zeros(3, dtype=torch.int64), zeros, inner_lr=.1, outer_lr=.1)
    with pytest.raises(ValueError, match="device"): cls(toy(), zeros, torch.zeros(3, dtype=torch.float64, device="meta"), inner_lr=.1, outer_lr=.1)
    opt = make(cls)
    for kw in ({}, dict(n_steps=1, sfo_budget=10)):
        with pytest.raises(ValueError, match="exactly one"): opt.run(**kw)
    with pytest.raises(ValueError, match="inner_lr"): make(cls, inner_lr=lambda t: -1.0).step()


def test_bad_arguments_of_f2sap():
    for nu in (0.0, -.1, math.inf, math.nan):
        with pytest.raises(ValueError, match="nu"): make(F2SAp, nu=nu)
    with pytest.raises(ValueError, match="init"): make(F2SAp, init="cold")
    with pytest.raises(ValueError, match="schedule"): make(F2SA, schedule="linear")
    with pytest.raises(TypeError, match="p must"): make(F2SAp, p=2.0)
    with pytest.warns(FeasibilityWarning): make(F2SAp, p=4, nu=.3, strong_convexity=1.0, upper_smoothness=1.0)
    with pytest.warns(PrecisionWarning): F2SAp(toy(), torch.zeros(3), torch.zeros(3), nu=1e-6, inner_lr=.1, outer_lr=.1)


@pytest.mark.parametrize("which", ["upper", "lower"])
@pytest.mark.parametrize("batched", [False, True])
def test_loss_of_wrong_shape(which, batched):
    base = toy(batched)
    wrong = lambda x, y, n: y**2
    problem = BilevelProblem(wrong if which == "upper" else base.upper, wrong if which == "lower" else base.lower, upper_batches=base.upper_batches, lower_batches=base.lower_batches, batched=batched)
    with pytest.raises(ValueError, match=which): make(F2SAp, problem).step()


def test_batches_of_unequal_shape_cannot_be_stacked():
    ragged = [torch.zeros(3), torch.zeros(4)]
    problem = BilevelProblem(lambda x, y, b: (y**2).sum(-1), lambda x, y, b: (y**2).sum(-1), lower_batches=ragged, batched=True)
    with pytest.raises(ValueError, match="lower_batches"): make(F2SAp, problem, inner_steps=20).step()


def test_callback_stops_and_rates_may_depend_on_the_step():
    seen = []
    opt = make(F2SAp, outer_lr=lambda t: .1 / (t + 1), inner_lr=lambda t: .1)
    infos = opt.run(10, callback=lambda o, i: (seen.append(i.step), i.step == 2)[1])
    assert seen == [0, 1, 2] and len(infos) == 3
    before = opt.x
    opt.step()
    assert math.isclose((opt.x - before).norm().item(), .1 / 4, rel_tol=1e-9)


def test_coupling_removes_amplified_noise():
    def spread(coupled):
        g, rows = torch.Generator().manual_seed(3), []
        for _ in range(60):
            opt = make(F2SAp, toy(True), nu=.05, coupled=coupled, generator=g, inner_steps=15)
            opt.step(); rows.append(opt.phi)
        return torch.stack(rows).std(0).norm().item()
    assert spread(True) < spread(False) / 4


@pytest.mark.parametrize("cls", ALL)
def test_every_method_finds_the_minimum_of_a_quiet_problem(cls):
    problem = toy(noise=0.0)
    special = {VRBO: dict(inner_steps=2, restart_batches=1), F2SAp: dict(normalize=False, nu=.02), F2SA: dict(penalty=100.0)}
    opt = make(cls, problem, outer_lr=.2, **(dict(inner_steps=10) | special.get(cls, {})))
    start = implicit_hypergradient(problem, opt.x, opt.y(), lower_batch=torch.zeros(3), upper_batch=torch.zeros(3)).norm()
    opt.run(80)
    end = implicit_hypergradient(problem, opt.x, opt.y(), lower_batch=torch.zeros(3), upper_batch=torch.zeros(3)).norm()
    assert end < .05 * start


def test_suggest_p():
    quiet = BilevelProblem(lambda x, y, _: y**2 / 2, lambda x, y, _: (y - x) ** 2 + .1 * y**4)
    s = suggest_p(quiet, f64(1.5), f64(0.), nu=.4, inner_steps=60, inner_lr=.2, replicates=2)
    assert s.p == 4 and s.bias[1] > s.bias[2] > s.bias[4] and set(s.noise.values()) == {0.0}
    loud = suggest_p(toy(True, noise=.5), torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), nu=.1, inner_steps=20, inner_lr=.2, candidates=(1, 2, 4))
    assert loud.p in (1, 2, 4) and min(loud.noise.values()) > 0
    with pytest.raises(ValueError, match="replicates"): suggest_p(quiet, f64(1.5), f64(0.), nu=.4, inner_steps=5, inner_lr=.1, replicates=1)
