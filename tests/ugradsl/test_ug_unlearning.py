"Unlearners: loops against hand-written ones, equivalences, promises and faults."
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from iclr26.ugradsl import (METHODS, BoundaryExpand, BoundaryShrink, FineTune, GradientAscent, InfluenceUnlearn, L1Sparse, RandomLabel, Retrain, SalUn, UGradSL, UGradSLPlus,
                            UnlearningDivergedError, adaptive_alpha, evaluate, mixed_unlearn_loss, unlearn)
from iclr26.ugradsl.unlearning import _Stream, _seeds

torch.set_num_threads(1)
ALL = list(METHODS.values())


def make(n=50, d=6, k=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % k
    x = torch.rand(n, d, generator=g)
    x[torch.arange(n), y] += 2
    return TensorDataset(x / 3, y)


def net(d=6, k=3, seed=0, norm=False, dropout=False):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(d, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), *([nn.Dropout(.3)] if dropout else []), nn.Linear(8, k))


def parts(data, n=20): return Subset(data, range(n, len(data))), Subset(data, range(n))
def flat(m): return torch.cat([p.detach().flatten() for p in m.parameters()])
DATA = make()
RETAIN, FORGET = parts(DATA)
KW = dict(epochs=2, batch_size=8, lr=.05)


class Untouchable(Dataset):
    "Has a length; reading it is an error."
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): raise AssertionError("this set must not be read")


@pytest.mark.parametrize("cls", ALL)
def test_copy_flags_and_determinism(cls):
    model = net(norm=True, dropout=True).train()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    flags = [m.training for m in model.modules()]
    a, b = (cls(**KW).unlearn(model, RETAIN, FORGET, generator=5) for _ in range(2))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and flags == [m.training for m in model.modules()]
    assert all(torch.equal(v, b.model.state_dict()[k]) for k, v in a.model.state_dict().items())
    assert [m.training for m in a.model.modules()] == flags and a.rte_s > 0
    assert not torch.equal(flat(a.model), flat(model)) and [p.requires_grad for p in a.model.parameters()] == [True] * 6
    zero = cls(**{**KW, "epochs": 0}).unlearn(model, RETAIN, FORGET)
    assert all(torch.equal(v, before[k]) for k, v in zero.model.state_dict().items()) and zero.steps == 0 and zero.history == []


@pytest.mark.parametrize("cls", [c for c in ALL if c is not InfluenceUnlearn])
def test_steps_and_history(cls):
    r = cls(**KW).unlearn(net(), RETAIN, FORGET)
    n_f, n_r = math.ceil(20 / 8), math.ceil(30 / 8)
    expected = {FineTune: n_r, L1Sparse: n_r, UGradSLPlus: n_r, RandomLabel: n_f + n_r, SalUn: n_f + n_r}.get(cls, n_f)
    assert r.steps == 2 * expected and len(r.history) == 2 and all("loss" in h for h in r.history)


def test_stream_passes():
    s = _Stream(TensorDataset(torch.arange(7)), 3, 0)
    batches = [s.next().tolist() for _ in range(6)]
    assert [len(b) for b in batches] == [3, 3, 1] * 2 and sorted(sum(batches[:3], [])) == list(range(7)) == sorted(sum(batches[3:], []))
    assert batches[:3] != batches[3:] and _Stream(TensorDataset(torch.arange(2)), 5, 0).next().numel() == 2


def by_hand(model, cls, seed, p=.7, alpha=-.3, floor="chance", epochs=2, batch=8, lr=.05):
    "UGradSL written as a plain loop over the same order."
    model = copy.deepcopy(model)
    sr, sf, _ = _seeds(seed)
    r, f = _Stream(RETAIN, batch, sr), _Stream(FORGET, batch, sf)
    opt = torch.optim.SGD(model.parameters(), lr, momentum=.9, weight_decay=5e-4)
    for _ in range(epochs * len(f if cls is UGradSL else r)):
        i, j = r.next(), f.next()
        if cls is UGradSL: i = i[:len(j)]
        (xr, yr), (xf, yf) = DATA[[RETAIN.indices[k] for k in i]], DATA[[FORGET.indices[k] for k in j]]
        opt.zero_grad()
        mixed_unlearn_loss(model(xr), yr, model(xf), yf, p=p, alpha=alpha, floor=floor)[0].backward()
        opt.step()
    return model


