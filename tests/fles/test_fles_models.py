"""Replacement on torch, transformers and hand-made models, its faults; diagnostics with known answers; the small networks."""
import copy
import functools
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from iclr26.fles import (IIEUB, AdaShiftB, FleS, FleSAdaS, FleSDG, FleSPN, FleSProto, MetaAcon, Replacement, TinyPoolFormer, TinyViT, gate_saturation, gradient_asymmetry,
                         padding_mask, replace_activations)

torch.set_num_threads(1)


class MLP(nn.Module):
    def __init__(self, act=None, dim=6, hidden=12):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), act or nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x): return self.fc2(self.act(self.fc1(x)))


class Backwards(nn.Module):
    "The activation is registered before its layers, or behind both."
    def __init__(self, first):
        super().__init__()
        if first: self.act = nn.GELU()
        self.fc1, self.fc2 = nn.Linear(6, 12), nn.Linear(12, 6)
        if not first: self.act = nn.GELU()

    def forward(self, x): return self.fc2(self.act(self.fc1(x)))


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_layer, self.gate = nn.Linear(6, 6), nn.GELU()

    def forward(self, x): return x * self.gate(self.gate_layer(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = SelfAttention(), MLP()

    def forward(self, x): return self.mlp(self.attn(x))


def snapshot(model): return [(n, type(m), m.training) for n, m in model.named_modules()], {k: v.clone() for k, v in model.state_dict().items()}


def same(a, b): return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(v, b[1][k]) for k, v in a[1].items())


# replacing -------------------------------------------------------------------------------------------------------------
def test_reports_and_parameters():
    model = nn.Sequential(MLP(), nn.Conv2d(1, 1, 1), MLP(nn.ReLU()))
    before = sum(p.numel() for p in model.parameters())
    done = replace_activations(model, "fles_dg")
    assert done == [Replacement("0.act", "GELU", "FleSDG", 12, -1, 24)]
    assert isinstance(model[0].act, FleSDG) and isinstance(model[2].act, nn.ReLU) and sum(p.numel() for p in model.parameters()) == before + 24
    assert replace_activations(model, "swish", target="ReLU")[0].name == "2.act"
    back = replace_activations(model, lambda channels, channel_dim: nn.GELU(), target=(FleSDG, "Swish"))
    assert [r.added_params for r in back] == [-24, -12]


def test_order_is_that_of_named_modules():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.GELU(), Block()), nn.Linear(6, 7), nn.GELU())
    done = replace_activations(model, "fles")
    assert [r.name for r in done] == [n for n, m in model.named_modules() if isinstance(m, FleS)] == ["0.1", "0.2.mlp.act", "2"]


def test_producers_from_siblings():
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(.1), nn.GELU())
    assert replace_activations(conv, "fles")[0] == Replacement("3", "GELU", "FleS", 8, 1, sum(p.numel() for p in FleS(8).parameters()))
    assert conv(torch.randn(2, 3, 6, 6)).shape == (2, 8, 4, 4)
    for model in (Backwards(True), Backwards(False), nn.Sequential(nn.GELU()), nn.Sequential(nn.Linear(3, 4), nn.Flatten(), nn.GELU())):
        state = snapshot(model)
        with pytest.raises(ValueError, match="example_input"): replace_activations(model, "fles")
        assert same(state, snapshot(model))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("example", [torch.randn(1, 3, 6), (torch.randn(1, 3, 6),), dict(x=torch.randn(1, 3, 6))])
def test_producers_from_an_example(first, example):
    model = Backwards(first)
    assert replace_activations(model, "fles", example_input=example)[0].channels == 12
    assert model(torch.randn(2, 3, 6)).shape == (2, 3, 6)


def test_an_example_sees_through_reshapes_and_norms():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.norm, self.conv, self.drop = nn.GELU(), nn.GroupNorm(2, 8), nn.Conv2d(3, 8, 1), nn.Dropout(.5)
            self.act2, self.fc = nn.GELU(), nn.Linear(8, 10)
        def forward(self, x):
            x = self.act(self.drop(self.norm(self.conv(x))))
            return self.act2(self.fc(x.flatten(2).transpose(1, 2)).reshape(-1, 10))
    done = replace_activations(Odd().train(), "fles", example_input=torch.randn(2, 3, 4, 4))
    assert [(r.channels, r.channel_dim) for r in done] == [(8, 1), (10, -1)]


