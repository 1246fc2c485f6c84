"""Targets, losses and networks against closed forms, float64 references and plain modules; independence, faults."""
import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from iclr26.transitive_rl.critic import (CategoricalActor, EnsembleMLP, FlowActor, GaussianActor, TransitiveCritic, ddpg_bc_loss, distance_weight, euler_flow, expectile, expectile_bce, gelu_norm, select_by_value,
                                         transitive_targets)

torch.set_num_threads(1)
ints = lambda *x: torch.tensor(x)
gen = lambda seed=0: torch.Generator().manual_seed(seed)


# targets -----------------------------------------------------------------------------------------------------------------
@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8), st.floats(.05, .999), st.sampled_from([0, 1, 3, None]), st.sampled_from([0, 1, 4, None]), st.integers(0, 99))
def test_targets_row_by_row(members, offsets, discount, r1, r2, seed):
    first, second = 5 * torch.randn(2, members, len(offsets), generator=gen(seed), dtype=torch.float64)
    d1, d2 = (torch.tensor(x) for x in zip(*offsets))
    got = transitive_targets(first, second, d1, d2, discount, first_radius=r1, second_radius=r2)
    assert got.shape == (members, len(offsets))
    for e in range(members):
        for b, (a, c) in enumerate(offsets):
            y1 = discount**a if r1 is None or a <= r1 else 1 / (1 + math.exp(-float(first[e, b])))
            y2 = discount**c if r2 is None or c <= r2 else 1 / (1 + math.exp(-float(second[e, b])))
            assert float(got[e, b]) == pytest.approx(math.log(y1 * y2), rel=1e-9, abs=1e-12)


def test_targets_base_cases():
    logits = torch.randn(2, 3, generator=gen())
    assert torch.allclose(transitive_targets(logits, logits, ints(0, 0, 1), ints(1, 9, 0), .9)[:, 0], torch.full((2,), math.log(.9)))   # one step: exactly gamma
    assert torch.equal(transitive_targets(logits, logits, ints(0, 0, 1), ints(1, 9, 0), .9)[:, 1], F.logsigmoid(logits[:, 1]))          # self midpoint: the value itself
    mc = transitive_targets(None, None, ints(3, 700), ints(0, 0), .99, first_radius=None, second_radius=0)
    assert mc.shape == (1, 2) and torch.allclose(mc, torch.tensor([[3., 700.]]) * math.log(.99))


def test_unused_logits_do_not_leak_and_nothing_is_infinite():
    nan = torch.full((2, 3), math.nan, requires_grad=True)
    got = transitive_targets(nan, torch.zeros(2, 3), ints(0, 1, 1), ints(5, 5, 5), .9)
    assert torch.isfinite(got).all() and not got.requires_grad
    big = torch.full((1, 1), -3e38)
    assert torch.isfinite(transitive_targets(big, big, ints(5), ints(5), .9)).all()
    assert transitive_targets(-1e4 * torch.ones(1, 1), None, ints(5), ints(1), .9).item() == pytest.approx(-1e4 + math.log(.9), rel=1e-6)
    assert transitive_targets(None, torch.zeros(2, 1), ints(1), ints(5), .9).shape == (2, 1)


@pytest.mark.parametrize("arguments, message", [
    ((torch.zeros(2, 2), torch.zeros(2, 2), ints(0, -1), ints(1, 1)), "d_first holds -1"), ((torch.zeros(2, 2), torch.zeros(2, 2), ints(0, 1), ints(1, -7)), "d_second holds -7"),
    ((torch.zeros(2, 2), torch.zeros(2, 2), ints(0), ints(1, 1)), "B offsets"), ((torch.zeros(2, 3), torch.zeros(2, 3), ints(0, 1), ints(1, 1)), "B offsets"),
    ((torch.zeros(2, 2), torch.zeros(3, 2), ints(0, 1), ints(1, 1)), "B offsets"), ((torch.zeros(2), torch.zeros(2), ints(0, 1), ints(1, 1)), "B offsets"),
    ((torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2), ints(1, 1)), "d_first: expected an integer"), ((torch.zeros(2, 2), torch.zeros(2, 2), ints(0, 1), torch.zeros(2, 1, dtype=torch.long)), "d_second"),
    ((None, torch.zeros(2, 2), ints(0, 2), ints(1, 1)), "first_logits=None"), ((torch.zeros(2, 2), None, ints(0, 2), ints(5, 1)), "second_logits=None"),
])
def test_targets_refusals(arguments, message):
    with pytest.raises(ValueError, match=message): transitive_targets(*arguments, .9)


