"""Models that run from compressed weights: equal outputs, and nothing else that anybody could notice."""
import copy, io, pickle, threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from iclr26.ecf8.codec import ECF8FormatError, ECF8IntegrityError, ECF8Tensor, decode, encode
from iclr26.ecf8.container import compress_file, inspect_file, load_compressed, load_file
from iclr26.ecf8.jit import JITWeights, ScaledFP8Linear, compress_state, dequantize, expand_scale, quantize_linears

torch.set_num_threads(1)

def raw(t): return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

def small(block_size=(32, 32)):
    torch.manual_seed(0)
    return quantize_linears(nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 80), nn.Sequential(nn.GELU(), nn.Linear(80, 64)), nn.LayerNorm(64)), block_size).requires_grad_(False).eval()

@pytest.fixture
def x(): return torch.randn(5, 96, generator=torch.Generator().manual_seed(1))

# scales

def test_expand_scale_against_loops():
    scale = torch.rand(3, 2)
    full = expand_scale(scale, (70, 50), (32, 32))
    assert all(full[i, j] == scale[i // 32, j // 32] for i in range(70) for j in range(50))
    assert expand_scale(torch.tensor([[2.0]]), (70, 50)).shape == () and expand_scale(torch.rand(70), (70, 50)).shape == (70, 1)
    with pytest.raises(ValueError, match="scale of shape"): expand_scale(torch.rand(4, 2), (70, 50), (32, 32))

@pytest.mark.parametrize("block_size", [None, (128, 128), (32, 48)])
def test_scaled_linear_uses_the_whole_range_and_is_close(block_size):
    torch.manual_seed(0)
    linear = nn.Linear(100, 90)
    layer = ScaledFP8Linear.from_linear(linear, block_size)
    w = dequantize(layer.weight, layer.weight_scale_inv, torch.float32, block_size)
    assert layer.weight.float().abs().max() == 448
    step = expand_scale(layer.weight_scale_inv, w.shape, block_size)
    assert ((w - linear.weight).abs() <= linear.weight.abs() / 16 + step * 2.0**-10 + 1e-7).all()      # half a step of three mantissa bits, or of the subnormals
    x = torch.randn(3, 100)
    assert torch.equal(layer(x), F.linear(x, w, linear.bias))

def test_scaled_linear_of_nothing_and_of_nan():
    zero = nn.Linear(8, 8)
    nn.init.zeros_(zero.weight)
    assert torch.equal(ScaledFP8Linear.from_linear(zero)(torch.ones(1, 8)), zero(torch.ones(1, 8)))
    nn.init.constant_(zero.weight, float("nan"))
    with pytest.raises(ValueError, match="finite"): ScaledFP8Linear.from_linear(zero)

def test_against_the_dequantisation_of_transformers():
    fine = pytest.importorskip("transformers.integrations.finegrained_fp8")
    layer = ScaledFP8Linear.from_linear(nn.Linear(300, 200), (128, 128))
    for dtype in (torch.float32, torch.bfloat16):
        theirs = fine._dequantize_fp8_weight(layer.weight.data, layer.weight_scale_inv.data, (128, 128), dtype)
        assert torch.equal(dequantize(layer.weight, layer.weight_scale_inv, dtype), theirs)

# the same model

@pytest.mark.parametrize("groups", [None, ["3"], [r"\d"], [""], {"": ["0", "2"]}, {"3": ["1"]}, "3"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_outputs_are_equal(x, groups, mode):
    net = small()
    expected = net(x)
    jit = JITWeights(net, compress_state(net.state_dict(), min_numel=0), groups=groups)
    with mode():
        for _ in range(2): assert torch.equal(net(x), expected)
    with torch.no_grad(): assert torch.equal(net.eval()(x), expected)
    assert jit.nbytes < sum(s.numel for s in jit.slots)
    assert not any("weight" in m.__dict__ for m in net.modules())

def test_scratch_is_one_layer_or_one_group(x):
    for groups, layers in ((None, [128 * 96]), ([""], [128 * 96, 80 * 128, 64 * 80])):
        net = small()
        jit = JITWeights(net, compress_state(net.state_dict(), min_numel=0), groups=groups)
        with torch.no_grad(): net(x)
        assert sum(layers) <= jit.scratch_nbytes <= sum(layers) + 64 * len(layers)

def test_state_dict_has_the_same_names_and_holds_the_blobs(x, tmp_path):
    net = small()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    jit = JITWeights(net, compress_state(before))
    state = net.state_dict()
    assert state.keys() == before.keys()
    for name, t in state.items():
        if name.endswith("weight") and before[name].dtype == torch.float8_e4m3fn:
            assert t.dtype == torch.uint8 and raw(decode(ECF8Tensor.from_bytes(t.numpy().tobytes(), before[name].shape))) == raw(before[name])
        else: assert torch.equal(t, before[name])
    save_file(state, tmp_path / "m.safetensors", metadata=jit.metadata())
    assert {k: raw(v) for k, v in load_file(tmp_path / "m.safetensors").items()} == {k: raw(v) for k, v in before.items()}
    assert {t.method for t in inspect_file(tmp_path / "m.safetensors")} == {"huffman", "untouched"}

def test_state_dict_can_be_loaded_again(x):
    """Into a copy whose blobs were overwritten, in place: the parsed form must follow."""
    net = small()
    expected = net(x)
    JITWeights(net, compress_state(net.state_dict()))
    good = {k: v.clone() for k, v in net.state_dict().items()}
    with torch.no_grad():
        net(x)
        net[0].weight.zero_()
        with pytest.raises(ECF8FormatError): net(x)
        net.load_state_dict(good)
        assert torch.equal(net(x), expected)

@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: torch.load(io.BytesIO(saved(m)), weights_only=False)])
def test_copies_live_their_own_life(x, make):
    net = small()
    expected = net(x)
    jit = JITWeights(net, compress_state(net.state_dict()), groups=["3"])
    with torch.no_grad(): net(x)
    other = make(net)
    jit.remove()
    with torch.no_grad():
        assert torch.equal(other(x), expected) and torch.equal(net(x), expected)
        [theirs] = JITWeights.of(other)
        assert theirs is not jit and JITWeights.of(net) == []
        theirs.remove()
        assert torch.equal(other(x), expected) and other[0].weight.dtype == torch.float8_e4m3fn

def saved(m):
    buffer = io.BytesIO()
    torch.save(m, buffer)
    return buffer.getvalue()

def test_remove_restores_everything(x):
    net = small()
    before = [(k, raw(v), v.dtype, v.requires_grad) for k, v in net.named_parameters()]
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
    jit = JITWeights(net, compress_state(net.state_dict()))
    assert hooks() == 6
    jit.remove()
    assert [(k, raw(v), v.dtype, v.requires_grad) for k, v in net.named_parameters()] == before and hooks() == 0 and not list(net.buffers())
    jit.remove()

def test_model_on_meta(x, tmp_path):
    """The uncompressed weights never exist."""
    net = small()
    expected = net(x)
    save_file(net.state_dict(), tmp_path / "s.safetensors")
    compress_file(tmp_path / "s.safetensors", tmp_path / "c.safetensors")
    with torch.device("meta"): empty = small()
    empty.load_state_dict({k: v for k, v in net.state_dict().items() if v.dtype != torch.float8_e4m3fn}, strict=False, assign=True)
    JITWeights(empty, load_compressed(tmp_path / "c.safetensors"))
    with torch.no_grad(): assert torch.equal(empty(x), expected)

# torch's own layers

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, torch.tensor(0.25), torch.rand(64, 1)])
def test_plain_linear_computes_in_the_type_of_its_input(dtype, scale):
    """y = x @ (decode(w).to(x.dtype) * scale).T"""
    w = torch.randn(64, 80).mul(50).to(torch.float8_e4m3fn)
    layer = nn.Linear(80, 64, bias=False)
    layer.weight = nn.Parameter(w, requires_grad=False)
    if scale is not None: layer.register_buffer("weight_scale", scale)
    JITWeights(layer, {"weight": encode(w)})
    x = torch.randn(3, 80, dtype=dtype)
    expected = x @ (w.to(dtype) if scale is None else w.to(dtype) * scale.to(dtype)).T
    with torch.no_grad(): y = layer(x)
    assert y.dtype == dtype and torch.equal(y, expected)