def test_shared_instances_become_slots():
    act = nn.GELU()
    model = nn.Sequential(MLP(act, hidden=12), MLP(act, hidden=20))
    done = replace_activations(model, "fles", example_input=torch.randn(1, 2, 6))
    assert [r.channels for r in done] == [12, 20] and model[0].act is not model[1].act
    class Twice(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.a, self.b, self.act = nn.Linear(6, 8), nn.Linear(8, width), nn.GELU()
        def forward(self, x): return self.act(self.b(self.act(self.a(x))))
    with pytest.raises(ValueError, match="act .*several widths"): replace_activations(Twice(9), "fles", example_input=torch.randn(1, 6))
    same_width = Twice(8)
    assert replace_activations(same_width, "fles", example_input=torch.randn(1, 6))[0].channels == 8 and same_width(torch.randn(2, 6)).shape == (2, 8)


def test_gates_are_left_alone():
    model = Block()
    assert [r.name for r in replace_activations(model, "fles")] == ["mlp.act"] and isinstance(model.attn.gate, nn.GELU)
    assert [r.name for r in replace_activations(Block(), "fles", include_gates=True)] == ["attn.gate", "mlp.act"]
    with pytest.raises(ValueError, match="GELU"): replace_activations(nn.Sequential(SelfAttention()), "fles")
    class SEBlock(MLP): pass
    class SqueezeExcite(MLP): pass
    for kind in (SEBlock, SqueezeExcite):
        with pytest.raises(ValueError): replace_activations(nn.Sequential(kind()), "fles")


@pytest.mark.parametrize("factory, target, kind, text", [("fless", nn.GELU, ValueError, "expected one of"), ("fles", nn.Tanh, ValueError, "GELU"), ("fles", 3, TypeError, "target"),
                                                         (lambda channels, channel_dim: 3, nn.GELU, TypeError, "factory"), (lambda channels, channel_dim: 1 / 0, nn.GELU, ZeroDivisionError, "zero")])
def test_errors_change_nothing(factory, target, kind, text):
    model = nn.Sequential(MLP(), MLP()).train()
    model[1].eval()
    state = snapshot(model)
    with pytest.raises(kind, match=text): replace_activations(model, factory, target=target)
    with pytest.raises(Exception): replace_activations(model, "fles", example_input=torch.randn(1, 99))     # fails inside the forward pass
    assert same(state, snapshot(model))
    calls = []
    def late(channels, channel_dim):
        calls.append(channels)
        if len(calls) == 2: raise RuntimeError("second")
        return nn.ReLU()
    with pytest.raises(RuntimeError): replace_activations(model, late)
    assert same(state, snapshot(model)) and not any(m._forward_hooks for m in model.modules())


def test_flags_device_and_dtype_are_kept():
    model = nn.Sequential(MLP().double(), MLP().bfloat16(), MLP().to("meta")).train()
    model[1].act.eval()
    running = nn.BatchNorm1d(6)
    replace_activations(model, "fles")
    assert [p.act.trunk.weight.dtype for p in model] == [torch.float64, torch.bfloat16, torch.float32] and model[2].act.trunk.weight.device.type == "meta"
    assert [p.act.training for p in model] == [True, False, True]
    model = nn.Sequential(running, MLP()).train()
    replace_activations(model, "fles", example_input=torch.randn(4, 6))
    assert model.training and running.training and running.num_batches_tracked == 0            # eval mode while watching


# torch's transformer layers --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("activation, target, label", [("gelu", nn.GELU, "gelu"), (F.relu, nn.ReLU, "relu"), (nn.GELU(), nn.GELU, "GELU"), ("relu", "ReLU", "relu")])
@pytest.mark.parametrize("example", [None, torch.randn(2, 5, 16)])
def test_encoder_layer(activation, target, label, example):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 48, dropout=0., batch_first=True, activation=activation), 2).eval()
    done = replace_activations(encoder, "fles_dg", target=target, example_input=example)
    assert [(r.name, r.old, r.channels, r.channel_dim) for r in done] == [(f"layers.{i}.activation", label, 48, -1) for i in range(2)]
    x, mask = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        y = encoder(x, src_key_padding_mask=mask)
        encoder.layers[1].activation.gamma_ve.add_(1)
        assert not torch.allclose(y, encoder(x, src_key_padding_mask=mask))                     # no silent fast path in eval mode
        encoder.layers[1].activation.gamma_ve.sub_(1)
        trained = encoder.train()(x, src_key_padding_mask=mask)
    assert torch.allclose(y[~mask], trained[~mask], atol=1e-5)


