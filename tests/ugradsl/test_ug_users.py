"""The whole path on models as users have them: transformers on padded text, tables with batch norm, an image CNN."""
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from iclr26.ugradsl import (METHODS, FineTune, GradientAscent, InfluenceUnlearn, Retrain, SalUn, UGradSL, UGradSLPlus, UnlearningDivergedError, adaptive_alpha, compare, evaluate, mia_attacks, split_forget, tune, unlearn)

torch.set_num_threads(1)


def flat(m): return torch.cat([p.detach().flatten() for p in m.parameters()])


class Text(Dataset):
    "Token lists of unequal length; the last two tokens give the topic away."
    def __init__(self, n, seed):
        r = np.random.default_rng(seed)
        self.y = np.arange(n) % 3
        self.x = [[*r.integers(3, 40, r.integers(2, 7)).tolist(), *[41 + 3 * int(y)] * 2] for y in self.y]
    def __len__(self): return len(self.y)
    def __getitem__(self, i): return {"input_ids": self.x[i], "labels": int(self.y[i])}


def pad(items):
    width = max(len(i["input_ids"]) for i in items)
    ids = torch.tensor([i["input_ids"] + [0] * (width - len(i["input_ids"])) for i in items])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([i["labels"] for i in items])}


def bert():
    from transformers import BertConfig, BertForSequenceClassification
    return BertForSequenceClassification(BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16, num_labels=3))
def gpt2():
    from transformers import GPT2Config, GPT2ForSequenceClassification
    return GPT2ForSequenceClassification(GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=2, n_positions=16, num_labels=3, pad_token_id=0, bos_token_id=1, eos_token_id=2))
def loader(d): return DataLoader(d, batch_size=32, collate_fn=pad)
def forward(model, batch): return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


@pytest.mark.parametrize("make", [bert, gpt2])
def test_transformers_on_padded_text_from_training_to_report(make):
    torch.manual_seed(0)
    fresh, train, test = make(), Text(120, 0), Text(60, 1)
    forget_i, retain_i = split_forget(train.y, "class", classes=[1])
    forget, retain, unseen = Subset(train, forget_i.tolist()), Subset(train, retain_i.tolist()), Subset(test, np.flatnonzero(test.y != 1).tolist())
    fit = lambda data, g: FineTune(epochs=30, batch_size=32, lr=.1, max_grad_norm=1., forward_fn=forward).unlearn(fresh, data, None, generator=g).model
    trained = fit(loader(train), 0)
    card = lambda m: evaluate(m, loader(retain), loader(forget), loader(unseen), forward_fn=forward)
    before, reference = card(trained), card(unlearn(trained, loader(forget), loader(retain), method=Retrain(fit)).model)
    assert before.ua < 5 and before.ra > 95 and reference.ua == 100 and reference.ra > 95
    state = flat(trained).clone()
    for name in METHODS:
        call = lambda: unlearn(trained, loader(forget), loader(retain), method=name, epochs=1, lr=.01, forward_fn=forward)
        if name == "boundary_shrink":
            with pytest.raises(ValueError, match="float tensor"): call()
            continue
        assert 0 <= card(call().model).gap(reference) <= 100, name
    best, table = tune(UGradSLPlus(epochs=5, batch_size=32, forward_fn=forward), {"lr": [.05, .15]}, trained, loader(retain), loader(forget), loader(unseen), reference=reference)
    assert table.gap.iloc[0] == table.gap.min() <= before.gap(reference) and table.lr.iloc[0] == best["lr"]
    explicit, default = (UGradSLPlus(epochs=5, batch_size=32, **best, **kw).unlearn(trained, loader(retain), loader(forget)) for kw in (dict(forward_fn=forward), {}))
    assert card(explicit.model).ua > 95 and card(explicit.model).ra > 90
    assert torch.equal(flat(explicit.model), flat(default.model)) and torch.equal(flat(trained), state)
    attacks = mia_attacks(explicit.model, loader(retain), loader(forget), loader(unseen), forward_fn=forward)
    assert set(attacks) == {"correctness", "confidence", "entropy", "modified entropy", "loss AUC"}
    adaptive = unlearn(trained, loader(forget), loader(retain), alpha=None, epochs=1, feature_fn=lambda m, b: m(**b, output_hidden_states=True).hidden_states[-1][:, 0])
    assert -1 <= adaptive.history[0]["alpha"] <= 0


def test_text_without_padding_says_what_to_do():
    class Ragged(Dataset):
        def __len__(self): return 6
        def __getitem__(self, i): return torch.zeros(3 + i), i % 3
    for data in (Text(6, 0), Ragged()):
        with pytest.raises(ValueError, match="collate_fn"): unlearn(nn.Linear(3, 3), Subset(data, [0, 1]), Subset(data, [2, 3, 4, 5]))


def table(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    return TensorDataset(3 * torch.eye(3, 5)[y] + torch.randn(n, 5, generator=g), y)
def tabular():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(.1), nn.Linear(16, 3))
def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    x = .3 * torch.rand(n, 1, 8, 8, generator=g)
    for k in range(3): x[y == k, :, 2 * k:2 * k + 2] += .6
    return TensorDataset(x, y)
def cnn():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(72, 3))


