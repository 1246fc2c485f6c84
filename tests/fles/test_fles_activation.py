"""The functional form and the modules against brute force, gradients in float64, isolation of samples and tokens, faults."""
import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from iclr26.fles import FleS, FleSAdaS, FleSDG, FleSPN, FleSProto, channel_importance, fles, positive_mean, saved_for_backward

torch.set_num_threads(1)
KINDS = [FleS, FleSPN, FleSAdaS, FleSProto, FleSDG]
LAYOUTS = [((3, 7, 6), -1), ((3, 6, 7), 1), ((3, 6, 4, 5), 1), ((3, 4, 5, 6), -1), ((3, 6), 1), ((3, 2, 6, 5), 2)]


def lively(act, seed=0):
    "Coefficients that differ between channels and inputs."
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in act.named_parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype) * (.5 if "head" in name or "alpha" in name or "gamma" in name else .1))
    return act


def brute_mean(x, axis, pooled):
    "Positive mean by a loop over channels, as float64 numpy, pooled axes kept."
    x = np.moveaxis(x.double().numpy(), axis, -1)
    out = np.zeros([1 if d in pooled else n for d, n in enumerate(x.shape)])
    for index in np.ndindex(out.shape):
        part = x[tuple(slice(None) if d in pooled else i for d, i in enumerate(index))].ravel()
        kept = part[part >= 0]
        out[index] = kept.mean() if kept.size else 0.
    return torch.from_numpy(out)


# positive mean ---------------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_positive_mean_brute_force(seed, shape, data):
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(2).round().div(2).to(dtype)
        y, d = x.double().numpy(), tuple(dims)
        if d:
            count = (y >= 0).sum(d, keepdims=True)
            expected = np.maximum(y, 0).sum(d, keepdims=True) / np.maximum(count, 1)
        else: expected = np.maximum(y, 0)
        got = positive_mean(x, d)
        assert got.dtype == dtype and np.allclose(got.double().numpy(), expected, atol=1e-6)
        assert positive_mean(x, d, keepdim=False).shape == tuple(n for i, n in enumerate(shape) if i not in d)


def test_positive_mean_corner_cases():
    assert positive_mean(-torch.ones(4, 3), 0).tolist() == [[0., 0., 0.]]                       # empty set
    assert positive_mean(torch.tensor([0., -0., 4.]), 0).item() == pytest.approx(4 / 3)        # both zeros count
    assert positive_mean(torch.ones(2, 3, 4).half(), 1).dtype == torch.float32
    bad = torch.ones(2, 5, 3)
    bad[0, 2, 1] = math.nan
    assert positive_mean(bad, 1).isnan().nonzero().tolist() == [[0, 0, 1]]
    with pytest.raises(TypeError): positive_mean(torch.ones(3, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match="dim"): positive_mean(torch.ones(3, 3), 2)
    with pytest.raises(ValueError, match="once"): positive_mean(torch.ones(3, 3), (0, -2))


@pytest.mark.parametrize("shape, dims", [((3, 7, 6), (1,)), ((3, 7, 6), (0, 1)), ((3, 6, 4, 5), (2, 3)), ((3, 6, 4, 5), (0, 2, 3)), ((4, 6), (0,)), ((3, 6, 5), (0, 2)), ((1, 5, 4), (0, 1))])
def test_positive_mean_gradient(shape, dims):
    x = torch.randn(shape, dtype=torch.float64)
    x[x.abs() < .05] = .1
    assert torch.autograd.gradcheck(lambda x: positive_mean(x, dims), x.clone().requires_grad_())
    grads = []
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype, copy=True).requires_grad_()
        mean = positive_mean(leaf, dims)
        (mean * torch.linspace(-1, 2, mean.numel(), dtype=dtype).view(mean.shape)).sum().backward()
        grads.append(leaf.grad.double())
    assert torch.allclose(*grads, atol=1e-6)