@pytest.mark.parametrize("cls", [UGradSL, UGradSLPlus])
@pytest.mark.parametrize("norm", [False, True])
def test_against_a_hand_written_loop(cls, norm):
    model = net(norm=norm).train()
    r = cls(p=.7, alpha=-.3, **KW).unlearn(model, RETAIN, FORGET, generator=4)
    assert torch.allclose(flat(r.model), flat(by_hand(model, cls, 4)), atol=1e-6)


def test_limits_of_the_family():
    model = net()
    ft, plus = FineTune(**KW).unlearn(model, RETAIN, None, generator=1), UGradSLPlus(p=1, **KW).unlearn(model, RETAIN, Untouchable(9), generator=1)
    assert torch.allclose(flat(ft.model), flat(plus.model), atol=1e-6) and ft.steps == plus.steps
    assert torch.allclose(flat(ft.model), flat(UGradSLPlus(p=1, **KW).unlearn(model, RETAIN, None, generator=1).model), atol=1e-6)
    ga = GradientAscent(**KW).unlearn(model, None, FORGET, generator=1)
    for retain in (Untouchable(9), None):
        ug = UGradSL(p=0, alpha=0., floor=None, **KW).unlearn(model, retain, FORGET, generator=1)
        assert torch.allclose(flat(ga.model), flat(ug.model), atol=1e-5) and ga.steps == ug.steps
    assert UGradSL(p=1, **KW).unlearn(model, RETAIN, Untouchable(20)).steps == 6


@pytest.mark.parametrize("method, sets", [(FineTune(**KW), (RETAIN, Untouchable(9))), (L1Sparse(**KW), (RETAIN, Untouchable(9))), (GradientAscent(**KW), (Untouchable(9), FORGET)),
                                          (BoundaryShrink(**KW), (Untouchable(9), FORGET)), (BoundaryExpand(**KW), (Untouchable(9), FORGET))])
def test_what_is_never_read(method, sets): assert method.unlearn(net(), *sets).steps > 0


def test_one_pass_without_and_two_with_batch_norm():
    calls = []
    def forward(model, x): calls.append(len(x)); return model(x)
    kw = dict(epochs=1, batch_size=10, forward_fn=forward)
    UGradSL(**kw).unlearn(net(), RETAIN, FORGET)
    assert calls == [20, 20]
    calls.clear()
    UGradSL(**kw).unlearn(net(norm=True), RETAIN, FORGET)
    assert calls == [10] * 4


def test_training_mode_and_global_random_state():
    modes = []
    model = net(dropout=True).eval()
    state = torch.random.get_rng_state()
    UGradSLPlus(**KW, forward_fn=lambda m, x: (modes.append(m.training), m(x))[1]).unlearn(model, RETAIN, FORGET)
    assert all(modes) and torch.equal(torch.random.get_rng_state(), state)


def test_stop_forget():
    kw = dict(batch_size=8, lr=.1, stop="forget", alpha=-.5)
    r = UGradSLPlus(epochs=50, target=1., **kw).unlearn(net(), RETAIN, FORGET)
    assert r.steps == 3  # one pass over 20 forget samples, accuracy cannot exceed 1
    trained = FineTune(epochs=40, batch_size=8, lr=.2).unlearn(net(), DATA, None).model
    r = UGradSL(epochs=200, target=.3, p=.2, **kw).unlearn(trained, RETAIN, FORGET)
    assert 3 < r.steps < 600


def test_stop_retain():
    r = UGradSLPlus(epochs=500, batch_size=8, lr=.05, stop="retain").unlearn(net(), RETAIN, FORGET)
    losses = [h["retain"] for h in r.history]
    assert len(losses) < 500 and losses[-1] > min(losses[:-1]) - 1e-3
    assert all(b <= min(losses[:i + 1]) - 1e-3 for i, b in enumerate(losses[1:-1]))