def test_decoder_layer_survives_copies():
    layer = nn.TransformerDecoderLayer(16, 2, 48, dropout=0., batch_first=True, activation="gelu").eval()
    assert replace_activations(layer, "fles_dg")[0].name == "activation"
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    with torch.no_grad():
        layer.activation.gamma_ve.add_(1)
        y = layer(x, memory)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(x, memory), y) and "activation.gamma_ve" in dict(twin.named_parameters())
            twin.activation.gamma_ve.add_(1)
            assert not torch.allclose(twin(x, memory), y)


# transformers ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tf():
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return transformers


def test_vit(tf):
    net = tf.ViTForImageClassification(tf.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=8, patch_size=2, num_channels=1, num_labels=3))
    x = torch.randn(2, 1, 8, 8)
    done = replace_activations(net, "fles", example_input=x)
    assert len(done) == 2 and all((r.old, r.channels, r.channel_dim) == ("GELUActivation", 64, -1) for r in done)
    net(pixel_values=x, labels=torch.tensor([0, 2])).loss.backward()
    assert all(p.grad is not None for m in net.modules() if isinstance(m, FleS) for p in m.parameters())
    table = gate_saturation(net, [dict(pixel_values=x)])
    assert [n for n in table.layer] == [r.name for r in done] and (table.n_positive > 0).all()


def test_swin(tf):
    net = tf.SwinForImageClassification(tf.SwinConfig(image_size=16, patch_size=2, num_channels=1, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2, num_labels=3))
    done = replace_activations(net, "fles", example_input={"pixel_values": torch.randn(1, 1, 16, 16)})
    assert [r.channels for r in done] == [64, 128] and net(torch.randn(2, 1, 16, 16)).logits.shape == (2, 3)


def test_gpt(tf):
    torch.manual_seed(0)
    net = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=50, bos_token_id=0, eos_token_id=0)).eval()
    ids = torch.randint(50, (2, 9))
    with pytest.raises(ValueError, match="NewGELUActivation"): replace_activations(net, "fles")
    with pytest.raises(ValueError, match="example_input"): replace_activations(net, "fles", target="NewGELUActivation")     # registered behind both layers
    pooled = copy.deepcopy(net)
    with pytest.warns(UserWarning, match="use_cache=False"): done = replace_activations(net, "fles", target="NewGELUActivation", example_input=dict(input_ids=ids), scope="causal")
    with pytest.warns(UserWarning, match="transformer.h.0.mlp.act and 1 more is causal"): replace_activations(pooled, "fles", target="NewGELUActivation", example_input=(ids,))
    assert [r.channels for r in done] == [128, 128]
    later = ids.clone()
    later[:, 5:] = (later[:, 5:] + 7) % 50
    with torch.no_grad():
        for model in (net, pooled):
            for m in model.modules():
                if isinstance(m, FleS): m.head_ho.weight.normal_(generator=torch.Generator().manual_seed(1))
        gap = lambda model: float((model(ids).logits - model(later).logits)[:, :5].abs().max())
        assert gap(net) < 1e-5 < 1e-3 < gap(pooled)                                             # per-sample statistics read the future


class Config:
    def __init__(self, **kw): self.__dict__.update(kw)


