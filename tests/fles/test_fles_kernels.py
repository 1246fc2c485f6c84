"""CPU loops and the CUDA kernels' own text, run by the host build, against float64; they compile for sm_80 and sm_90."""
import math

import numpy as np
import pytest
import torch

from iclr26.fles import fles, positive_mean
from iclr26.fles.kernels import compile_kernels, cpu_add_mask, cpu_backward, cpu_forward, cpu_positive_sums, kernel_fles, kernel_positive_mean
from iclr26.lab.kernels import HostKernel, KernelError, compilers, cuda_available

torch.set_num_threads(1)
RNG = lambda seed: torch.Generator().manual_seed(seed)


def inputs(shape, dtype=torch.float32, seed=0):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = (torch.randn(shape, generator=RNG(seed)) * 3).to(dtype)
    return x, *(torch.rand(shape[0], shape[2], generator=RNG(seed + i)).add(.4).to(wide) for i in (1, 2))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (2, 9, 130), (1, 5, 256), (3, 4, 129)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-7), (torch.float64, 1e-15), (torch.float16, 5e-4), (torch.bfloat16, 4e-3)])
def test_host_forward(shape, dtype, tolerance):
    x, kv, kh = inputs(shape, dtype)
    y = kernel_fles(x, kv, kh, backend="host")
    exact = kv[:, None].double() * torch.sigmoid((kh[:, None] * x.to(kv.dtype)).double()) * x.double()
    assert y.dtype == dtype and torch.allclose(y.double(), exact, rtol=tolerance, atol=1e-7 if dtype != torch.float64 else 1e-15)
    mean = kernel_positive_mean(x, backend="host")
    assert mean.dtype == kv.dtype and torch.allclose(mean, positive_mean(x, 1, keepdim=False), rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 37, 130)])
def test_host_backward_against_autograd(shape):
    x, kv, kh = inputs(shape)
    up = torch.randn(shape, generator=RNG(9))
    got, want = [], []
    for store, dtype, run in ((got, torch.float32, lambda *a: kernel_fles(*a, backend="host")), (want, torch.float64, lambda x, v, h: fles(x, v[:, None], h[:, None], fused=False))):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, kv, kh)]
        run(*leaves).backward(up.to(dtype))
        store += [t.grad.double() for t in leaves]
    for a, b in zip(got, want): assert float((a - b).abs().max() / b.abs().max()) < 1e-5


def test_gradcheck_on_the_kernels_own_text():
    x, kv, kh = (t.requires_grad_() for t in inputs((2, 3, 4), torch.float64))
    assert torch.autograd.gradcheck(lambda *a: kernel_fles(*a, backend="host"), (x, kv, kh))
    assert torch.autograd.gradcheck(lambda x: kernel_positive_mean(x, backend="host"), (x,))
    for y in (kernel_fles(x, kv, kh, backend="host"), kernel_positive_mean(x, backend="host")):
        with pytest.raises(RuntimeError, match="second derivatives"): torch.autograd.grad(y.sum(), x, create_graph=True)   # refused, not silently wrong


def test_thread_order_does_not_matter():
    x, kv, kh = inputs((2, 11, 130))
    g = torch.randn(x.shape, generator=RNG(3))
    kernel, results = HostKernel("fles.cu", "fles_bwd<float>"), []
    for seed in (None, 1, 2):
        outs = torch.full_like(x, math.nan), torch.full_like(kv, math.nan), torch.full_like(kv, math.nan)
        kernel.launch((2, 2), (128, 4), x, g, kv, kh, *outs, np.int32(11), np.int32(130), seed=seed)
        results.append(outs)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other)) and all(t.isfinite().all() for t in results[0])


@pytest.mark.parametrize("scale", [.1, 1., 3., 20.])
def test_host_forward_is_within_two_ulp(scale):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(3, 61, 200, generator=g) * scale
    kv, kh = torch.rand(2, 3, 200, generator=g) + .5
    t = kh[:, None] * x                                     # as the kernel rounds it
    x[t < -85] = 0                                          # exp(t) is not a normal float32 below
    t = kh[:, None] * x
    exact = kv[:, None].double() * torch.sigmoid(t.double()) * x.double()
    spacing = torch.from_numpy(np.spacing(exact.float().abs().numpy())).double()
    assert float(((kernel_fles(x, kv, kh, backend="host").double() - exact).abs() / spacing).max()) <= 2