def test_targets_refuse_settings():
    zeros = torch.zeros(1, 1)
    for discount in (0, 1, -.1, math.nan, "x"):
        with pytest.raises(ValueError, match="discount"): transitive_targets(zeros, zeros, ints(1), ints(1), discount)
    with pytest.raises(ValueError, match="first_radius=-1"): transitive_targets(zeros, zeros, ints(1), ints(1), .9, first_radius=-1)
    with pytest.raises(ValueError, match="second_radius=1.5"): transitive_targets(zeros, zeros, ints(1), ints(1), .9, second_radius=1.5)


# the loss ----------------------------------------------------------------------------------------------------------------
def reference_loss(l, y, kappa, w=1.0, form="bce"):
    q = 1 / (1 + np.exp(-l))
    bce = -(y * np.log(q) + (1 - y) * np.log1p(-q))
    entropy = -sum(p * math.log(p) for p in (y, 1 - y) if p > 0)
    return (kappa if y >= q else 1 - kappa) * w * (bce - (entropy if form == "kl" else 0))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-8, 8), st.floats(0, 1), st.floats(0, 3)), min_size=1, max_size=6), st.floats(.01, .99), st.sampled_from(["bce", "kl"]))
def test_loss_by_definition(rows, kappa, form):
    l, y, w = (torch.tensor(x, dtype=torch.float64) for x in zip(*rows))
    expected = [reference_loss(float(a), float(b), kappa, float(c), form) for a, b, c in rows]
    got = expectile_bce(l, y, kappa, sample_weight=w, form=form, reduction="none")
    assert np.allclose(got, expected, atol=1e-9)
    assert float(expectile_bce(l, y, kappa, sample_weight=w, form=form)) == pytest.approx(np.mean(expected), abs=1e-9)
    assert float(expectile_bce(l, y, kappa, sample_weight=w, form=form, reduction="sum")) == pytest.approx(np.sum(expected), abs=1e-8)


def test_jump_of_the_value():
    at = lambda q, form: float(expectile_bce(torch.logit(torch.tensor([q], dtype=torch.float64)), torch.tensor([.5], dtype=torch.float64), .9, form=form))
    assert at(.4999, "bce") == pytest.approx(.6238, abs=1e-4) and at(.5001, "bce") == pytest.approx(.0693, abs=1e-4)
    assert at(.4999, "kl") < 1e-7 and at(.5001, "kl") < 1e-7


@pytest.mark.parametrize("form", ["bce", "kl"])
def test_gradient_is_weight_times_error(form):
    l = torch.randn(3, 50, generator=gen(), dtype=torch.float64).requires_grad_()
    y, w = torch.rand(50, generator=gen(1), dtype=torch.float64).requires_grad_(), torch.rand(3, 50, generator=gen(2), dtype=torch.float64).requires_grad_()
    expectile_bce(l, y, .8, sample_weight=w, form=form, reduction="sum").backward()
    q = l.detach().sigmoid()
    expected = torch.where(y.detach() >= q, .8, .2).double() * w.detach() * (q - y.detach())
    assert torch.allclose(l.grad, expected, atol=1e-7) and y.grad is None and w.grad is None