@pytest.mark.parametrize("nested", [False, True])
def test_a_cache_and_the_causal_scope_warn(nested):
    def build(**config):
        model = MLP()
        if config: model.config = Config(**config)
        return nn.Sequential(model) if nested else model
    with pytest.warns(UserWarning, match="use use_cache=False"): replace_activations(build(use_cache=True), "fles", scope="causal")
    with pytest.warns(UserWarning, match="cache"): replace_activations(build(use_cache=True), lambda c, channel_dim: nn.Sequential(FleS(c, channel_dim=channel_dim, scope="causal")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config, kw in ((dict(use_cache=True), {}), (dict(use_cache=False), dict(scope="causal")), (dict(), dict(scope="causal")), (dict(other=1), dict(scope="causal"))):
            assert len(replace_activations(build(**config), "fles", **kw)) == 1
        model = build(use_cache=True)
        state = snapshot(model)
        with pytest.raises(UserWarning): replace_activations(model, "fles", scope="causal")                 # a warning turned into an error changes nothing
        assert same(state, snapshot(model))


# padding ---------------------------------------------------------------------------------------------------------------
STATISTICS = [FleS, FleSPN, FleSAdaS, FleSProto, AdaShiftB, MetaAcon]


def lively(act):
    with torch.no_grad():
        for p in act.parameters(): p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(p.dtype) * .3)
    return act.eval()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind, scope", [*((kind, scope) for kind in STATISTICS[:4] for scope in ("sample", "causal")), (AdaShiftB, None), (MetaAcon, None)])
@pytest.mark.parametrize("left", [True, False])
def test_a_padded_text_gives_what_it_gives_alone(kind, scope, left, fused):
    torch.manual_seed(0)
    act = lively(kind(4, **(dict(scope=scope, fused=fused) if scope else {})))
    x, mask = torch.randn(3, 7, 4), torch.ones(3, 7, dtype=torch.long)
    for row, n in ((1, 3), (2, 6)): mask[row, :7 - n] = 0
    if not left: mask = mask.flip(1)
    x[mask == 0] = torch.tensor([50., 1., -3., 9.])
    leaf = x.clone().requires_grad_()
    with padding_mask(act, mask):
        y = act(leaf)
        grad, = torch.autograd.grad(y[mask == 1].square().sum(), leaf)
    for i in range(3):
        real = x[i:i + 1, mask[i] == 1].requires_grad_()
        alone = act(real)
        assert torch.allclose(y[i:i + 1, mask[i] == 1], alone, atol=1e-6)
        assert torch.allclose(grad[i:i + 1, mask[i] == 1], torch.autograd.grad(alone.square().sum(), real)[0], atol=1e-5)
    assert not torch.allclose(act(x)[mask == 1], y[mask == 1], atol=1e-4) or scope == "causal" and not left # without the mask it enters
    x[mask == 0] = math.nan                                                                                 # whatever stands there
    with padding_mask(act, mask): assert torch.equal(act(x)[mask == 1], y[mask == 1])


def test_padding_in_batches_and_windows():
    act, x, mask = lively(FleSProto(4)), torch.randn(3, 5, 4), torch.rand(3, 5) < .6
    with padding_mask(act, mask): got = act.coefficients(x)
    for a, b in zip(got, act.coefficients(x[mask][None])): assert torch.allclose(a, b, atol=1e-6)           # all tokens of all texts
    for kind in (FleS, FleSPN):
        act, x, mask = lively(kind(4, channel_dim=1, scope="window", window=(2, 3))), torch.randn(2, 4, 5, 6), torch.rand(2, 5, 6) < .6
        with padding_mask(act, mask): kv, kh = act.coefficients(x)
        flat = kind(4)
        flat.load_state_dict(act.state_dict())
        for b in range(2):
            for i in range(0, 5, 2):
                for j in range(0, 6, 3):
                    part = x[b, :, i:i + 2, j:j + 3][:, mask[b, i:i + 2, j:j + 3]].T[None]
                    assert torch.allclose(kh[b, :, i, j], flat.coefficients(part)[1].flatten() if part.numel() else flat.coefficients(-torch.ones(1, 1, 4) if kind is FleS else torch.zeros(1, 1, 4))[1].flatten(), atol=1e-6)


def test_masks_are_checked_nested_and_cleaned_up():
    model, x, mask = nn.Sequential(FleS(4), FleSDG(4), IIEUB(4)), torch.randn(2, 5, 4), torch.ones(2, 5)
    for bad, text in ((mask[0], "mask.*(5,)"), ([[1]], "list"), (mask * 2, "mask"), (torch.zeros(2, 5).masked_fill(mask > 0, -math.inf), "mask")):
        with pytest.raises(ValueError, match=text), padding_mask(model, bad): pass
    with pytest.raises(ValueError, match="no activation"), padding_mask(nn.Sequential(FleSDG(4), nn.GELU()), mask): pass
    for other in (torch.randn(2, 6, 4), torch.randn(3, 5, 4), torch.randn(10, 4)):
        with pytest.raises(ValueError, match=r"mask has shape \(2, 5\)"), padding_mask(model, mask): model[0](other)
    assert model[0].mask is None
    with padding_mask(model, mask):
        assert torch.allclose(model[0](x), FleS.forward(copy.deepcopy(model[0]), x)) and model[0](x[:, 0]).shape == (2, 4)      # one position a sample: nothing to pad
        with padding_mask(model[0], mask.bool() & (torch.arange(5) < 3)): inner = model[0].mask
        assert inner.sum() == 6 and model[0].mask.all() and model[2].mask.all()
        assert torch.equal(model[2](x, x), model[2](x.clone(), x))
    assert model[0].mask is model[2].mask is None and "mask" not in model[0].state_dict()
    plain = FleS(4)
    with padding_mask(plain, mask): masked = plain(x)
    assert torch.allclose(masked, plain(x), atol=1e-6)                                                      # all ones change nothing


def test_bert_with_padding(tf):
    torch.manual_seed(0)
    net = tf.BertModel(tf.BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)).eval()
    replace_activations(net, "fles")
    for m in net.modules():
        if isinstance(m, FleS): nn.init.normal_(m.head_ho.weight)
    ids, mask = torch.randint(50, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[1, 4:] = mask[2, 7:] = 0
    with torch.no_grad():
        with padding_mask(net, mask): y = net(input_ids=ids, attention_mask=mask).last_hidden_state
        plain = net(input_ids=ids, attention_mask=mask).last_hidden_state
        for i, n in enumerate((9, 4, 7)):
            alone = net(input_ids=ids[i:i + 1, :n]).last_hidden_state[0]
            assert torch.allclose(y[i, :n], alone, atol=1e-6) and (n == 9 or not torch.allclose(plain[i, :n], alone, atol=1e-4))


# what transformers and diffusers do ------------------------------------------------------------------------------------
SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)