def test_adaptive_uses_features():
    seen = []
    def features(model, x): seen.append(model.training); return model[0](x)
    r = UGradSL(alpha=None, beta=.4, feature_fn=features, **KW).unlearn(net(), RETAIN, FORGET)
    assert len(seen) == 2 * r.steps and -1 <= r.history[0]["alpha"] <= 0
    zr, zf = net()(DATA.tensors[0][20:28]), net()(DATA.tensors[0][:8])
    assert torch.allclose(UGradSL(alpha=None, beta=.4)._adapt(None, None, None, zr, zf), adaptive_alpha(zr, zf, .4))


def test_divergence_keeps_the_last_good_state():
    bad = TensorDataset(torch.full((8, 6), float("nan")), torch.zeros(8, dtype=torch.long))
    model = net(norm=True)
    with pytest.raises(UnlearningDivergedError) as e: GradientAscent(**KW).unlearn(model, None, bad)
    assert e.value.step == 0 and all(torch.equal(v, model.state_dict()[k]) for k, v in e.value.last_good_state.items())
    with pytest.raises(UnlearningDivergedError) as e: GradientAscent(epochs=500, batch_size=8, lr=50., momentum=.99).unlearn(net(), None, FORGET)
    assert e.value.step > 0 and all(v.isfinite().all() for v in e.value.last_good_state.values())


def test_gradient_clipping():
    model = net()
    r = GradientAscent(epochs=1, batch_size=100, lr=1., momentum=0., weight_decay=0., max_grad_norm=1e-3).unlearn(model, None, FORGET)
    assert float((flat(r.model) - flat(model)).norm()) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("cls", ALL)
def test_params_roundtrip(cls):
    m = cls(epochs=3, lr=.2)
    p = m.get_params()
    assert p["epochs"] == 3 and p["lr"] == .2 and cls(**p).get_params() == p and m.set_params(lr=.5) is m and m.lr == .5
    with pytest.raises(ValueError, match="unknown_name"): m.set_params(unknown_name=1)
    with pytest.raises(ValueError, match="lr"): m.set_params(epochs=9, lr=-1.)
    assert m.get_params()["epochs"] == 3
    with pytest.raises(TypeError): cls(3)


@pytest.mark.parametrize("call, error, word", [
    (lambda: UGradSL().unlearn(net(), RETAIN, Subset(DATA, [])), ValueError, "forget set is empty"), (lambda: UGradSL().unlearn(net(), Subset(DATA, []), FORGET), ValueError, "retain set is empty"),
    (lambda: UGradSL().unlearn(net(), None, FORGET), ValueError, "retain set is empty"), (lambda: GradientAscent().unlearn(net(), RETAIN, None), ValueError, "forget set is empty"),
    (lambda: UGradSL().unlearn(net(), Subset(DATA, range(10)), Subset(DATA, range(7, 20))), ValueError, "share 3"),
    (lambda: UGradSL().unlearn(net(), Subset(Subset(DATA, range(5, 20)), range(3)), Subset(DATA, [6, 7, 40])), ValueError, "share 2"),
    (lambda: UGradSL().unlearn(net(), DATA, DATA), ValueError, "share 50"),
    (lambda: UGradSL(stop="forget"), ValueError, "target"), (lambda: UGradSL(stop="forget", target=2.), ValueError, "target"), (lambda: UGradSL(stop="never"), ValueError, "stop"),
    (lambda: UGradSL(epochs=-1), ValueError, "epochs"), (lambda: UGradSL(batch_size=0), ValueError, "batch_size"), (lambda: UGradSL(lr=0), ValueError, "lr"),
    (lambda: UGradSL(p=-.1), ValueError, "p="), (lambda: UGradSL(floor="x"), ValueError, "floor"), (lambda: UGradSL(beta=2.), ValueError, "beta"), (lambda: UGradSL(alpha=None, p=0), ValueError, "adaptive"),
    (lambda: SalUn(keep=1.5), ValueError, "keep"), (lambda: BoundaryShrink(eps=0), ValueError, "eps"), (lambda: L1Sparse(gamma=-1), ValueError, "gamma"),
    (lambda: FineTune().unlearn(net(k=2), RETAIN, None), ValueError, "labels"), (lambda: UGradSL().unlearn(net(k=2), RETAIN, FORGET), ValueError, "labels"),
    (lambda: unlearn(net(), FORGET, RETAIN, method="magic"), ValueError, "magic"), (lambda: unlearn(net(), FORGET, RETAIN, method=UGradSL(), lr=.1), TypeError, "lr"),
    (lambda: unlearn(net(), [1] and iter([1]), RETAIN), TypeError, "forget"),
])
def test_bad_input(call, error, word):
    with pytest.raises(error, match=word): call()


