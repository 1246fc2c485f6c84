"""Formulas of the peers by numpy and by hand, faults, the registry."""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import erf, expit, ndtr
from torch import nn

import iclr26.fles as fles_package
from iclr26.fles import ACTIVATIONS, IIEUB, AconC, AdaShiftB, MetaAcon, cosine_response, make_activation

torch.set_num_threads(1)
SOFTPLUS = lambda x: np.logaddexp(0, x)
FORMULAS = {"relu": lambda x: np.maximum(x, 0), "gelu": lambda x: x * ndtr(x), "silu": lambda x: x * expit(x), "mish": lambda x: x * np.tanh(SOFTPLUS(x)), "squared_relu": lambda x: np.maximum(x, 0) ** 2,
            "swish": lambda x: x * expit(x), "smu": lambda x: (1.25 * x + .75 * x * erf(.75 * x)) / 2, "pserf": lambda x: x * erf(1.25 * SOFTPLUS(.85 * x)), "xgelu": lambda x: x * ndtr(x), "xsilu": lambda x: x * expit(x)}


def test_registry_is_the_contract():
    assert ACTIVATIONS == ("relu", "gelu", "silu", "mish", "squared_relu", "swish", "acon_c", "meta_acon", "smu", "pserf", "xgelu", "xsilu", "adashift_b", "fles", "fles_pn", "fles_adas", "fles_proto", "fles_dg")
    with pytest.raises(ValueError, match="relu, gelu"): make_activation("gelo", 4)
    assert make_activation("fles", 4, scope="causal").scope == "causal"
    for name in ("ReLU", "GELU", "SiLU", "Mish", "SquaredReLU", "Swish", "AconC", "SMU", "Pserf", "XGELU", "XSiLU", "AdaShiftB", "MetaAcon", "IIEUB"): assert issubclass(getattr(fles_package, name), nn.Module)


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_at_start(name):
    x = torch.randn(3, 5, 4, dtype=torch.float64) * 2
    assert np.allclose(make_activation(name, 4).double()(x).detach().numpy(), FORMULAS[name](x.numpy()), atol=1e-7)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape, channel_dim", [((3, 5, 6), -1), ((3, 6, 4, 5), 1), ((3, 6), -1)])
def test_shape_dtype_gradient_and_faults(name, shape, channel_dim):
    act = make_activation(name, 6, channel_dim=channel_dim)
    x = torch.randn(shape, requires_grad=True)
    y = act(x)
    y.square().sum().backward()
    assert y.shape == shape and x.grad.isfinite().all() and all(p.grad is not None and p.grad.isfinite().all() for p in act.parameters())
    act.eval()
    assert act(x.detach().bfloat16()).dtype == torch.bfloat16 and act(x.detach().double()).dtype == torch.float64
    assert act(torch.empty(0, *shape[1:])).shape == (0, *shape[1:])
    with pytest.raises(ValueError, match="7 channels.*6"): act(torch.randn([7 if n == 6 else n for n in shape]))
    with pytest.raises(TypeError): act(torch.ones(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match="channels"): make_activation(name, 0)


@pytest.mark.parametrize("name", ["swish", "smu", "pserf", "xgelu", "xsilu", "acon_c", "adashift_b", "meta_acon"])
def test_gradcheck(name):
    torch.manual_seed(0)
    act = make_activation(name, 3).double().eval()
    names = [n for n, _ in act.named_parameters()]
    run = lambda x, *p: torch.func.functional_call(act, dict(zip(names, p)), (x,))
    assert torch.autograd.gradcheck(run, [torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True), *(p.detach().requires_grad_() for p in act.parameters())])


def test_expanded_gates_with_parameter():
    for name, rho in (("xgelu", ndtr), ("xsilu", expit)):
        act = make_activation(name, 1).double()
        nn.init.constant_(act.a, .3)
        x = torch.linspace(-3, 3, 11, dtype=torch.float64)[:, None]
        assert np.allclose(act(x).detach().numpy(), x.numpy() * (1.6 * rho(x.numpy()) - .3))