@pytest.mark.parametrize("side", [4, 8])
def test_as_many_tokens_as_channels(tf, side):
    "Segformer: linear, convolution on the map, back to tokens, activation. At side 8 the second stage has 64 tokens and 64 channels, and the shape tells nothing."
    net = tf.SegformerModel(tf.SegformerConfig(num_channels=1, hidden_sizes=[8, 16], depths=[1, 1], num_attention_heads=[1, 1], num_encoder_blocks=2, patch_sizes=[3, 3], strides=[2, 2], sr_ratios=[1, 1], mlp_ratios=[4, 4]))
    example, state = torch.randn(1, 1, 4 * side, 4 * side), snapshot(net)
    if side == 8:
        with pytest.raises(ValueError, match="stages.1.*different numbers of positions and channels"): replace_activations(net, "fles", example_input=example)
        assert same(state, snapshot(net))
        return
    done = replace_activations(net, "fles", example_input=example)
    assert [(r.channels, r.channel_dim) for r in done] == [(32, -1), (64, -1)]


class Reshaped(nn.Module):
    def __init__(self, layer, between):
        super().__init__()
        self.act, self.layer, self.between = nn.GELU(), layer, between
    def forward(self, x): return self.act(self.between(self.layer(x)))


@pytest.mark.parametrize("layer, between, shape, wanted", [
    (nn.Conv2d(1, 9, 1), lambda t: t.flatten(2), (1, 1, 3, 3), 1), (nn.Conv2d(1, 9, 1), lambda t: t.flatten(2).transpose(1, 2), (1, 1, 3, 3), None), (nn.Conv2d(1, 3, 1), lambda t: t.permute(0, 2, 3, 1), (2, 1, 3, 3), None),
    (nn.Linear(4, 6), lambda t: t.view(2, 2, 3, 6), (2, 6, 4), -1), (nn.Linear(4, 6), lambda t: t.transpose(1, 2), (2, 6, 4), None), (nn.Linear(4, 6), lambda t: t.transpose(1, 2), (2, 5, 4), None),
    (nn.Linear(4, 6), lambda t: t + 1, (2, 5, 4), -1), (nn.Conv2d(1, 9, 1), lambda t: t.flatten(2), (1, 1, 2, 3), 1)])