def test_host_forward_where_the_exponential_would_overflow():
    x = torch.tensor([[[-87., -88., -89., -90.]]])
    y = kernel_fles(x, torch.ones(1, 4), torch.ones(1, 4), backend="host")
    assert torch.allclose(y.double(), x.double() * torch.sigmoid(x.double()), rtol=1e-5, atol=1e-42)


def test_nan_and_infinity_in_the_kernel():
    x = torch.tensor([[[math.nan, math.inf, -200., 200.]]])
    one = torch.ones(1, 4)
    y = kernel_fles(x, one, one, backend="host")
    assert y[0, 0, 0].isnan() and y[0, 0, 1] == math.inf and abs(y[0, 0, 2]) < 1e-30 and y[0, 0, 3] == 200
    assert kernel_positive_mean(x, backend="host").isnan().tolist() == [[True, False, False, False]]
    assert not kernel_positive_mean(-torch.ones(1, 3, 2), backend="host").any()


def test_auto_falls_back_and_faults():
    x, kv, kh = inputs((2, 3, 5))
    assert torch.equal(kernel_fles(x, kv, kh), fles(x, kv[:, None], kh[:, None])) and torch.equal(kernel_positive_mean(x), positive_mean(x, 1, keepdim=False))
    for call, kind in ((lambda: kernel_fles(x[0], kv, kh), ValueError), (lambda: kernel_fles(x, kv[:1], kh), ValueError), (lambda: kernel_fles(x, kv.double(), kh), ValueError), (lambda: kernel_fles(x.long(), kv, kh), TypeError),
                       (lambda: kernel_fles(x, kv, kh, backend="tpu"), ValueError), (lambda: kernel_positive_mean(x[:0]), ValueError)):
        with pytest.raises(kind): call()
    if not cuda_available():
        with pytest.raises(RuntimeError, match="GPU"): kernel_fles(x, kv, kh, backend="cuda")


@pytest.mark.skipif(not compilers(), reason="no CUDA compiler")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_compiles_without_spills(arch):
    try: report = compile_kernels(arch)
    except KernelError as error:
        if "cuda_fp16.h" not in str(error) and "__half" not in str(error): raise
        report = compile_kernels(arch, ("float", "double"))                                     # the half types need the CUDA headers
    assert len(report.kernels) in (8, 16) and all(use.spill_bytes == 0 and use.registers <= 64 for use in report.kernels)


# CPU loops -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["tokens", "rows"])
@pytest.mark.parametrize("batch", [1, 4])
def test_cpu_loops(layout, batch):
    shape = (4, 150, 19) if layout == "tokens" else (4, 19, 150)
    x, g = torch.randn(2, *shape, generator=RNG(0))
    k = [torch.rand(batch, 19, generator=RNG(i)) + .5 for i in (1, 2)] + [torch.randn(batch, 19, generator=RNG(3))]
    wide = (lambda t: t[:, None]) if layout == "tokens" else (lambda t: t[..., None])
    leaves = [t.double().requires_grad_() for t in (x, *k)]
    y = wide(leaves[1]) * torch.sigmoid(wide(leaves[2]) * leaves[0] + wide(leaves[3])) * leaves[0]
    y.backward(g.double())
    assert torch.allclose(cpu_forward(x, layout, *k).double(), y, rtol=2e-6, atol=1e-7)
    gx, *sums = cpu_backward(x, g, layout, *k)
    assert torch.allclose(gx.double(), leaves[0].grad, rtol=1e-5, atol=1e-6)
    for s, leaf in zip(sums, leaves[1:]): assert torch.allclose((s.sum(0, keepdim=True) if batch == 1 else s).double(), leaf.grad, rtol=1e-4, atol=1e-4)
    axis = 1 if layout == "tokens" else 2
    total, count = cpu_positive_sums(x, layout)
    assert torch.allclose(total, x.clamp(min=0).sum(axis), rtol=1e-5) and torch.equal(count, (x >= 0).sum(axis).float())
    assert torch.equal(cpu_add_mask(g.clone(), x, k[2], layout), g + torch.where(x >= 0, wide(k[2]), torch.zeros(())))


def test_cpu_loops_refuse_other_layouts():
    with pytest.raises(ValueError, match="layout"): cpu_positive_sums(torch.zeros(1, 2, 3), "maps")