def test_extreme_logits():
    l = torch.tensor([-1e4, 1e4, -1e4, 1e4], requires_grad=True)
    loss = expectile_bce(l, torch.tensor([0., 1., 1., 0.]), .7, reduction="none")
    assert torch.allclose(loss, torch.tensor([0., 0., 7e3, 3e3]))
    loss.sum().backward()
    assert torch.isfinite(l.grad).all()
    assert torch.isfinite(expectile_bce(l, torch.tensor([0., 1., .5, .5]), .7, form="kl", reduction="none")).all()


@pytest.mark.parametrize("targets", [[-.01, .5], [.5, 1.01], [math.nan, .5], [.5, math.inf]])
def test_loss_refuses_targets(targets):
    with pytest.raises(ValueError, match="targets hold"): expectile_bce(torch.zeros(2), torch.tensor(targets), .7)


def test_loss_refuses_settings():
    zeros = torch.zeros(2, 3)
    for kappa in (0, 1, math.nan):
        with pytest.raises(ValueError, match="expectile"): expectile_bce(zeros, zeros, kappa)
    with pytest.raises(ValueError, match="form='l2'"): expectile_bce(zeros, zeros, .7, form="l2")
    with pytest.raises(ValueError, match="reduction='max'"): expectile_bce(zeros, zeros, .7, reduction="max")
    with pytest.raises(ValueError, match=r"targets has shape \(2, 4\)"): expectile_bce(zeros, torch.zeros(2, 4), .7)
    with pytest.raises(ValueError, match="targets has shape"): expectile_bce(zeros, torch.zeros(5, 2, 3), .7)             # would enlarge the logits
    with pytest.raises(ValueError, match="sample_weight has shape"): expectile_bce(zeros, zeros, .7, sample_weight=torch.zeros(2))


# expectiles --------------------------------------------------------------------------------------------------------------
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(0, 5)), min_size=1, max_size=12).filter(lambda x: sum(w for _, w in x) > 1e-3), st.floats(.02, .98))
def test_expectile_condition(rows, kappa):
    v, w = (np.array(x) for x in zip(*rows))
    m = expectile(v, kappa, w)
    assert kappa * (w * np.maximum(v - m, 0)).sum() == pytest.approx((1 - kappa) * (w * np.maximum(m - v, 0)).sum(), abs=1e-9 * (1 + abs(v).max()) * w.sum() + 1e-9)
    assert v[w > 0].min() <= m <= v[w > 0].max()


def test_expectile_closed_forms():
    assert expectile([.2, .8], .7) == pytest.approx(.62, abs=1e-15)
    assert expectile([0, .5, 1], .5) == pytest.approx(.5) and expectile([3., 1., 2., 6.], .5) == pytest.approx(3.)
    assert expectile([0, .5, 1], .7) == pytest.approx(.85 / 1.3, abs=1e-15) and expectile([0, .5, 1], .9) == pytest.approx(.95 / 1.1, abs=1e-15)
    assert expectile([0, 1], .9, [3, 1]) == pytest.approx(.9 / (.9 + .3)) and expectile([5.], .1) == 5
    for kappa in (.7, .9):
        m = expectile([0, .5, 1], kappa)
        logit = torch.logit(torch.tensor(m, dtype=torch.float64)).requires_grad_()
        expectile_bce(logit.expand(3), torch.tensor([0, .5, 1], dtype=torch.float64), kappa).backward()
        assert abs(float(logit.grad)) < 1e-12


@pytest.mark.parametrize("arguments, message", [(([], .5), "values"), (([1, math.nan], .5), "values"), (([1.], 1), "kappa"), (([1., 2.], .5, [1.]), "weights"), (([1., 2.], .5, [0, 0]), "weights"), (([1., 2.], .5, [-1, 2]), "weights")])
def test_expectile_refusals(arguments, message):
    with pytest.raises(ValueError, match=message): expectile(*arguments)