def test_the_axis_is_never_guessed(layer, between, shape, wanted):
    model = Reshaped(layer, between)
    state = snapshot(model)
    if wanted is None:
        with pytest.raises(ValueError, match="act: its channels .*another example_input"): replace_activations(model, "fles", example_input=torch.randn(shape))
        assert same(state, snapshot(model))
    else: assert replace_activations(model, "fles", example_input=torch.randn(shape))[0].channel_dim == wanted


def test_diffusers_transformers():
    diffusers = pytest.importorskip("diffusers")
    wan = diffusers.WanTransformer3DModel(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32).eval()
    cog = diffusers.CogVideoXTransformer3DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=8, num_layers=2, sample_width=8, sample_height=8, sample_frames=5,
                                                patch_size=2, temporal_compression_ratio=4, max_text_seq_length=8).eval()
    batches = (dict(hidden_states=torch.randn(1, 4, 2, 8, 8), timestep=torch.tensor([3]), encoder_hidden_states=torch.randn(1, 5, 16)),
               dict(hidden_states=torch.randn(1, 2, 4, 8, 8), encoder_hidden_states=torch.randn(1, 8, 8), timestep=torch.tensor([1])))
    for net, batch, blocks, width in ((wan, batches[0], wan.blocks, 32), (cog, batches[1], cog.transformer_blocks, 64)):
        state = snapshot(net)
        with pytest.raises(ValueError, match=r"net\.0 \(diffusers.* is a layer with its activation \(proj\)"): replace_activations(net, "fles", target="GELU", example_input=batch)   # would drop the projection
        assert same(state, snapshot(net))
        ffs = [getattr(block, "ffn", None) or block.ff for block in blocks]
        for ff in ffs: ff.net[0] = nn.Sequential(ff.net[0].proj, nn.GELU("tanh"))                            # as the message says
        done = [r for r in replace_activations(net, "fles", example_input=batch) if ".net.0.1" in r.name]
        assert [(r.channels, r.channel_dim) for r in done] == [(width, -1)] * 2
        net(**batch)[0].square().mean().backward()
        assert all(p.grad is not None for ff in ffs for p in ff.net[0][1].parameters())


def test_causal_attention_wants_causal_statistics(tf):
    ids, names = torch.randint(50, (1, 6)), ("NewGELUActivation", "SiLUActivation", "GELUActivation", "ReLU")
    t5 = lambda: tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0, use_cache=False))
    llama = lambda: tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=50, use_cache=False, **SMALL))
    decoder = lambda: tf.BertLMHeadModel(tf.BertConfig(vocab_size=50, is_decoder=True, use_cache=False, **SMALL))
    bert = lambda: tf.BertModel(tf.BertConfig(vocab_size=50, **SMALL))
    vit = lambda: tf.ViTModel(tf.ViTConfig(image_size=8, patch_size=2, num_channels=1, **SMALL))
    example = lambda build: dict(pixel_values=torch.randn(1, 1, 8, 8)) if build is vit else dict(input_ids=ids, decoder_input_ids=ids) if build is t5 else dict(input_ids=ids)
    for build, where in ((llama, "model.layers.0.mlp.act_fn and 1 more"), (decoder, "bert.encoder.layer.0.intermediate.intermediate_act_fn and 2 more"), (t5, "decoder.block.0.layer.1.DenseReluDense.act|decoder.block.0.layer.2.DenseReluDense.act and 1 more")):
        for activation in ("fles", "fles_proto", "adashift_b"):
            with pytest.warns(UserWarning, match=f"({where}) is causal.*scope='causal'"): replace_activations(build(), activation, target=names, example_input=example(build))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for build, activation, kw in ((llama, "fles", dict(scope="causal")), (llama, "fles_dg", {}), (llama, "swish", {}), (decoder, "fles_pn", dict(scope="causal")), (t5, "fles", dict(scope="causal")), (bert, "fles", {}), (vit, "fles", {})):
            assert replace_activations(build(), activation, target=names, example_input=example(build), **kw)