def test_layer_with_wide_weights_and_embedding():
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 50)).requires_grad_(False)
    state = {f"{i}.weight": encode(model[i].weight.mul(30).to(torch.float8_e4m3fn)) for i in range(2)}
    ids = torch.arange(7)
    expected = F.linear(decode(state["0.weight"]).float()[ids], decode(state["1.weight"]).float(), model[1].bias)
    jit = JITWeights(model, state)
    with torch.no_grad(): assert torch.equal(model(ids), expected)
    jit.remove()
    assert model[0].weight.dtype == torch.float32 and torch.equal(model(ids), expected)

def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(60, 80), nn.Linear(80, 60, bias=False)
            self.embed.weight = self.head.weight = nn.Parameter(torch.randn(60, 80).mul(9).to(torch.float8_e4m3fn), requires_grad=False)
        def forward(self, ids): return self.head(self.embed(ids))
    model = Tied()
    w, ids = model.head.weight.float(), torch.arange(5)
    jit = JITWeights(model, compress_state(model.state_dict(), include="head"))
    assert len(jit.slots) == 2 and model.embed.weight is model.head.weight and set(model.state_dict()) == {"embed.weight", "head.weight"}
    with torch.no_grad(): assert torch.equal(model(ids), w[ids] @ w.T)
    jit.remove()
    assert model.embed.weight is model.head.weight