# channel importance ----------------------------------------------------------------------------------------------------
def test_channel_importance():
    x = torch.randn(4, 9, 6, dtype=torch.float64)
    mean = brute_mean(x, 2, (0, 1))
    assert torch.allclose(channel_importance(x), mean / mean.mean(-1, keepdim=True))
    assert channel_importance(x).shape == (1, 1, 6) and channel_importance(x, scope="sample").shape == (4, 1, 6)
    assert torch.allclose(channel_importance(x, scope="sample").mean(-1), torch.ones(4, 1, dtype=torch.float64))
    assert not channel_importance(-x.abs() - 1).any()                                            # silent everywhere: 0, no NaN
    maps = torch.randn(2, 6, 5, 7)
    assert channel_importance(maps, 1, "window", (2, 3)).shape == maps.shape and channel_importance(x, scope="causal").shape == x.shape


@given(st.floats(1e-3, 1e3))
@settings(max_examples=30, deadline=None)
def test_scale_equivariance(c):
    x = torch.randn(3, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(channel_importance(c * x), channel_importance(x), rtol=1e-10)
    proto = lively(FleSProto(16).double())
    for a, b in zip(proto.coefficients(c * x), proto.coefficients(x)): assert torch.allclose(a, b, rtol=1e-10)


# functional form -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gate", ["sigmoid", "erf"])
def test_formula_and_gradients(gate):
    shapes = ((2, 3, 4), (2, 1, 4), (1, 3, 1))
    args = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    rho = torch.sigmoid if gate == "sigmoid" else torch.special.ndtr
    assert torch.allclose(fles(*args, gate=gate), args[1] * rho(args[2] * args[0]) * args[0], rtol=1e-14)
    assert torch.autograd.gradcheck(lambda *a: fles(*a, gate=gate), args)
    assert torch.autograd.gradgradcheck(lambda *a: fles(*a, gate=gate), args)


@pytest.mark.parametrize("shape, kappa", [((5, 70, 33), (5, 1, 33)), ((5, 70, 33), (33,)), ((5, 70, 33), ()), ((5, 70, 33), (5, 1, 1)), ((5, 33, 8, 9), (5, 33, 1, 1)), ((5, 33, 8, 9), (1, 33, 1, 1)),
                                          ((5, 33), (5, 33)), ((5, 33), (33,)), ((40,), (40,)), ((5, 4, 33, 8), (1, 1, 33, 1)), ((5, 70, 33), (5, 70, 33)), ((1, 1, 1), (1, 1, 1))])
def test_compiled_loops_against_float64(shape, kappa):
    g = torch.Generator().manual_seed(0)
    x, up = torch.randn(shape, generator=g) * 3, torch.randn(shape, generator=g)
    k = [torch.rand(kappa, generator=g) + .5 for _ in range(2)]
    results = []
    for dtype, fused in ((torch.float32, True), (torch.float64, False)):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, *k)]
        y = fles(*leaves, fused=fused)
        y.backward(up.to(dtype))
        results.append([y.detach().double(), *(t.grad.double() for t in leaves)])
    for a, b in zip(*results): assert a.shape == b.shape and float((a - b).abs().max()) <= 1e-5 * max(1., float(b.abs().max()))


def test_threads_and_strides_change_nothing():
    x, k = torch.randn(7, 300, 160), torch.rand(7, 1, 160)
    one = fles(x, k, k)
    try:
        torch.set_num_threads(3)
        assert torch.equal(fles(x, k, k), one) and torch.equal(positive_mean(x, 1), positive_mean(x.clone(), 1))
    finally: torch.set_num_threads(1)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.allclose(fles(turned, k, k), one, atol=1e-6)


def test_extreme_values():
    x = torch.tensor([[math.nan, math.inf, 0., -0., 1e30, -1e30, 200., -200.]])
    y = fles(x, 1., 1.)
    assert y.isnan().tolist()[0] == [True] + [False] * 7
    assert y[0, 1] == math.inf and y[0, 4] == 1e30 and y[0, 6] == 200 and y[0, 2] == 0 and abs(y[0, 7]) < 1e-30
    assert fles(torch.ones(1, 3), 1., math.nan).isnan().all() and fles(torch.ones(1, 3), math.nan, 1.).isnan().all()
    assert torch.equal(fles(torch.ones(1, 3), 2., 0.), torch.ones(1, 3)) and not fles(torch.ones(1, 3), 0., 1.).any()