def test_positive_alpha_warns():
    with pytest.warns(UserWarning, match="alpha"): UGradSL(alpha=.2)


def test_frozen_parameters_stay():
    model = net()
    model[0].requires_grad_(False)
    for cls in ALL:
        r = cls(**KW).unlearn(model, RETAIN, FORGET)
        assert torch.equal(r.model[0].weight, model[0].weight), cls
        assert not torch.equal(r.model[2].weight, model[2].weight), cls
    with pytest.raises(ValueError, match="requires_grad"): UGradSL().unlearn(net().requires_grad_(False), RETAIN, FORGET)


def test_retrain():
    got = {}
    def fit(data, generator): got.update(n=len(data), g=generator.initial_seed()); return net(seed=9)
    a = Retrain(fit).unlearn(net(), RETAIN, Untouchable(5), generator=1)
    first = got["g"]
    assert got["n"] == 30 and a.steps == 0 and torch.equal(flat(a.model), flat(net(seed=9)))
    Retrain(fit).unlearn(None, RETAIN, None, generator=1)
    assert got["g"] == first


def test_salun_mask_by_hand():
    model = net(norm=True).train()
    mask = SalUn(keep=.37, batch_size=8).mask(model, FORGET)
    probe = copy.deepcopy(model).eval()
    for i in range(0, 20, 8):
        x, y = DATA[list(range(i, min(i + 8, 20)))]
        F.cross_entropy(probe(x), y).backward()  # grads accumulate
    g = torch.cat([p.grad.abs().flatten() for p in probe.parameters()])
    chosen = torch.cat([mask[k].flatten() for k, _ in model.named_parameters()])
    assert chosen.dtype == torch.bool and int(chosen.sum()) == int(.37 * len(g))
    assert g[chosen].min() >= g[~chosen].max() and model.training
    r = SalUn(keep=.37, **KW).unlearn(model, RETAIN, FORGET)
    moved = flat(r.model) != flat(model)
    assert not moved[~chosen].any() and moved[chosen].any()
    for keep, n in ((0., 0), (1., len(g))): assert sum(int(m.sum()) for m in SalUn(keep=keep).mask(model, FORGET).values()) == n


def test_l1_schedule():
    x, y = RETAIN.dataset.tensors[0][20:], RETAIN.dataset.tensors[1][20:]
    h = L1Sparse(epochs=4, batch_size=100, gamma=.01, no_l1_epochs=1, lr=.01).unlearn(net(), RETAIN, None).history
    assert [e["gamma"] for e in h] == pytest.approx([.01, .01 * 2 / 3, .01 / 3, 0])
    expected = F.cross_entropy(net()(x), y) + .01 * sum(p.abs().sum() for p in net().parameters())
    assert h[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert all(e["gamma"] == 0 for e in L1Sparse(epochs=2, no_l1_epochs=2).unlearn(net(), RETAIN, None).history)


def test_influence_by_hand():
    model = net().double()
    data = TensorDataset(DATA.tensors[0].double(), DATA.tensors[1])
    retain, forget = parts(data, 5)
    params = list(model.parameters())
    def grad(i):
        x, y = data[[i]]
        return torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(model(x), y), params)])
    gf, gr = sum(grad(i) for i in range(5)), sum(grad(i) for i in range(5, 50))
    k, o, N = gf / 50 - gr * 5 / (50 * 45), grad(5), 7
    for i in range(6, 13):
        g = grad(i); kg, og = k @ g, o @ g
        k, o = k - kg / (N + og) * o, o - og / (N + og) * o
    r = InfluenceUnlearn(scale=2., max_samples=7, batch_size=3).unlearn(model, retain, forget)
    assert torch.allclose(flat(r.model), flat(model) + 2 * k, atol=1e-12) and r.steps == 1