def test_acon_and_meta_acon():
    x = torch.randn(4, 7, 5, dtype=torch.float64)
    act = AconC(5).double()
    d = (act.p1 - act.p2) * x
    assert torch.allclose(act(x), d * torch.sigmoid(act.beta * d) + act.p2 * x)
    meta = MetaAcon(40).double()
    assert meta.fc1.out_features == 16 and MetaAcon(640).fc1.out_features == 40 and MetaAcon(8, reduction=2).fc1.out_features == 4
    x = torch.randn(4, 7, 40, dtype=torch.float64)
    meta(x)                                                                                     # moves the running statistics
    meta.eval()
    beta = torch.sigmoid(meta.bn2(meta.fc2(meta.bn1(meta.fc1(x.mean(1))))))[:, None]
    d = (meta.p1 - meta.p2) * x
    assert torch.allclose(meta(x), d * torch.sigmoid(beta * d) + meta.p2 * x)
    assert meta(x[:1]).shape == (1, 7, 40)
    with pytest.raises(ValueError, match="batch"): meta.train()(x[:1])
    maps = MetaAcon(8, channel_dim=1)
    assert maps(torch.randn(2, 8, 3, 3)).shape == (2, 8, 3, 3)


def test_adashift_by_hand():
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    act = AdaShiftB(4).double()
    assert (AdaShiftB(4).norm.weight == .01).all()
    nn.init.constant_(act.norm.weight, .7)
    m = x.mean(1, keepdim=True)
    s = .7 * (m - m.mean(-1, keepdim=True)) / torch.sqrt(m.var(-1, keepdim=True, unbiased=False) + 1e-5)
    assert torch.allclose(act(x), x * torch.sigmoid(x + s))
    assert act(x[:1]).shape == (1, 6, 4)                                                        # batch size 1 keeps its axis


def test_iieu_by_hand():
    layer = nn.Linear(5, 4).double()
    inputs = torch.randn(2, 6, 5, dtype=torch.float64)
    x, c = layer(inputs), cosine_response(inputs, layer)
    act = IIEUB(4).double()
    m = (-.05 + torch.sigmoid(F.layer_norm(x.mean(1, keepdim=True), (4,))) + c).detach()
    want = torch.where(m < 0, .05 * x * m.exp(), (.05 + m) * x)
    assert (m < 0).any() and (m > 0).any() and torch.allclose(act(x, c), want, atol=1e-7)       # b is stored in float32
    with pytest.raises(ValueError, match="cosine"): act(x, c[:1])


def test_cosine():
    layer, x = nn.Linear(5, 4), torch.randn(3, 5)
    assert torch.allclose(cosine_response(x, layer), F.cosine_similarity(x[:, None], layer.weight[None], dim=-1), atol=1e-6)
    assert not cosine_response(torch.zeros(2, 5), layer).any() and cosine_response(x * 1e-3, layer).abs().max() <= 1 + 1e-5
    conv, maps = nn.Conv2d(3, 4, 3, padding=1, dilation=2), torch.randn(2, 3, 8, 8)
    patches = F.unfold(maps, 3, dilation=2, padding=1)
    want = F.cosine_similarity(patches[:, None], conv.weight.flatten(1)[None, :, :, None], dim=2)
    assert torch.allclose(cosine_response(maps, conv).flatten(2), want, atol=1e-5) and cosine_response(maps, conv).shape == conv(maps).shape
    with pytest.raises(TypeError): cosine_response(x, nn.LayerNorm(5))
    with pytest.raises(ValueError): cosine_response(torch.randn(3, 8, 8), conv)


def test_nan_is_not_hidden():
    for name in ACTIVATIONS:
        x = torch.randn(3, 5, 6)
        x[1, 2, 3] = math.nan
        assert make_activation(name, 6).eval()(x)[1, 2, 3].isnan(), name