def test_functional_faults():
    x = torch.randn(2, 3, 4)
    for call, kind in ((lambda: fles(x.long(), 1., 1.), TypeError), (lambda: fles(x, torch.ones(5), 1.), ValueError), (lambda: fles(x, 1., torch.ones(9, 2, 3, 4)), ValueError), (lambda: fles(x, 1., 1., gate="tanh"), ValueError)):
        with pytest.raises(kind): call()


# modules ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape, channel_dim", LAYOUTS)
def test_fused_equals_plain_and_formula(kind, shape, channel_dim):
    act = lively(kind(6, channel_dim=channel_dim))
    plain = copy.deepcopy(act).double()
    plain.fused = False
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    up = torch.randn(shape)
    outs = []
    for m, dtype in ((act, torch.float32), (plain, torch.float64)):
        leaf = x.to(dtype, copy=True).requires_grad_()
        y = m(leaf)
        y.backward(up.to(dtype))
        outs.append([y.detach(), leaf.grad, *(p.grad for p in m.parameters())])
    for a, b in zip(*outs): assert a.shape == b.shape and torch.allclose(a.double(), b, rtol=1e-4, atol=2e-5)
    if kind is not FleSAdaS:
        kv, kh = act.coefficients(x)
        assert torch.allclose(outs[0][0], fles(x, kv, kh), atol=1e-6)


@pytest.mark.parametrize("kind, scope", [(FleSDG, "sample"), *((kind, scope) for kind in KINDS[:4] for scope in ("sample", "batch", "window", "causal"))])
def test_gradcheck(kind, scope):
    shape, channel_dim = ((2, 4, 3, 3), 1) if scope == "window" else ((2, 5, 4), -1)
    kw = {} if kind is FleSDG else dict(scope=scope, window=(2, 2) if scope == "window" else None)
    act = lively(kind(4, channel_dim=channel_dim, **kw).double())
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x[x.abs() < .02] = .1
    names = [n for n, _ in act.named_parameters()]
    run = lambda x, *p: torch.func.functional_call(act, dict(zip(names, p)), (x,))
    assert torch.autograd.gradcheck(run, [x.requires_grad_(), *(p.detach().requires_grad_() for p in act.parameters())], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_and_repeated_backward(kind):
    act = lively(kind(3).double())
    x = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4), requires_grad=True)
    assert torch.autograd.gradgradcheck(act, x, atol=1e-6)
    act, x = act.float(), x.detach().float().requires_grad_()
    y = act(x)
    first, second = (torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0] for _ in range(2))
    graph, = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)                   # differentiable operations instead of the loops
    assert torch.equal(first, second) and torch.allclose(first, graph, rtol=1e-5, atol=1e-6)


def formula(act, mean):
    "Equation (3) of the activation page, by numpy, on a statistic with channels last."
    p = {k: v.double().numpy() for k, v in act.state_dict().items()}
    u = mean.numpy()
    u = (u - u.mean(-1, keepdims=True)) / np.sqrt(u.var(-1, keepdims=True) + 1e-5) * p["norm.weight"] + p["norm.bias"]
    h = np.maximum(u @ p["trunk.weight"].T + p["trunk.bias"], 0)
    return [np.log1p(np.exp(h @ p[f"head_{n}.weight"].T + p[f"head_{n}.bias"])) for n in ("ve", "ho")]


def test_coefficients_follow_the_published_and_our_formulas():
    x = torch.randn(3, 9, 6, dtype=torch.float64)
    act = lively(FleS(6).double())
    for got, want in zip(act.coefficients(x), formula(act, brute_mean(x, 2, (1,)))): assert np.allclose(got.detach().numpy(), want)
    pn = FleSPN(6).double()
    pn.load_state_dict(act.state_dict())
    for got, want in zip(pn.coefficients(x), formula(act, x.mean(1, keepdim=True))): assert np.allclose(got.detach().numpy(), want)
    proto = lively(FleSProto(6).double())
    mean = brute_mean(x, 2, (0, 1))
    want = np.log1p(np.exp(proto.alpha_ho.detach().numpy() * (mean / mean.mean()).numpy() + proto.gamma_ho.detach().numpy()))
    assert np.allclose(proto.coefficients(x)[1].detach().numpy(), want)