# weights and policy losses -----------------------------------------------------------------------------------------------
@given(st.lists(st.floats(0, 500), min_size=1, max_size=5), st.floats(.1, .99), st.floats(0, 3))
@settings(deadline=None)
def test_distance_weight(steps, discount, lam):
    d = torch.tensor(steps, dtype=torch.float64)
    assert torch.allclose(distance_weight(d * math.log(discount), discount, lam), (1 + d) ** -lam)
    assert not distance_weight((d * math.log(discount)).requires_grad_(), discount, lam).requires_grad


def test_distance_weight_refusals():
    for lam in (-1, math.inf, math.nan):
        with pytest.raises(ValueError, match="lam"): distance_weight(torch.zeros(1), .9, lam)


def test_ddpg_bc_loss():
    q, log_prob = torch.tensor([1., -3.], requires_grad=True), torch.tensor([-1., -2.], requires_grad=True)
    loss = ddpg_bc_loss(q, log_prob, .5)
    assert float(loss.detach()) == pytest.approx(1 / (2 + 1e-6) + .75)
    loss.backward()
    assert torch.allclose(q.grad, torch.full((2,), -.5 / (2 + 1e-6))) and log_prob.grad.tolist() == [-.25, -.25]   # no gradient through the denominator
    assert math.isfinite(float(ddpg_bc_loss(torch.zeros(2), torch.zeros(2), 0.)))
    with pytest.raises(ValueError, match="alpha"): ddpg_bc_loss(q, log_prob, -1)
    with pytest.raises(ValueError, match=r"expected \(B,\)"): ddpg_bc_loss(q, torch.zeros(2, 1), 1)


def test_select_by_value_reduces_members_first():
    g = gen()
    samples, logits = torch.randn(7, 5, 2, generator=g), torch.randn(3, 7, 5, generator=g)
    got = select_by_value(samples, logits)
    for b in range(7): assert torch.equal(got[b], samples[b, max(range(5), key=lambda n: min(float(logits[e, b, n]) for e in range(3)))])
    with pytest.raises(ValueError, match=r"\(E,B,N\)"): select_by_value(samples, logits[:, :, :4])


def test_euler_flow():
    calls = []
    got = euler_flow(lambda x, t: calls.append(t) or x, torch.ones(2, 1, dtype=torch.float64), steps=4)
    assert calls == [0, .25, .5, .75] and torch.allclose(got, torch.full((2, 1), 1.25**4, dtype=torch.float64))
    fine = euler_flow(lambda x, t: x, torch.ones(1, dtype=torch.float64), steps=2000)
    assert float(fine) == pytest.approx(math.e, rel=1e-3)
    with pytest.raises(ValueError, match="steps=0"): euler_flow(lambda x, t: x, torch.ones(1), steps=0)


# bias, GELU and LayerNorm ------------------------------------------------------------------------------------------------
def norm_inputs(members, rows, width, scale=1., seed=0, dtype=torch.float32):
    "x, bias, scale, shift."
    g = gen(seed)
    return [(k * torch.randn(members, n, width, generator=g, dtype=dtype)).requires_grad_() for n, k in ((rows, scale), (1, scale), (1, 1), (1, 1))]


def norm_reference(x, bias, scale, shift): return F.layer_norm(F.gelu(x + bias, approximate="tanh"), x.shape[-1:], eps=1e-6) * scale + shift


def against_reference(inputs, seed):
    "Outputs and gradients of all inputs, ours and in float64."
    exact = [t.detach().double().requires_grad_() for t in inputs]
    weight = torch.randn(inputs[0].shape, generator=gen(seed))
    return [(y, torch.autograd.grad(y, x, weight.to(y.dtype))) for y, x in ((gelu_norm(*inputs), inputs), (norm_reference(*exact), exact))]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(12, 70), st.sampled_from([.01, 1., 30.]), st.integers(0, 999))