@pytest.mark.parametrize("factory, kw", [(3, {}), (None, {}), (FleS(4), {}), (nn.GELU, {}), (lambda: nn.ReLU(), {}), (lambda channels: nn.ReLU(), {}), (lambda channels, channel_dim: nn.ReLU(), dict(scope="causal"))])
def test_a_factory_with_another_signature(factory, kw):
    model = MLP()
    state = snapshot(model)
    with pytest.raises(TypeError, match=r"^factory.*factory\(channels, channel_dim=\.\.\., \*\*kw\)"): replace_activations(model, factory, **kw)
    assert same(state, snapshot(model))


def test_factories_that_fit():
    for factory in (FleS, lambda c, channel_dim: nn.ReLU(), lambda *args, **kw: nn.ReLU(), functools.partial(FleS, reduction=4)): assert replace_activations(MLP(), factory)[0].channels == 12


# diagnostics -----------------------------------------------------------------------------------------------------------
def test_saturation_by_hand():
    grid = torch.linspace(0, 6, 60_001)[1:, None]
    for act, share in ((nn.SiLU(), (6 - math.log(19)) / 6), (nn.GELU(), (6 - 1.6448536) / 6), (nn.ReLU(), 1.)):
        row = gate_saturation(nn.Sequential(act), [grid[:30_000], (grid[30_000:], None)]).iloc[0]
        assert row.n_positive == 60_000 and row.saturated == pytest.approx(share, abs=1e-4)
    mean = lambda a, b: (F.softplus(torch.tensor(b)) - F.softplus(torch.tensor(a))).item() / (b - a)
    assert gate_saturation(nn.Sequential(nn.SiLU()), [grid], eps=.1).top_gap[0] == pytest.approx(mean(5.7, 6.) - mean(5.4, 5.7), abs=1e-4)
    assert gate_saturation(nn.Sequential(nn.SiLU()), [grid], eps=.1).saturated[0] == pytest.approx((6 - math.log(9)) / 6, abs=1e-4)


def test_saturation_divides_by_the_height():
    act = FleSDG(1)
    grid = torch.linspace(0, 6, 6_001)[1:, None]
    with torch.no_grad():
        act.gamma_ve.fill_(5.), act.gamma_ho.fill_(math.log(math.exp(.5) - 1))                   # height 5.007, steepness 0.5
    assert gate_saturation(nn.Sequential(act), [grid]).saturated[0] == pytest.approx(max(0, 6 - 2 * math.log(19)) / 6, abs=1e-3)