def test_windows_and_causal_by_brute_force():
    x = torch.randn(2, 6, 5, 7, dtype=torch.float64)
    act = lively(FleS(6, channel_dim=1, scope="window", window=(2, 3)).double())
    kv, kh = act.coefficients(x)
    for i in range(0, 5, 2):
        for j in range(0, 7, 3):
            part = x[:, :, i:i + 2, j:j + 3]
            for got, want in zip((kv, kh), formula(act, brute_mean(part, 1, (1, 2)))):
                assert np.allclose(got[:, :, i:i + 2, j:j + 3].detach().numpy(), np.moveaxis(want, -1, 1))
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    causal = lively(FleS(6, scope="causal").double())
    for t in range(7):
        for got, want in zip(causal.coefficients(x), formula(causal, brute_mean(x[:, :t + 1], 2, (1,)))): assert np.allclose(got[:, t:t + 1].detach().numpy(), want)


@pytest.mark.parametrize("kind", [FleS, FleSPN, FleSAdaS])
def test_isolation(kind):
    x = torch.randn(4, 12, 8)
    other, later = x.clone(), x.clone()
    other[2, :, :4] += 3
    later[:, 6:, :4] += 3
    sample, batch, causal = (lively(kind(8, scope=s)) for s in ("sample", "batch", "causal"))
    rows = [0, 1, 3]
    assert torch.equal(sample(x)[rows], sample(other)[rows]) and torch.equal(causal(x)[rows], causal(other)[rows])
    assert not torch.allclose(batch(x)[rows], batch(other)[rows], atol=1e-4)                     # the leak
    assert torch.equal(causal(x)[:, :6], causal(later)[:, :6]) and not torch.allclose(sample(x)[:, :6], sample(later)[:, :6], atol=1e-4)
    assert torch.equal(sample(x[[3, 1, 0, 2]]), sample(x)[[3, 1, 0, 2]])
    proto = lively(FleSProto(8))
    assert proto.scope == "batch" and FleS(8).scope == "sample" and not torch.allclose(proto(x)[rows], proto(other)[rows], atol=1e-4)


def test_parameters_start_and_names():
    act = FleS(256)
    assert set(act.state_dict()) == {f"{n}.{p}" for n in ("norm", "trunk", "head_ve", "head_ho") for p in ("weight", "bias")}
    assert act.trunk.out_features == 8 and FleS(1024).trunk.out_features == 32 and FleS(64, min_hidden=3).trunk.out_features == 3
    two = FleS(64, share_trunk=False, norm="mean")
    assert {k.split(".")[0] for k in two.state_dict()} == {"trunk_ve", "trunk_ho", "head_ve", "head_ho"}
    with torch.no_grad():
        for k in act.coefficients(torch.randn(2, 30, 256)): assert torch.allclose(k, torch.tensor(1.03749), atol=5e-3)
    assert float(act.head_ve.weight.detach().std()) == pytest.approx(1e-3, rel=.1) and (act.head_ho.bias == .6).all()
    assert FleSProto(5).alpha_ve.shape == (5,) and FleSProto(5, per_channel=False).alpha_ve.shape == () and FleSDG(5, per_channel=False).gamma_ho.shape == ()
    assert FleSProto(5, per_channel=False)(torch.randn(2, 3, 5)).shape == (2, 3, 5) and FleSDG(5, per_channel=False)(torch.randn(2, 5)).shape == (2, 5)
    assert (FleSAdaS(7).shift_norm.weight == .01).all()
    C = 512
    assert sum(p.numel() for p in FleS(C).parameters()) == 3 * C * C // 32 + C // 32 + 4 * C


def test_contains_silu_and_gelu():
    x = torch.randn(3, 9, 8, dtype=torch.float64)
    one = math.log(math.e - 1)
    for gate, reference in (("sigmoid", F.silu), ("erf", F.gelu)):
        for act in (FleSProto(8, alpha_init=0., gate=gate), FleSDG(8, gate=gate)):
            act = act.double()
            with torch.no_grad():
                for name, p in act.named_parameters():
                    if "gamma" in name: p.fill_(one)
            assert torch.allclose(act(x), reference(x), rtol=0, atol=1e-12)