def test_boundary_shrink_labels():
    model = net().eval()
    x = torch.tensor([[.0, .5, 1., .2, .9, 1.4]]); y = torch.tensor([1])
    xg = x.clone().requires_grad_()
    F.cross_entropy(model(xg), y).backward()
    moved = (x + .3 * xg.grad.sign())
    moved[:, :5] = moved[:, :5].clamp(0, 1); moved[:, 5] = moved[:, 5].clamp(0, 1.4)
    assert torch.equal(BoundaryShrink(eps=.3)._nearest(model, x, y), model(moved).argmax(1))


def test_boundary_expand_keeps_the_architecture():
    r = BoundaryExpand(**KW).unlearn(net(), RETAIN, FORGET)
    assert r.model[2].out_features == 3 and r.model[2].weight.shape == (3, 8) and r.model(DATA.tensors[0]).shape == (50, 3)


def test_loaders_and_collate():
    model, kw = net(), dict(epochs=1, lr=.05)
    plain = unlearn(model, FORGET, RETAIN, batch_size=8, **kw)
    loaded = unlearn(model, DataLoader(FORGET, 4), DataLoader(RETAIN, 8, shuffle=True), **kw)
    own = unlearn(model, DataLoader(FORGET, 8, collate_fn=lambda items: (torch.stack([x for x, _ in items]), torch.stack([y for _, y in items]))), DataLoader(RETAIN, 8), **kw)
    assert torch.equal(flat(plain.model), flat(loaded.model)) and torch.equal(flat(plain.model), flat(own.model))
    with pytest.raises(ValueError, match="share"): unlearn(model, DataLoader(Subset(DATA, [0, 1]), 2, collate_fn=lambda i: i), DataLoader(Subset(DATA, [1, 2]), 2), **kw)
    class Endless(IterableDataset):
        def __iter__(self): return iter([])
    with pytest.raises(TypeError, match="forget"): unlearn(model, DataLoader(Endless(), 2), RETAIN)


@pytest.mark.parametrize("cls", ALL)
def test_methods_take_loaders(cls):
    loaders = DataLoader(RETAIN, 5, shuffle=True), DataLoader(FORGET, 3)
    assert torch.equal(flat(cls(**KW).unlearn(net(), *loaders).model), flat(cls(**KW).unlearn(net(), RETAIN, FORGET).model))
    with pytest.raises(ValueError, match="share"): UGradSL().unlearn(net(), DataLoader(Subset(DATA, [0, 1])), Subset(DATA, [1, 2]))


@pytest.mark.parametrize("cls", [c for c in ALL if c is not BoundaryShrink])
def test_nan_in_the_data_or_the_model_is_named(cls):
    x, y = (t.clone() for t in DATA.tensors)
    x[:20] = math.nan
    both, half = (lambda d: (Subset(d, range(20, 50)), Subset(d, range(20)))), TensorDataset(x, y)
    if cls not in (FineTune, L1Sparse):
        with pytest.raises(UnlearningDivergedError, match="inputs of the forget set hold NaN") as e: cls(**KW).unlearn(net(norm=True), *both(half))
        assert e.value.step == 0 and "weights of" not in str(e.value)
    broken = net()
    with torch.no_grad(): broken[0].weight[0, 0] = math.nan
    with pytest.raises(UnlearningDivergedError, match="weights of the model hold NaN") as e: cls(**KW).unlearn(broken, RETAIN, FORGET)
    assert "inputs of" not in str(e.value)
    def forward(model, inputs): return model(inputs) * math.inf
    with pytest.raises(UnlearningDivergedError, match="data or the model may give NaN"): cls(**KW, forward_fn=forward).unlearn(net(), RETAIN, FORGET)


def test_the_clock_does_not_count_compilation(monkeypatch):
    import time
    import iclr26.ugradsl.unlearning as u
    calls = []
    monkeypatch.setattr(u, "_warm_up", lambda: (calls.append("compiled"), time.sleep(.5)))
    r = UGradSL(epochs=0).unlearn(net(), RETAIN, FORGET)
    assert calls == ["compiled"] and r.rte_s < .5