def test_gelu_norm_and_gradients(members, rows, width, scale, seed):
    (ours, mine), (exact, theirs) = against_reference(norm_inputs(members, rows, width, scale, seed), seed + 1)
    assert torch.allclose(ours.double(), exact, atol=3e-4)
    for a, b in zip(mine, theirs): assert a.shape == b.shape and float((a - b).abs().max()) <= 2e-3 * float(b.abs().max()) + 1e-6


def test_gelu_norm_tight_at_real_widths():
    (ours, mine), (exact, theirs) = against_reference(norm_inputs(2, 64, 128, 2.), 1)
    assert torch.allclose(ours.double(), exact, atol=5e-6)
    for a, b in zip(mine, theirs): assert torch.allclose(a.double(), b, rtol=1e-5, atol=2e-5)


def test_gelu_norm_other_paths():
    inputs = norm_inputs(2, 5, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(gelu_norm, inputs) and torch.autograd.gradgradcheck(gelu_norm, inputs)
    x, *rest = norm_inputs(2, 5, 8)
    strided = x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous() and torch.allclose(gelu_norm(strided, *rest), gelu_norm(x, *rest), atol=1e-6)
    assert gelu_norm(torch.zeros(2, 0, 8), *rest).shape == (2, 0, 8)
    one = gelu_norm(x, *rest)
    torch.set_num_threads(2)
    try: assert torch.allclose(gelu_norm(x, *rest), one, atol=1e-6)
    finally: torch.set_num_threads(1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", range(4))
def test_gelu_norm_shows_bad_numbers(bad, where):
    inputs = [t.detach() for t in norm_inputs(2, 3, 40)]
    before = [t.clone() for t in inputs]
    inputs[where][1, 0, 7] = bad
    y = gelu_norm(*inputs)
    assert torch.isfinite(y[0]).all() and not torch.isfinite(y[1, 0]).all()
    assert all(torch.equal(a[0], b[0]) for a, b in zip(inputs, before))   # arguments are not written to


# ensembles ---------------------------------------------------------------------------------------------------------------
def plain(net: EnsembleMLP, e: int) -> nn.Sequential:
    layers = []
    for l, (w, b) in enumerate(zip(net.weights, net.biases)):
        layers.append(nn.Linear(*w.shape[1:]))
        layers[-1].weight.data, layers[-1].bias.data = w[e].detach().T.clone(), b[e, 0].detach().clone()
        if l == len(net.weights) - 1: break
        layers.append(nn.GELU(approximate="tanh"))
        if net.layer_norm:
            layers.append(nn.LayerNorm(w.shape[2], eps=1e-6))
            layers[-1].weight.data, layers[-1].bias.data = net.scales[l][e, 0].detach().clone(), net.shifts[l][e, 0].detach().clone()
    return nn.Sequential(*layers)


def shaken(net, seed=0):
    g = gen(seed)
    with torch.no_grad():
        for p in net.parameters(): p.add_(.3 * torch.randn(p.shape, generator=g))
    return net


@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("members, hidden", [(1, (9,)), (2, (16, 12)), (3, (8, 8, 8))])
def test_ensemble_is_its_members(members, hidden, layer_norm):
    net = shaken(EnsembleMLP(5, hidden, 3, n_members=members, layer_norm=layer_norm, generator=gen()))
    x, each = torch.randn(11, 5, generator=gen(1)), torch.randn(members, 11, 5, generator=gen(2))
    modules = [plain(net, e) for e in range(members)]
    assert torch.allclose(net(x), torch.stack([m(x) for m in modules]), atol=2e-5)
    assert torch.allclose(net(each), torch.stack([m(each[e]) for e, m in enumerate(modules)]), atol=2e-5)
    (net(x) ** 2).sum().backward()
    for e, m in enumerate(modules):
        (m(x) ** 2).sum().backward()
        linear = [layer for layer in m if isinstance(layer, nn.Linear)]
        for l, layer in enumerate(linear):
            assert torch.allclose(net.weights[l].grad[e].T, layer.weight.grad, rtol=1e-3, atol=1e-3) and torch.allclose(net.biases[l].grad[e, 0], layer.bias.grad, rtol=1e-3, atol=1e-3)
        for l, layer in enumerate(x for x in m if isinstance(x, nn.LayerNorm)):
            assert torch.allclose(net.scales[l].grad[e, 0], layer.weight.grad, rtol=1e-3, atol=1e-3) and torch.allclose(net.shifts[l].grad[e, 0], layer.bias.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [512, 513, 1300])
@pytest.mark.parametrize("out_dim", [1, 3])
def test_blocks_of_rows_are_one_pass(rows, out_dim):
    net = shaken(EnsembleMLP(5, (16, 12), out_dim, generator=gen()))
    for x in (torch.randn(rows, 5, generator=gen(1)), torch.randn(2, rows, 5, generator=gen(2))):
        whole = net(x)
        assert whole.requires_grad
        with torch.no_grad(): assert net(x).shape == (2, rows, out_dim) and torch.allclose(net(x), whole, atol=1e-6)
        assert net(x.requires_grad_(), frozen=True).sum().backward() is None and x.grad is not None and all(p.grad is None for p in net.parameters())


def test_members_share_nothing():
    net = EnsembleMLP(4, (8, 8), 2, n_members=3, generator=gen())
    assert all(len(p) == 3 for p in net.parameters()) and len({float(w.detach().flatten()[0]) for w in net.weights[0]}) == 3
    x = torch.randn(5, 4, generator=gen(1))
    before = net(x).detach()
    net(x)[1].sum().backward()
    for p in net.parameters():
        if p.grad is not None: assert not p.grad[0].any() and not p.grad[2].any()
    with torch.no_grad():
        for p in net.parameters(): p[2] += 1
    after = net(x).detach()
    assert torch.equal(after[:2], before[:2]) and not torch.allclose(after[2], before[2])


def test_initial_weights():
    net = EnsembleMLP(100, (300,), 1, n_members=2, generator=gen())
    w = net.weights[0].detach()
    assert float(w.abs().max()) <= math.sqrt(6 / 400) and float(w.var()) == pytest.approx(2 / 400, rel=.02) and not net.biases[0].any()
    assert torch.equal(EnsembleMLP(3, (4,), 1, generator=gen(5)).weights[1], EnsembleMLP(3, (4,), 1, generator=gen(5)).weights[1])


def test_frozen_passes_gradient_to_the_input_only():
    net, x = shaken(EnsembleMLP(4, (8, 8), 1, generator=gen())), torch.randn(5, 4, generator=gen(1)).requires_grad_()
    a, = torch.autograd.grad(net(x).sum(), x)
    net(x, frozen=True).sum().backward()
    assert torch.equal(x.grad, a) and all(p.grad is None for p in net.parameters())


def test_copies_and_state_dicts_are_independent():
    net = shaken(EnsembleMLP(4, (8,), 1, generator=gen()))
    twin, x = copy.deepcopy(net), torch.randn(5, 4, generator=gen(1))
    assert torch.equal(twin(x), net(x))
    shaken(net, 3)
    assert not torch.allclose(twin(x), net(x))
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin(x), net(x))


@pytest.mark.parametrize("x", [torch.zeros(3, 5), torch.zeros(3, 2, 4), torch.zeros(4), torch.zeros(1, 2, 3, 4)])
def test_ensemble_refuses_shapes(x):
    with pytest.raises(ValueError, match="x has shape"): EnsembleMLP(4, (8,), 1)(x)


@pytest.mark.parametrize("change", [dict(in_dim=0), dict(hidden=(0,)), dict(out_dim=1.5), dict(n_members=0)])
def test_ensemble_refuses_sizes(change):
    a = dict(in_dim=2, hidden=(3,), out_dim=1) | change
    with pytest.raises(ValueError, match="expected an integer of 1 or more"): EnsembleMLP(a.pop("in_dim"), a.pop("hidden"), a.pop("out_dim"), **a)


# critics and policies ----------------------------------------------------------------------------------------------------
def test_continuous_critic():
    critic = TransitiveCritic(3, 2, action_dim=4, hidden=(8,), n_members=3, generator=gen())
    obs, goal, action = (torch.randn(6, n, generator=gen(n)) for n in (3, 2, 4))
    assert critic(obs, goal, action).shape == (3, 6)
    assert torch.equal(critic(obs, goal, action), critic.net(torch.cat([obs, goal, action], 1))[..., 0])
    with pytest.raises(ValueError, match="action=None"): critic(obs, goal)


def test_discrete_critic():
    critic = TransitiveCritic(3, 2, n_actions=4, hidden=(8,), generator=gen())
    obs, goal, action = torch.randn(6, 3, generator=gen()), torch.randn(6, 2, generator=gen(1)), torch.tensor([0, 1, 2, 3, 0, 1])
    every = critic(obs, goal)
    assert every.shape == (2, 6, 4)
    assert torch.equal(critic(obs, goal, action), torch.stack([every[:, b, a] for b, a in enumerate(action)], 1))


@pytest.mark.parametrize("kind", [{}, dict(action_dim=1, n_actions=2)])
def test_critic_needs_one_kind_of_action(kind):
    with pytest.raises(ValueError, match="exactly one"): TransitiveCritic(2, 2, hidden=(4,), **kind)


def test_actors_start_near_zero():
    obs, goal = torch.randn(50, 3, generator=gen()), torch.randn(50, 2, generator=gen(1))
    mean = GaussianActor(3, 2, 4, hidden=(64,), generator=gen())(obs, goal)
    logits = CategoricalActor(3, 2, 5, hidden=(64,), generator=gen())(obs, goal)
    assert mean.shape == (50, 4) and logits.shape == (50, 5) and mean.abs().max() < .2 and logits.abs().max() < .2


def test_gaussian_log_prob():
    actor, obs, goal, action = shaken(GaussianActor(3, 2, 4, hidden=(8,), generator=gen())), torch.ones(6, 3), torch.ones(6, 2), torch.randn(6, 4, generator=gen(2))
    assert torch.allclose(actor.log_prob(obs, goal, action), torch.distributions.Normal(actor(obs, goal), 1.).log_prob(action).sum(1), atol=1e-4)


def test_flow_actor_loss_and_samples():
    flow = shaken(FlowActor(3, 2, 2, hidden=(8,), generator=gen()))
    obs, goal, action = torch.randn(40, 3, generator=gen(1)), torch.randn(40, 2, generator=gen(2)), torch.rand(40, 2, generator=gen(3)) * 2 - 1
    g = gen(4)
    t, noise = 1 - torch.rand(40, generator=g), torch.randn(40, 2, generator=g)
    x_t = (1 - t)[:, None] * noise + t[:, None] * action
    expected = ((flow(obs, goal, x_t, t) - (action - noise)) ** 2).mean()
    assert float(flow.loss(obs, goal, action, generator=gen(4)).detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    samples = flow.sample(obs, goal, n=3, steps=7, generator=gen(5))
    assert samples.shape == (40, 3, 2) and samples.abs().max() <= 1 and not samples.requires_grad
    x = torch.randn(120, 2, generator=gen(5)).view(40, 3, 2)[:, 1]
    for s in range(7): x = x + flow(obs, goal, x, torch.full((40,), s / 7)) / 7
    assert torch.allclose(samples[:, 1], x.clamp(-1, 1), atol=1e-4)
    assert torch.equal(samples, flow.sample(obs, goal, n=3, steps=7, generator=gen(5)))
    with pytest.raises(ValueError, match="n=0"): flow.sample(obs, goal, n=0)