def test_adas_shifts_the_gate():
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    act = lively(FleSAdaS(6, shift_init=.5).double())
    kv, kh = act.coefficients(x)
    s = F.layer_norm(x.mean(1, keepdim=True), (6,), act.shift_norm.weight, act.shift_norm.bias)
    assert torch.allclose(act(x), kv * torch.sigmoid(kh * x + s) * x)


def test_detached_statistics():
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    a, b = lively(FleS(6).double()), FleS(6, detach_stats=True).double()
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x), b(x))
    ga, gb = (torch.autograd.grad(m(x).sum(), x)[0] for m in (a, b))
    kv, kh = (k.detach() for k in b.coefficients(x))
    assert torch.allclose(gb, torch.autograd.grad(fles(x, kv, kh).sum(), x)[0]) and not torch.allclose(ga, gb)


@pytest.mark.parametrize("kind", KINDS)
def test_precision_autocast_and_empty(kind):
    act = lively(kind(8))
    x = torch.randn(3, 10, 8)
    full = act(x)
    for dtype, tolerance in ((torch.bfloat16, .05), (torch.float16, .01)):
        half = x.to(dtype).requires_grad_()
        y = act(half)
        y.sum().backward()
        assert y.dtype == half.grad.dtype == dtype and torch.allclose(y.float(), full, atol=tolerance, rtol=tolerance)
        assert act.coefficients(half)[0].dtype == torch.float32
        low = copy.deepcopy(act).to(dtype)
        assert low(half).dtype == dtype and low(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert act(x).dtype == torch.float32 and torch.equal(act(x), full) and act(x.bfloat16()).dtype == torch.bfloat16 and act.coefficients(x)[1].dtype == torch.float32
    assert act(torch.empty(0, 10, 8)).shape == (0, 10, 8) and act(torch.empty(3, 0, 8)).shape == (3, 0, 8)


def test_nan_stays_in_its_sample():
    x = torch.randn(3, 5, 6)
    x[1, 2, 3] = math.nan
    y = lively(FleS(6))(x)
    assert y[1].isnan().any() and y[[0, 2]].isfinite().all() and y[1, 2, 3].isnan()
    assert y[1, :, 3].isnan().all()                                                            # through its statistic
    assert lively(FleSProto(6))(x).isnan().any(-1).any(-1).tolist() == [True] * 3              # batch scope spreads it


@pytest.mark.parametrize("build, kind, text", [
    (lambda: FleS(0), ValueError, "channels"), (lambda: FleS(4, scope="token"), ValueError, "scope"), (lambda: FleS(4, gate="tanh"), ValueError, "gate"), (lambda: FleS(4, norm="bn"), ValueError, "norm"),
    (lambda: FleS(4, scope="window"), ValueError, "window"), (lambda: FleS(4, scope="window", window=(0, 2)), ValueError, "window"), (lambda: FleS(4, reduction=0), ValueError, "reduction"),
    (lambda: FleSProto(4, scope="x"), ValueError, "scope"), (lambda: FleSDG(4, gate="x"), ValueError, "gate"), (lambda: FleSDG(-1), ValueError, "channels"),
    (lambda: FleS(4)(torch.randn(2, 5)), ValueError, "5 channels.*4"), (lambda: FleS(4)(torch.ones(2, 4, dtype=torch.int32)), TypeError, "floating"), (lambda: FleS(4)(torch.ones(2, 4, dtype=torch.bool)), TypeError, "floating"),
    (lambda: FleS(4)(torch.randn(4)), ValueError, "2 axes"), (lambda: FleS(4, scope="causal")(torch.randn(2, 4)), ValueError, "3-D"), (lambda: FleS(4, scope="window", window=(2, 2))(torch.randn(2, 3, 4)), ValueError, "4-D"),
    (lambda: FleS(4, channel_dim=3)(torch.randn(2, 4)), ValueError, "channel_dim"), (lambda: FleS(4).coefficients(torch.randn(2, 7)), ValueError, "7 channels"),
    (lambda: channel_importance(torch.randn(2, 3), scope="causal"), ValueError, "3-D")])
def test_faults(build, kind, text):
    with pytest.raises(kind, match=text): build()


def test_saved_memory():
    x = torch.randn(4, 196, 256)
    kept = {f: saved_for_backward(FleS(256, fused=f), x) for f in (True, False)}
    assert kept[True] <= 1.15 and kept[False] > 2.5
    maps = torch.randn(2, 64, 16, 16)
    assert saved_for_backward(FleS(64, channel_dim=1), maps) <= 1.15 and saved_for_backward(FleSDG(64, channel_dim=1), maps) <= 1.05
    assert saved_for_backward(nn.GELU(), x) == pytest.approx(1)


def test_deterministic_and_portable():
    torch.manual_seed(0); a = FleS(16)
    torch.manual_seed(0); b = FleS(16)
    x = torch.randn(2, 9, 16)
    assert torch.equal(a(x), b(x))
    c = FleS(16)
    c.load_state_dict(a.state_dict())
    assert torch.equal(copy.deepcopy(c)(x), a(x))


@pytest.mark.parametrize("scope", ["sample", "batch"])
@pytest.mark.parametrize("shape, axis", [((3, 11, 20), -1), ((3, 20, 4, 5), 1), ((3, 20, 7), 1), ((2, 3, 5, 20), -1), ((1, 6, 20), -1)])
def test_one_node_has_the_values_and_gradients_of_the_plain_operations(scope, shape, axis):
    torch.manual_seed(5)
    one = FleS(20, channel_dim=axis, scope=scope)
    for head in (one.head_ve, one.head_ho): torch.nn.init.normal_(head.weight)
    plain = copy.deepcopy(one).double()
    plain.fused = False
    x, g = torch.randn(2, *shape)
    x[0] = x[0] - 9                                          # channels without a response
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    assert one._for_one_node(a, one._pooled(a, axis % a.ndim)) is not None, "this input is meant for the one node"
    ya, yb = one(a), plain(b)
    assert torch.allclose(ya.double(), yb, rtol=1e-5, atol=1e-6)
    for name, mine, other in zip(["x", *dict(one.named_parameters())], torch.autograd.grad(ya, [a, *one.parameters()], g), torch.autograd.grad(yb, [b, *plain.parameters()], g.double())):
        assert float((mine.double() - other).abs().max()) <= 2e-5 * max(1., float(other.abs().max())), name


def test_one_node_has_second_derivatives():
    torch.manual_seed(6)
    one = FleS(12)
    for head in (one.head_ve, one.head_ho): torch.nn.init.normal_(head.weight)
    plain = copy.deepcopy(one).double()
    plain.fused = False
    x = torch.randn(2, 5, 12)
    penalties = []
    for act, v in ((one, x.clone().requires_grad_()), (plain, x.double().requires_grad_())):
        g, = torch.autograd.grad(act(v).square().sum(), v, create_graph=True)
        penalties.append([t.double() for t in torch.autograd.grad(g.square().sum(), [v, *act.parameters()])])
    for mine, other in zip(*penalties): assert torch.allclose(mine, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_one_node_leaves_out_what_needs_no_gradient():
    act, x = FleS(16), torch.randn(2, 4, 16)
    for p in act.trunk.parameters(): p.requires_grad_(False)
    act(x).sum().backward()
    assert act.trunk.weight.grad is None and act.head_ho.bias.grad.abs().sum() > 0
    with torch.no_grad(): assert not act(x).requires_grad


def test_one_node_in_threads():
    act, x = FleS(128), torch.randn(6, 400, 128)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    found = []
    for leaf, threads in zip(leaves, (1, 3)):
        torch.set_num_threads(threads)
        try:
            y = act(leaf)
            found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *act.parameters()])])
        finally: torch.set_num_threads(1)
    for a, b in zip(*found): assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(a.abs().max()))