def test_warming_up_compiles_what_a_run_calls():
    from iclr26.ugradsl import losses
    losses._warm_up()
    loops = losses._forward, losses._backward
    before = [list(f.signatures) for f in loops]
    for alpha in (-.2, None): UGradSL(alpha=alpha, **KW).unlearn(net(), RETAIN, FORGET)
    assert [list(f.signatures) for f in loops] == before and all(before)


@pytest.mark.parametrize("y", [torch.arange(50) % 3 + .7, (torch.arange(50) % 3).half(), (torch.arange(50) % 3).to(torch.complex64)])
@pytest.mark.parametrize("cls", ALL)
def test_labels_are_never_rounded(cls, y):
    x, word = DATA.tensors[0], f"labels have type {y.dtype}".replace(".", r"\.")
    for data in (TensorDataset(x, y), [*zip(x, y)]):
        with pytest.raises(ValueError, match=word): cls(**KW).unlearn(net(), *parts(data))
        with pytest.raises(ValueError, match=word): evaluate(net(), *parts(data), DATA)


def test_labels_of_other_integer_types_and_no_tensors():
    x, y = DATA.tensors
    same = [UGradSL(**KW).unlearn(net(), *parts(TensorDataset(x, y.to(t)))).model for t in (torch.int64, torch.int32, torch.uint8)]
    assert torch.equal(flat(same[0]), flat(same[1])) and torch.equal(flat(same[0]), flat(same[2]))
    with pytest.raises(ValueError, match="labels have type (list|tuple)"): UGradSL(**KW).unlearn(net(), *parts([(a, str(int(b))) for a, b in zip(x, y)]))


def test_dict_items_without_labels_say_what_to_do():
    data = [{"x": x, "label": int(y)} for x, y in zip(*DATA.tensors)]
    for call in (lambda: UGradSL(**KW).unlearn(net(), *parts(data)), lambda: evaluate(net(), *parts(data), DATA)):
        with pytest.raises(ValueError, match=r"\['label', 'x'\].*key 'labels'.*rename"): call()


class Words(Dataset):
    "Items as transformers' trainers use them; no tensors underneath."
    def __init__(self, n, seed): self.x = torch.randint(1, 50, (n, 7), generator=torch.Generator().manual_seed(seed)); self.y = torch.arange(n) % 3
    def __len__(self): return len(self.y)
    def __getitem__(self, i): return {"input_ids": self.x[i], "attention_mask": torch.ones(7, dtype=torch.long), "labels": int(self.y[i])}


def test_transformers_classifier():
    from transformers import BertConfig, BertForSequenceClassification
    from iclr26.ugradsl import evaluate
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16, num_labels=3)).eval()
    retain, forget, test = Words(12, 0), Words(6, 1), Words(9, 2)
    for cls in (UGradSL, UGradSLPlus, SalUn, BoundaryExpand, InfluenceUnlearn):
        r = cls(epochs=1, batch_size=4).unlearn(model, retain, forget)
        assert not torch.equal(flat(r.model), flat(model)) and not r.model.training
    assert 0 <= evaluate(r.model, retain, forget, test).ua <= 100
    with pytest.raises(ValueError, match="float tensor"): BoundaryShrink(epochs=1).unlearn(model, retain, forget)


def test_safetensors_roundtrip(tmp_path):
    from safetensors.torch import load_model, save_model
    r = UGradSLPlus(**KW).unlearn(net(norm=True), RETAIN, FORGET)
    save_model(r.model, tmp_path / "m.safetensors")
    other = net(norm=True, seed=5)
    load_model(other, tmp_path / "m.safetensors")
    assert torch.equal(flat(other), flat(r.model))


def test_it_unlearns_a_class():
    trained = FineTune(epochs=60, batch_size=16, lr=.2).unlearn(net(), DATA, None).model
    chosen = DATA.tensors[1] == 0
    forget, retain = Subset(DATA, chosen.nonzero()[:, 0]), Subset(DATA, (~chosen).nonzero()[:, 0])
    right = lambda m, s: float((m(DATA.tensors[0][s.indices]).argmax(1) == DATA.tensors[1][s.indices]).float().mean())
    assert right(trained, forget) == right(trained, retain) == 1
    r = UGradSLPlus(epochs=20, batch_size=8, lr=.05).unlearn(trained, retain, forget)
    assert right(r.model, forget) <= .1 and right(r.model, retain) >= .95