class Nested(nn.Module):
    "A compressed module that calls compressed modules, and one of them twice."
    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.randn(64, 64).mul(40).to(torch.float8_e4m3fn), requires_grad=False)
        self.inner = ScaledFP8Linear.from_linear(nn.Linear(64, 64))
    def forward(self, x, depth=2):
        x = self.inner(torch.tanh(self.inner(x)))
        if depth: x = self(x, depth - 1)
        return torch.tanh(x) @ self.own.to(x.dtype)

def test_nested_and_recursive_modules():
    torch.manual_seed(0)
    model, x = Nested().requires_grad_(False), torch.randn(3, 64)
    expected = model(x)
    jit = JITWeights(model, compress_state(model.state_dict(), min_numel=0))
    with torch.no_grad():
        for _ in range(2): assert torch.equal(model(x), expected)
    assert jit.scratch_nbytes == 4 * 64 * 64 and not jit._stack and not any("own" in m.__dict__ or "weight" in m.__dict__ for m in model.modules())

# inference only

def test_gradients_are_refused(x):
    net = small()
    JITWeights(net, compress_state(net.state_dict()))
    assert torch.isfinite(net(x)).all()                            # gradients enabled, but nothing wants one
    with pytest.raises(RuntimeError, match="an input requires a gradient"): net(x.clone().requires_grad_())
    with torch.no_grad(): net(x.clone().requires_grad_())
    net[0].bias.requires_grad_()
    with pytest.raises(RuntimeError, match="bias requires a gradient"): net(x)
    with torch.inference_mode(): net(x)

def test_gradients_are_refused_inside_groups(x):
    """A trainable norm in the group makes the gradient pass through the weights."""
    net = small()
    net[4].requires_grad_()
    JITWeights(net, compress_state(net.state_dict()), groups=[""])
    with pytest.raises(RuntimeError, match="4.weight"): net(x)

def test_trainable_fp8_weights_are_refused():
    layer = nn.Linear(64, 80, bias=False)
    layer.weight = nn.Parameter(torch.randn(80, 64).to(torch.float8_e4m3fn))
    JITWeights(layer, compress_state(layer.state_dict()))
    with pytest.raises(RuntimeError, match="weight requires"): layer(torch.randn(2, 64))

# faults

@pytest.mark.parametrize("state, error, match", [
    ({"9.weight": None}, TypeError, "9.weight"), ({"nope": encode(torch.zeros(4, dtype=torch.uint8).numpy())}, ValueError, "nope.*no such"),
    ({"0.weight": encode(torch.zeros(4, dtype=torch.uint8).numpy())}, ValueError, "shape")])
def test_state_that_does_not_fit_changes_nothing(x, state, error, match):
    net = small()
    expected, good = net(x), compress_state(net.state_dict())
    with pytest.raises(error, match=match): JITWeights(net, good | state)
    assert torch.equal(net(x), expected) and net[0].weight.dtype == torch.float8_e4m3fn and JITWeights.of(net) == []

def test_bad_arguments():
    net = small()
    with pytest.raises(TypeError, match="model"): JITWeights("net", {})
    for groups in (["("], ["nothing"], {"nothing": ["0"]}, [3]):
        with pytest.raises(ValueError, match="groups"): JITWeights(net, compress_state(net.state_dict()), groups=groups)
    assert net[0].weight.dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="include"): compress_state(net.state_dict(), include="(")
    integers = nn.Module()
    integers.register_parameter("w", nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False))
    with pytest.raises(ValueError, match="int8"): JITWeights(integers, {"w": encode(torch.zeros(4, dtype=torch.uint8).numpy())})