# who looks into the operations -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_func_transforms(kind, fused):
    act = lively(kind(4, fused=fused).double())
    x, v = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    leaf = x.clone().requires_grad_()
    wanted = torch.autograd.grad(act(leaf).square().sum(), [leaf, *act.parameters()])
    parameters = {n: p.detach() for n, p in act.named_parameters()}
    run = lambda p, x: torch.func.functional_call(act, p, (x,)).square().sum()
    gp, gx = torch.func.grad(run, (0, 1))(parameters, x)
    for a, b in zip((gx, *gp.values()), wanted): assert torch.allclose(a, b)
    tangent = torch.func.jvp(lambda x: run(parameters, x), (x,), (v,))[1]
    assert torch.allclose(tangent, (wanted[0] * v).sum())
    each = torch.func.vmap(torch.func.grad(lambda p, x: run(p, x[None])), (None, 0))(parameters, x)                # per-sample gradients
    for i in range(3):
        for a, b in zip(each.values(), torch.autograd.grad(act(x[i:i + 1]).square().sum(), list(act.parameters()))): assert torch.allclose(a[i], b)
    assert torch.allclose(torch.func.vmap(act)(torch.stack([x, v])), torch.stack([act(x), act(v)]))
    assert torch.allclose(torch.func.hessian(lambda x: run(parameters, x))(x).reshape(60, 60), torch.autograd.functional.hessian(lambda x: run(parameters, x), x).reshape(60, 60))
    k = torch.rand(3, 1, 4, dtype=torch.float64)
    assert torch.allclose(torch.func.vmap(lambda x, k: fles(x, k, k) + positive_mean(x, 0) + channel_importance(x[None], scope="sample")[0])(x, k), fles(x, k, k) + positive_mean(x, 1) + channel_importance(x, scope="sample"))


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_without_func_works_or_raises(kind):
    x, v = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    for fused in (True, False):
        act = lively(kind(4, fused=fused).double())
        def tangent():
            with torch.autograd.forward_ad.dual_level(): return torch.autograd.forward_ad.unpack_dual(act(torch.autograd.forward_ad.make_dual(x, v))).tangent
        if fused:
            with pytest.raises(NotImplementedError, match="jvp"): tangent()
        else: assert torch.allclose(tangent(), torch.autograd.functional.jvp(act, x, v)[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_traces_are_of_the_formula_and_can_be_saved(kind, tmp_path):
    act, x, other = lively(kind(4)), *torch.randn(2, 3, 5, 4)
    torch.jit.save(torch.jit.trace(act, x), tmp_path / "act.pt")
    assert torch.allclose(torch.jit.load(tmp_path / "act.pt")(other), act(other), atol=1e-6)
    exported = torch.export.export(act, (x,)).module()
    assert torch.allclose(exported(other), act(other), atol=1e-6)


@pytest.mark.parametrize("kind", [FleS, FleSAdaS, FleSDG])
def test_compile(kind):
    act, x = lively(kind(4)), torch.randn(3, 5, 4)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = torch.compile(act, backend="aot_eager", fullgraph=True)(a), act(b)
    assert torch.allclose(y, z, atol=1e-6)
    for mine, other in zip(*(torch.autograd.grad(t.square().sum(), [leaf, *act.parameters()]) for t, leaf in ((y, a), (z, b)))): assert torch.allclose(mine, other, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_without_data(kind):
    from torch._subclasses import FakeTensorMode
    assert kind(4).to("meta")(torch.empty(3, 5, 4, device="meta")).shape == (3, 5, 4)
    with FakeTensorMode(): assert kind(4)(torch.randn(3, 5, 4)).shape == (3, 5, 4)
    class Named(torch.Tensor): pass
    x = torch.randn(3, 5, 4)
    act = lively(kind(4))
    assert torch.allclose(act(x.as_subclass(Named)).as_subclass(torch.Tensor), act(x), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_nested_and_sparse_tensors_are_named():
    parts = [torch.randn(3, 4), torch.randn(2, 4)]
    for x, text in ((torch.nested.nested_tensor(parts), "nested"), (torch.nested.nested_tensor(parts, layout=torch.jagged), "nested"), (torch.randn(3, 4).to_sparse(), "sparse")):
        for call in (FleS(4), lambda x: positive_mean(x, 0), lambda x: fles(x, 1., 1.)):
            with pytest.raises(TypeError, match=f"^x: expected a dense tensor, got a {text}"): call(x)