def test_saturation_faults_and_cleaning_up():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Dropout(.5)).train()
    x = torch.randn(50, 3)
    table = gate_saturation(model, [x])
    assert list(table.columns) == ["layer", "n_positive", "saturated", "top_gap"] and table.n_positive[0] == int((model[0](x) > 0).sum()) and table.saturated[0] == 1
    silent = gate_saturation(nn.Sequential(nn.SiLU()), [-x.abs()])
    assert silent.n_positive[0] == 0 and math.isnan(silent.saturated[0])
    for call, text in ((lambda: gate_saturation(model, [x], eps=0), "eps"), (lambda: gate_saturation(model, [x], eps=1.), "eps"), (lambda: gate_saturation(model, [x], layers=["9"]), "'9'"),
                       (lambda: gate_saturation(model, []), "loader"), (lambda: gate_saturation(nn.Linear(2, 2), [x]), "no activation")):
        with pytest.raises(ValueError, match=text): call()
    for one in (x, dict(x=x), "digits"):
        with pytest.raises(TypeError, match="loader.*\\[batch\\]"): gate_saturation(model, one)
    with pytest.raises(RuntimeError): gate_saturation(model, [torch.randn(2, 99)])
    assert model.training and model[2].training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_asymmetry_by_hand():
    x = torch.randn(400, 3)
    table = gradient_asymmetry(nn.Sequential(nn.LeakyReLU(.25), nn.Identity()), (x, None), lambda y, _: y.sum())
    assert list(table.columns) == ["layer", "grad_pos", "grad_neg", "ratio"] and (table.grad_pos[0], table.grad_neg[0], table.ratio[0]) == (1., .25, 4.)
    assert gradient_asymmetry(nn.Sequential(nn.ReLU(inplace=True)), (x, None), lambda y, _: y.sum()).ratio[0] == math.inf
    assert math.isnan(gradient_asymmetry(nn.Sequential(nn.ReLU()), (x.abs(), None), lambda y, _: y.sum()).ratio[0])
    model = MLP(nn.SiLU()).train()
    model.fc1.weight.grad = torch.ones_like(model.fc1.weight)
    inputs, y = torch.randn(5, 6), torch.randint(6, (5,))
    row = gradient_asymmetry(model, (inputs, y), F.cross_entropy, layers=["act"]).iloc[0]
    h = model.fc1(inputs).detach().requires_grad_()
    g = torch.autograd.grad(F.cross_entropy(model.fc2(F.silu(h)), y), h)[0].abs()
    assert row.grad_pos == pytest.approx(g[h >= 0].mean().item()) and row.grad_neg == pytest.approx(g[h < 0].mean().item())
    assert (model.fc1.weight.grad == 1).all() and model.fc2.weight.grad is None and model.training
    with pytest.raises(ValueError, match="nope"): gradient_asymmetry(model, (inputs, y), F.cross_entropy, layers=["nope"])
    with pytest.raises(ZeroDivisionError): gradient_asymmetry(model, (inputs, y), lambda *_: 1 / 0)
    assert model.training and not any(m._forward_pre_hooks for m in model.modules())


class Named(MLP):
    def forward(self, x, labels=None): return super().forward(x)


def test_asymmetry_takes_the_batches_of_saturation():
    model, x, y = Named(), torch.randn(5, 6), torch.randint(6, (5,))
    wanted = gradient_asymmetry(model, (x, y), F.cross_entropy)
    for batch in (dict(x=x, labels=y), [x, y], (dict(x=x), y), ((x,), y)): assert gradient_asymmetry(model, batch, F.cross_entropy).equals(wanted)
    gate_saturation(model, [dict(x=x, labels=y)])
    seen = []
    gradient_asymmetry(model, dict(x=x), lambda out, targets: (seen.append(targets), out.sum())[1])
    assert seen == [None]


# small networks --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [TinyViT, TinyPoolFormer])
def test_small_networks(kind):
    nets = []
    for activation in ("gelu", "fles", "acon_c"):
        torch.manual_seed(0)
        nets.append(kind(activation=activation))
    shared = dict(nets[0].named_parameters())
    assert all(torch.equal(p, dict(n.named_parameters())[k]) for n in nets[1:] for k, p in shared.items())
    assert nets[1](torch.randn(3, 1, 8, 8)).shape == (3, 10)
    other = kind(image_size=12, patch=3, in_channels=3, dim=16, depth=2, mlp_ratio=2.5, classes=4, activation="fles_proto", act_kw=dict(scope="sample"))
    assert other(torch.randn(2, 3, 12, 12)).shape == (2, 4) and other.blocks[0].act.channels == 40 and other.blocks[0].act.scope == "sample"
    for bad in (dict(patch=3), dict(dim=0), dict(mlp_ratio=0), dict(activation="x")):
        with pytest.raises(ValueError): kind(**bad)


def test_vit_options():
    assert not any("mixer" in n for n, _ in TinyViT(heads=0).named_parameters()) and TinyViT(heads=0)(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    with pytest.raises(ValueError, match="heads"): TinyViT(heads=5)
    done = replace_activations(TinyViT(), "fles", target="GELU", example_input=torch.randn(1, 1, 8, 8))
    assert [r.channels for r in done] == [128] * 3
    pool = replace_activations(TinyPoolFormer(), "fles", target="GELU", example_input=torch.randn(1, 1, 8, 8))
    assert [r.channel_dim for r in pool] == [1] * 3