def test_damage_in_memory_raises_and_is_cleaned_up(x):
    net = small()
    expected = net(x)
    jit = JITWeights(net, compress_state(net.state_dict()), groups=[""])
    blob, at = net[2].weight, net[2].weight.numel() // 4
    with torch.no_grad():
        blob[at] ^= 1
        with pytest.raises(ECF8IntegrityError): net(x)
        assert not jit._stack and not any("weight" in m.__dict__ for m in net.modules())
        blob[at] ^= 1
        assert torch.equal(net(x), expected)

def test_an_error_in_forward_is_cleaned_up(x):
    net = small()
    expected = net(x)
    jit = JITWeights(net, compress_state(net.state_dict()))
    with torch.no_grad():
        with pytest.raises(RuntimeError): net(torch.randn(5, 7))
        assert not jit._stack and not any("weight" in m.__dict__ for m in net.modules())
        assert torch.equal(net(x), expected)

def test_threads_take_turns(x):
    net = small()
    inputs = [torch.randn(3, 96) for _ in range(4)]
    expected, wrong = [net(i) for i in inputs], []
    JITWeights(net, compress_state(net.state_dict()))
    def work(i):
        with torch.inference_mode():
            for _ in range(20):
                if not torch.equal(net(inputs[i]), expected[i]): wrong.append(i)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join(60)
    assert not wrong and not any(t.is_alive() for t in threads)

# real classes

def tiny_llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config).eval()

@pytest.mark.parametrize("groups", [None, [r"model\.layers\.\d+"]])
def test_llama(groups):
    model, ids = quantize_linears(tiny_llama(), (32, 32), exclude="lm_head"), torch.arange(12)[None]
    with torch.inference_mode(): expected = model(ids).logits
    state = compress_state(model.state_dict(), min_numel=0)
    assert len(state) == 14
    JITWeights(model, state, groups=groups)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected)
        cached = model.generate(ids, max_new_tokens=5, do_sample=False)
    JITWeights.of(model)[0].remove()
    with torch.inference_mode(): assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), cached)

def test_llama_with_the_fp8_layer_of_transformers(monkeypatch):
    """transformers' own FP8Linear, whose GPU kernel is replaced by its dequantisation: the class sees FP8 weights and scales as without us."""
    fine = pytest.importorskip("transformers.integrations.finegrained_fp8")
    def on_cpu(input, weight, scale, block_size, bias=None, activation_scale=None, allow_deepgemm=True):
        assert weight.dtype == torch.float8_e4m3fn
        return F.linear(input, fine._dequantize_fp8_weight(weight, scale, block_size, input.dtype), bias)
    monkeypatch.setattr(fine, "fp8_linear", on_cpu)
    model, ids = tiny_llama(), torch.arange(10)[None]
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in list(block.named_children()):
                if not isinstance(linear, nn.Linear): continue
                theirs, ours = fine.FP8Linear(linear.in_features, linear.out_features, (32, 32)), ScaledFP8Linear.from_linear(linear, (32, 32))
                theirs.load_state_dict(ours.state_dict())
                setattr(block, name, theirs)
    with torch.inference_mode(): expected = model(ids).logits
    state = compress_state(model.state_dict(), min_numel=0)
    assert len(state) == 14
    JITWeights(model, state)
    with torch.inference_mode(): assert torch.equal(model(ids).logits, expected)

def test_minilm():
    """The real encoder, plain FP8 against compressed FP8."""
    data = pytest.importorskip("iclr26.lab.data")
    transformers = pytest.importorskip("transformers")
    try: folder = data.minilm_folder()
    except ImportError: pytest.skip("the packaged MiniLM weights are not installed")
    model = quantize_linears(transformers.BertModel.from_pretrained(folder).eval())
    ids = torch.randint(1000, 20000, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(): expected = model(ids).last_hidden_state
    jit = JITWeights(model, compress_state(model.state_dict()))
    with torch.inference_mode(): assert torch.equal(model(ids).last_hidden_state, expected)
    assert len(jit.slots) == 37 and jit.nbytes < 0.86 * sum(s.numel for s in jit.slots)