@pytest.mark.parametrize("net, data", [(tabular, table), (cnn, images)])
@pytest.mark.parametrize("kind", ["random", "class", "group"])
def test_tables_and_images_with_batch_norm(net, data, kind):
    train, test = data(161, 0), data(90, 1)
    y = train.tensors[1].numpy()
    forget_i, retain_i = split_forget(y, kind, size=33, classes=[2], groups=np.arange(len(y)) % 5, group=4)
    forget, retain = Subset(train, forget_i), Subset(train, retain_i)
    fit = lambda d, g: FineTune(epochs=6, batch_size=32, lr=.05).unlearn(net(), d, None, generator=g).model
    trained = fit(train, 0)
    cards = {"untouched": evaluate(trained, retain, forget, test), "retrain": evaluate(Retrain(fit).unlearn(trained, retain, forget).model, retain, forget, test)}
    before = {k: v.clone() for k, v in trained.state_dict().items()}
    for name in METHODS:
        result = unlearn(trained, forget, retain, method=name, epochs=2, batch_size=32, lr=.01)
        cards[name] = evaluate(result.model, retain, forget, test, rte_s=result.rte_s)
    assert all(torch.equal(v, before[k]) for k, v in trained.state_dict().items())
    shown = compare(cards)
    assert list(shown.index) == list(cards) and shown.loc["retrain", "Gap"] == 0 and shown.drop(columns="RTE").notna().all().all()
    if kind == "class":
        strong = evaluate(unlearn(trained, forget, retain, epochs=10, batch_size=32, lr=.05).model, retain, forget, test)
        assert strong.ua > cards["untouched"].ua + 50 and strong.gap(cards["retrain"]) < cards["untouched"].gap(cards["retrain"]) / 2


@pytest.mark.parametrize("name", METHODS)
def test_one_record_can_be_forgotten_by_a_model_with_batch_norm(name):
    data = table(65, 0)
    forget, retain = split_forget(data.tensors[1], "random", size=1)
    result = unlearn(tabular(), Subset(data, forget), Subset(data, retain), method=name, epochs=2, batch_size=9, lr=.01)
    assert result.steps > 0 and all(t.isfinite().all() for t in result.model.state_dict().values()) and all(m.training for m in result.model.modules())


def test_a_lone_record_is_normalised_by_running_statistics():
    data, net = table(33, 0), tabular()
    net[3].p = 0.
    net.eval()
    x, y = data[:1]
    grads = torch.autograd.grad(-nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    expected = torch.cat([(p - .1 * g).detach().flatten() for p, g in zip(net.parameters(), grads)])
    result = GradientAscent(epochs=1, lr=.1, momentum=0., weight_decay=0.).unlearn(net, None, Subset(data, [0]))
    assert torch.allclose(flat(result.model), expected, atol=1e-6) and result.model[1].num_batches_tracked == 0
    def broken(model, inputs): raise ValueError("not mine")
    with pytest.raises(ValueError, match="not mine"): GradientAscent(epochs=1, forward_fn=broken).unlearn(net, None, Subset(data, [0]))


def test_a_part_and_its_whole_overlap():
    data = table(40, 0)
    part = Subset(data, [3, 4])
    nested = Subset(Subset(data, range(2, 12)), [1, 2, 9])
    for retain, forget, shared in ((data, part, 2), (part, data, 2), (nested, data, 3), (DataLoader(data), part, 2), (data, DataLoader(nested, collate_fn=lambda i: i), 3)):
        for method in (UGradSL(), FineTune(), InfluenceUnlearn(), Retrain(lambda d, g: None)):
            with pytest.raises(ValueError, match=f"share {shared} samples"): method.unlearn(tabular(), retain, forget)


def test_masks_and_retraining_take_loaders():
    data = table(40, 0)
    forget, retain = Subset(data, range(8)), Subset(data, range(8, 40))
    masks = [SalUn(batch_size=4).mask(tabular(), d) for d in (forget, DataLoader(forget, 4), DataLoader(forget, 4, collate_fn=lambda items: (torch.stack([x for x, _ in items]), torch.stack([y for _, y in items]))))]
    assert all(torch.equal(masks[0][k], m[k]) for m in masks[1:] for k in masks[0])
    fit = lambda d, g: FineTune(epochs=1, batch_size=8).unlearn(tabular(), d, None, generator=g).model
    assert torch.equal(flat(Retrain(fit).unlearn(None, DataLoader(retain, 4), forget).model), flat(Retrain(fit).unlearn(None, retain, forget).model))


@pytest.mark.parametrize("name, value", [("epochs", 2.5), ("batch_size", 2.5), ("batch_size", "8"), ("momentum", -1.), ("momentum", float("nan")), ("weight_decay", -1e-3)])
def test_settings_are_refused_before_any_work(name, value):
    with pytest.raises(ValueError, match=f"{name}="): UGradSLPlus(**{name: value})
    with pytest.raises(ValueError, match=f"{name}="): UGradSLPlus().set_params(**{name: value})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_named(bad):
    feats = torch.ones(4, 3)
    feats[1, 2] = bad
    for pair in ((feats, torch.ones(2, 3)), (torch.ones(2, 3), feats)):
        with pytest.raises(ValueError, match="NaN or infinity"): adaptive_alpha(*pair, .25)
    data = table(30, 0)
    sets = Subset(data, range(10, 30)), Subset(data, range(10))
    with pytest.raises(ValueError, match="feat_r or feat_f"): UGradSL(alpha=None, batch_size=4, feature_fn=lambda m, x: x * bad).unlearn(tabular(), *sets)
    with pytest.raises(UnlearningDivergedError, match="step 0"): UGradSL(alpha=None, batch_size=4, forward_fn=lambda m, x: m(x) * bad).unlearn(tabular(), *sets)
