"""lab.kernels: the host build behaves like a GPU where a kernel is right, and names the fault where it is wrong."""
import numpy as np
import pytest
import torch

from iclr26.lab import kernels as K
from iclr26.lab.kernels import (BarrierDivergenceError, CudaKernel, HostKernel, KernelCompileError, KernelTimeoutError, OutOfBoundsError, compile_check,
                                compilers, cuda_available, cuda_problem, kernel_source)

WARP = "0xffffffffu"


def kernel(body, params, name="k", before=""):
    return HostKernel(f'{before}\nextern "C" __global__ void {name}({params}) {{ {body} }}', name)


# threads, blocks, shared memory ---------------------------------------------------------------------------------------
def test_index_space_of_a_three_dimensional_launch():
    k = kernel("""int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
                  int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
                  out[b * blockDim.x * blockDim.y * blockDim.z + t] += 1 + t;""", "int* out")
    out = np.zeros(24 * 30, np.int32)
    k.launch((2, 3, 4), (5, 3, 2), out)
    assert np.array_equal(out, np.tile(np.arange(1, 31), 24))


REDUCE = """extern __shared__ float part[]; const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            part[t] = i < n ? x[i] : 0.0f; __syncthreads();
            for (int h = blockDim.x / 2; h; h /= 2) { if (t < h) part[t] += part[t + h]; __syncthreads(); }
            if (t == 0) out[blockIdx.x] = part[0];"""


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("poison", [0xFF, 0x7F, 0])
def test_reduction_counts_barriers(seed, poison):
    x = np.arange(1000, dtype=np.float32)
    out = np.full(4, -1, np.float32)
    report = kernel(REDUCE, "const float* x, float* out, int n").launch(4, 256, x, out, 1000, shared=1024, seed=seed, poison=poison)
    assert out.tolist() == [x[i : i + 256].sum() for i in range(0, 1000, 256)]
    assert report.barriers == 4 * 9 and report.barriers_per_block == 9 and report.blocks == 4 and report.threads == 256


def test_missing_barrier_reads_poison():
    x, out = np.ones(256, np.float32), np.zeros(1, np.float32)
    kernel(REDUCE.replace("0.0f; __syncthreads();", "0.0f;"), "const float* x, float* out, int n").launch(1, 256, x, out, 256, shared=1024)
    assert np.isnan(out[0])


def test_shared_memory_is_poisoned_before_every_block_static_and_dynamic():
    k = kernel("""__shared__ unsigned a[4]; extern __shared__ unsigned d[]; int i = blockIdx.x;
                  out[2 * i] = a[3]; out[2 * i + 1] = d[5]; a[3] = d[5] = 7;""", "unsigned* out")
    out = np.zeros(6, np.uint32)
    k.launch(3, 1, out, shared=24, poison=0xAB)
    assert (out == 0xABABABAB).all()


def test_dynamic_arrays_of_two_names_share_their_start():
    k = HostKernel("""__device__ void fill(int v) { extern __shared__ int a[]; a[threadIdx.x] = v; }
                      extern "C" __global__ void k(int* out) { extern __shared__ int b[]; fill(3 + threadIdx.x); __syncthreads(); out[threadIdx.x] = b[7 - threadIdx.x]; }""", "k")
    out = np.zeros(8, np.int32)
    k.launch(1, 8, out, shared=32)
    assert out.tolist() == list(range(10, 2, -1))


def test_shuffled_order_is_repeatable_and_shows_a_race():
    k = kernel("__shared__ int s[64]; s[threadIdx.x] = threadIdx.x; int v = s[63 - threadIdx.x]; out[threadIdx.x] = v;", "int* out")
    def run(seed):
        out = np.zeros(64, np.int32)
        k.launch(1, 64, out, seed=seed)
        return out.tolist()
    assert run(5) == run(5) and len({tuple(run(s)) for s in range(4)}) == 4


# warps ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [32, 8])
def test_shuffles_against_their_definition(width):
    k = kernel(f"""int t = threadIdx.x, v = 100 + t;
        out[t] = __shfl_sync({WARP}, v, 3, {width}); out[64 + t] = __shfl_up_sync({WARP}, v, 2, {width});
        out[128 + t] = __shfl_down_sync({WARP}, v, 2, {width}); out[192 + t] = __shfl_xor_sync({WARP}, v, 5, {width});""", "int* out")
    out = np.zeros(256, np.int32)
    k.launch(1, 64, out, seed=1)
    t = np.arange(64)
    first, lane = t // width * width, t % width
    expected = [first + 3, np.where(lane >= 2, t - 2, t), np.where(lane + 2 < width, t + 2, t), first + (lane ^ 5)]
    assert np.array_equal(out.reshape(4, 64) - 100, expected)


def test_shuffle_types():
    k = kernel(f"""d[threadIdx.x] = __shfl_xor_sync({WARP}, d[threadIdx.x], 1); l[threadIdx.x] = __shfl_xor_sync({WARP}, l[threadIdx.x], 1);
                   h[threadIdx.x] = __shfl_xor_sync({WARP}, h[threadIdx.x], 1);""", "double* d, unsigned long long* l, __half* h", before="#include <cuda_fp16.h>")
    d, l, h = np.random.default_rng(0).random(32), np.arange(32, dtype=np.uint64) << np.uint64(40), np.arange(32, dtype=np.float16)
    swap = np.arange(32) ^ 1
    want = d[swap], l[swap], h[swap]
    k.launch(1, 32, d, l, h)
    assert all(np.array_equal(a, b) for a, b in zip((d, l, h), want))


def test_votes_and_warp_reductions():
    k = kernel(f"""int t = threadIdx.x; unsigned m = {WARP};
        out[t] = __ballot_sync(m, t % 3 == 0); out[32 + t] = __any_sync(m, t == 40); out[64 + t] = __all_sync(m, t < 40);
        out[96 + t] = __reduce_add_sync(m, (unsigned)t); out[128 + t] = __reduce_max_sync(m, t - 50); out[160 + t] = __match_any_sync(m, t / 16);""", "unsigned* out")
    out = np.zeros(192, np.uint32)
    k.launch(1, 32, out, seed=2)
    ballot = sum(1 << t for t in range(0, 32, 3))
    expected = [[ballot] * 32, [0] * 32, [1] * 32, [496] * 32, [2**32 - 19] * 32, [0xFFFF] * 16 + [0xFFFF0000] * 16]
    assert np.array_equal(out.reshape(6, 32), expected)


def test_part_of_a_warp_and_exited_lanes():
    k = kernel("""int t = threadIdx.x; if (t >= 20) return;
                  if (t < 16) out[t] = __shfl_sync(0xffffu, t * 10, 15);
                  out[16 + t] = __ballot_sync(0xffffffffu, 1);""", "unsigned* out")
    out = np.zeros(36, np.uint32)
    k.launch(1, 32, out)
    assert (out[:16] == 150).all() and (out[16:] == (1 << 20) - 1).all()


def test_block_votes():
    k = kernel("int t = threadIdx.x; out[t] = __syncthreads_count(t % 4 == 0) + 1000 * __syncthreads_and(t < 96) + 10000 * __syncthreads_or(t == 95);", "int* out")
    out = np.zeros(96, np.int32)
    assert k.launch(1, 96, out).barriers == 3 and (out == 11024).all()


# atomics and arithmetic -----------------------------------------------------------------------------------------------
def test_atomics():
    k = kernel("""int t = blockIdx.x * blockDim.x + threadIdx.x;
        atomicAdd(i, 1); atomicMax(i + 1, t); atomicMin(i + 2, -t); atomicCAS(i + 3, 0, t + 1);
        atomicAdd(u, 1); atomicOr(u + 1, 1u << t % 32); atomicInc(u + 2, 6); atomicAdd(l, 1ull << 33); atomicAdd(f, 0.5f); atomicAdd(d, 0.25);
        if (atomicExch(u + 3, t + 1) == 0) atomicAdd(i + 4, 1);""", "int* i, unsigned* u, unsigned long long* l, float* f, double* d")
    i, u, l, f, d = np.zeros(5, np.int32), np.zeros(4, np.uint32), np.zeros(1, np.uint64), np.zeros(1, np.float32), np.zeros(1)
    k.launch(2, 64, i, u, l, f, d)
    assert i.tolist() == [128, 127, -127, 1, 1] and u.tolist() == [128, 2**32 - 1, 128 % 7, 128]
    assert l[0] == 128 << 33 and f[0] == 64 and d[0] == 32


def test_bit_intrinsics():
    k = kernel("""out[0] = __popc(x); out[1] = __ffs(x); out[2] = __clz(x); out[3] = __brev(x); out[4] = __byte_perm(x, 0x44332211u, 0x3715);
        out[5] = __funnelshift_l(x, 1u, 4); out[6] = __umulhi(x, x); out[7] = __dp4a(x, 0x01020304u, 5u); out[8] = __dp4a((int)x, (int)0xff0201feu, -7);
        out[9] = __clz(0); out[10] = __ffs(0); out[11] = __float2int_rn(2.5f); out[12] = __float2int_rz(-1e20f); out[13] = __float_as_uint(1.0f); out[14] = __popcll(~0ull);
        out[15] = __byte_perm(x, 0x44332211u, 0xFB48);""", "unsigned x, unsigned* out")
    x = 0x80F01234
    out = np.zeros(16, np.uint32)
    k.launch(1, 1, x, out)
    both = x.to_bytes(4, "little") + 0x44332211.to_bytes(4, "little")
    perm = int.from_bytes(bytes([both[5], both[1], both[7], both[3]]), "little")
    xb, signed = x.to_bytes(4, "little"), np.frombuffer(x.to_bytes(4, "little"), np.int8).astype(int)
    dot = int(signed @ np.frombuffer((0xFF0201FE).to_bytes(4, "little"), np.int8).astype(int)) - 7
    # selector 0xFB48, from its low nibble: sign of byte 0, byte 4, sign of byte 3, sign of byte 7
    signs = (0xFF if xb[0] & 128 else 0) | 0x11 << 8 | (0xFF if xb[3] & 128 else 0) << 16 | (0xFF if 0x44 & 128 else 0) << 24
    expected = [bin(x).count("1"), 3, 0, int(f"{x:032b}"[::-1], 2), perm, (1 << 4 | x >> 28) & 0xFFFFFFFF, x * x >> 32,
                sum(a * b for a, b in zip(xb, (4, 3, 2, 1))) + 5, dot % 2**32, 32, 0, 2, 2**31, 0x3F800000, 64, signs]
    assert out.tolist() == expected


@pytest.mark.parametrize("kind", ["half", "bf16"])
def test_small_floats_round_like_torch(kind):
    cuda, dtype = {"half": ("__half", torch.float16), "bf16": ("__nv_bfloat16", torch.bfloat16)}[kind]
    k = HostKernel(f"""#include <cuda_fp16.h>
        #include <cuda_bf16.h>
        template <class T> __global__ void k(const float* x, const T* a, T* cast, T* product) {{
            int i = blockIdx.x * blockDim.x + threadIdx.x; cast[i] = T(x[i]); product[i] = __hmul(a[i], a[i]) + a[i]; }}""", f"k<{cuda}>")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, generator=g) * torch.logspace(-7, 4, 512)
    x[:6] = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1 + 2**-9, 65520.0])
    a, cast, product = x.to(dtype), torch.zeros(512, dtype=dtype), torch.zeros(512, dtype=dtype)
    k.launch(4, 128, x, a, cast, product)
    assert torch.equal(cast.isnan(), a.isnan()) and torch.equal(cast.nan_to_num(), a.nan_to_num())
    assert torch.equal(product.nan_to_num(), ((a * a).to(dtype) + a).nan_to_num())


def test_streaming_log_sum_exp_in_float_and_double():
    source = """template <class T> __global__ void lse(const T* x, T* out, int n) {
        __shared__ T peak[32], mass[32];
        T m = -INFINITY, s = 0;
        for (int i = threadIdx.x; i < n; i += blockDim.x) { T v = x[i], top = max(m, v); s = s * exp(m - top) + exp(v - top); m = top; }
        for (int step = 16; step; step /= 2) {
            T om = __shfl_xor_sync(0xffffffffu, m, step), os = __shfl_xor_sync(0xffffffffu, s, step), top = max(m, om);
            s = s * exp(m - top) + os * exp(om - top); m = top; }
        if (threadIdx.x % 32 == 0) peak[threadIdx.x / 32] = m, mass[threadIdx.x / 32] = s;
        __syncthreads();
        if (threadIdx.x == 0) { T top = peak[0], sum = 0; for (int w = 1; w < blockDim.x / 32; ++w) top = max(top, peak[w]);
            for (int w = 0; w < blockDim.x / 32; ++w) sum += mass[w] * exp(peak[w] - top); out[0] = top + log(sum); } }"""
    for name, dtype, tol in (("float", np.float32, 1e-6), ("double", np.float64, 1e-14)):
        x, out = (np.random.default_rng(1).standard_normal(1000) * 20).astype(dtype), np.zeros(1, dtype)
        HostKernel(source, f"lse<{name}>").launch(1, 128, x, out, 1000, seed=4)
        assert out[0] == pytest.approx(np.logaddexp.reduce(x.astype(np.float64)), rel=tol)


def test_int8_product_with_vector_loads():
    k = kernel("""int row = blockIdx.x, col = threadIdx.x, acc = 0;
        const int4* x = (const int4*)(a + row * n); const int4* y = (const int4*)(b + col * n);
        for (int i = 0; i < n / 16; ++i) { int4 p = x[i], q = __ldg(y + i); acc = __dp4a(p.x, q.x, acc); acc = __dp4a(p.y, q.y, acc); acc = __dp4a(p.z, q.z, acc); acc = __dp4a(p.w, q.w, acc); }
        c[row * blockDim.x + col] = acc;""", "const signed char* a, const signed char* b, int* c, int n")
    rng = np.random.default_rng(2)
    a, b, c = rng.integers(-128, 128, (5, 64)).astype(np.int8), rng.integers(-128, 128, (7, 64)).astype(np.int8), np.zeros((5, 7), np.int32)
    k.launch(5, 7, a, b, c, 64)
    assert np.array_equal(c, a.astype(int) @ b.astype(int).T)


def test_device_functions_constants_and_null_pointers():
    k = HostKernel("""__constant__ int table[3] = {2, 3, 5};
        __device__ __noinline__ int look(int i) { return table[i % 3]; }
        extern "C" __global__ void __launch_bounds__(64, 2) k(const float* bias, int* out) { if (threadIdx.x < 6) out[threadIdx.x] = look(threadIdx.x) + (bias != nullptr); }""", "k")
    out = np.zeros(6, np.int32)
    k.launch(1, 8, None, out)
    assert out.tolist() == [2, 3, 5, 2, 3, 5]


# faults ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("first, second, parts", [      # on lines 3 and 4 of the text
    ("if (threadIdx.x == 5) return;", "__syncthreads();", ["thread (5,0,0) has finished after 0 barriers", "thread (0,0,0) waits at barrier 1 (__syncthreads, line 4)"]),
    ("__syncthreads();", "if (threadIdx.x < 8) __syncthreads();", ["thread (8,0,0) has finished after 1 barriers", "waits at barrier 2 (__syncthreads, line 4)"]),
    ("if (threadIdx.x < 8) __syncthreads();", "else __syncthreads();", ["barrier 1 (__syncthreads, line 3)", "barrier 1 (__syncthreads, line 4)"]),
    ("if (threadIdx.x < 8) __shfl_sync(0xffffffffu, 1, 0);", "else __syncthreads();", ["waits in __shfl_sync with mask 0xffffffff (line 3)", "__syncthreads, line 4"]),
    ("if (threadIdx.x < 8) __shfl_sync(0xffu, 1, 0);", "else __shfl_sync(0xfffffffeu, 1, 0); __syncthreads();", ["waits in __shfl_sync with mask 0xfffffffe (line 4)"]),
    ("", "if (threadIdx.x == 9) __ballot_sync(0x1u, 1);", ["thread (9,0,0) calls __ballot_sync at line 4", "not in its mask 0x00000001"])])
def test_divergence_names_block_threads_and_barrier(first, second, parts):
    k = kernel(f"if (blockIdx.x != 1) return;\n{first}\n{second}", "int* out")
    with pytest.raises(BarrierDivergenceError) as error: k.launch(2, 32, np.zeros(1, np.int32))
    assert all(part in str(error.value) for part in ["k: block (1,0,0)", *parts]), str(error.value)


@pytest.mark.parametrize("size", [1, 3, 16, 1000, 4096, 70_000])
def test_one_byte_too_far_is_caught_for_reads_and_writes(size):
    read, write = kernel("out[0] = x[i];", "const unsigned char* x, long long i, int* out"), kernel("x[i] = 1;", "unsigned char* x, long long i")
    x, out = np.zeros(size + 16, np.uint8), np.zeros(1, np.int32)
    exact = x[-x.ctypes.data % 16 :][: size // 16 * 16] if size >= 16 else None      # ends at the forbidden page
    if exact is not None and exact.size:
        for i, where in ((exact.size, "0 bytes past the end"), (exact.size + 4000, "4000 bytes past")):
            with pytest.raises(OutOfBoundsError, match=where): read.launch(1, 1, exact, i, out)
            with pytest.raises(OutOfBoundsError, match="argument 0"): write.launch(1, 1, exact, i)
        write.launch(1, 1, exact, exact.size - 1)
        assert exact[-1] == 1
    y = np.zeros(size, np.uint8)
    for i, text in ((size, "past"), (-1, "1 bytes before its start")):
        with pytest.raises(OutOfBoundsError, match=text): write.launch(1, 1, y, i)
    assert not y.any() or size == 0


def test_faults_leave_the_arrays_alone_and_the_process_alive():
    k = kernel("x[threadIdx.x] = 7; __syncthreads(); if (threadIdx.x == 3) x[at] = 1;", "int* x, int at")
    x = np.arange(8, dtype=np.int32)
    for at in (8, 1_000_000, 200_000_000, -100_000, -200_000_000):
        with pytest.raises(OutOfBoundsError, match=r"thread \(3,0,0\), after 1 barriers.*argument 0"): k.launch(1, 8, x, at)
    assert x.tolist() == list(range(8))
    kernel("x[threadIdx.x] *= 2;", "int* x").launch(1, 8, x)
    assert x.tolist() == list(range(0, 16, 2))


def test_writing_to_constant_data_is_caught():
    with pytest.raises(OutOfBoundsError, match="constant"): kernel("((int*)x)[0] = 5;", "const int* x").launch(1, 1, np.zeros(4, np.int32))


@pytest.mark.parametrize("body", ["__shared__ int s[8]; s[i] = 1; x[0] = s[0];", "int s[8] = {0}; s[i] = 1; x[0] = s[i];", "x[0] = 1u << (i + 24);", "x[0] = 5 / (i - 8);"])
def test_small_arrays_shifts_and_division_trap(body):
    k = kernel(body, "int* x, int i")
    with pytest.raises(OutOfBoundsError, match=r"block \(0,0,0\), thread \(0,0,0\)"): k.launch(1, 1, np.zeros(1, np.int32), 8)
    k.launch(1, 1, np.zeros(1, np.int32), 7)


def test_misaligned_vector_access_traps_and_alignment_of_arguments_is_kept():
    k = kernel("y[0] = *(const uint4*)x;", "const unsigned char* x, uint4* y")
    raw = np.arange(64, dtype=np.uint8)
    at = -raw.ctypes.data % 16
    out = np.zeros(4, np.uint32)
    k.launch(1, 1, raw[at : at + 16], out)
    assert np.array_equal(out.view(np.uint8), raw[at : at + 16])
    with pytest.raises(OutOfBoundsError): k.launch(1, 1, raw[at + 1 : at + 33], out)


def test_dynamic_shared_memory_overrun():
    k = kernel("extern __shared__ float s[]; s[threadIdx.x] = 1;", "int* x")
    k.launch(1, 64, np.zeros(1, np.int32), shared=256)
    with pytest.raises(OutOfBoundsError, match="16 bytes past its 240 bytes of dynamic shared"): k.launch(1, 64, np.zeros(1, np.int32), shared=240)


def test_endless_loop_and_stack_overflow():
    with pytest.raises(KernelTimeoutError, match="still running"): kernel("while (((volatile int*)x)[0] == 0) {}", "int* x").launch(1, 2, np.zeros(1, np.int32), timeout=0.05)
    deep = HostKernel("""__device__ __noinline__ int deep(volatile int* x, int n) { volatile int pad[256]; pad[n % 256] = n; return n == 0 ? x[0] : deep(x, n - 1) + pad[n % 256]; }
                         extern "C" __global__ void k(int* x, int n) { x[0] = deep(x, n); }""", "k")
    deep.launch(1, 1, np.zeros(1, np.int32), 50)
    with pytest.raises(OutOfBoundsError): deep.launch(1, 1, np.zeros(1, np.int32), 100_000)


# arguments ------------------------------------------------------------------------------------------------------------
def test_argument_checks_come_before_the_launch():
    k = kernel("y[0] = x[0] + s;", "const float* x, float* y, unsigned char s")
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    assert k.parameters == ["*cf4", "*f4", "u1"]
    for bad, error, text in (((x, y), TypeError, "takes 3 arguments"), ((x.astype(np.float64), y, 1), TypeError, "argument 0.*float64"), ((x, y, 256), ValueError, "256 does not fit"),
                             ((x, y, 1.5), TypeError, "argument 2"), ((x, y, np.int32(1)), TypeError, "argument 2"), ((x, 3, 1), TypeError, "argument 1"), ((x, y, x), TypeError, "scalar"),
                             ((x[::2], y, 1), ValueError, "contiguous"), ((x, y[::-1], 1), ValueError, "contiguous")):
        with pytest.raises(error, match=text): k.launch(1, 1, *bad)
    frozen = y.copy(); frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"): k.launch(1, 1, x, frozen, 1)
    for grid, block, shared in ((0, 1, 0), (1, 1025, 0), ((1, 1, 1, 1), 1, 0), (1, 1.5, 0), (1, 1, 1 << 20)):
        with pytest.raises(ValueError): k.launch(grid, block, x, y, 1, shared=shared)
    assert not y.any()
    k.launch(1, 1, x, y, 255)
    assert y[0] == 256


def test_the_same_array_twice_is_one_array_and_overlap_is_refused():
    k = kernel("y[threadIdx.x] += x[(threadIdx.x + 1) % 4];", "const int* x, int* y")
    a = np.arange(8, dtype=np.int32)
    k.launch(1, 4, a[:4], a[:4])
    assert a.tolist() == [1, 3, 5, 4, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="overlap"): k.launch(1, 4, a[:4], a[2:6])


def test_torch_tensors_of_every_kind():
    k = HostKernel("template <class T> __global__ void flip(const T* x, T* y, int n) { y[n - 1 - threadIdx.x] = x[threadIdx.x]; }", "flip<unsigned char>")
    x = torch.randn(64).to(torch.float8_e4m3fn)
    y = torch.zeros(64, dtype=torch.float8_e4m3fn)
    k.launch(1, 64, x, y, 64)
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8).flip(0))
    with pytest.raises(ValueError, match="contiguous"): k.launch(1, 64, x.view(8, 8).T, y, 64)
    empty = np.zeros(0, np.uint8)
    with pytest.raises(OutOfBoundsError): k.launch(1, 1, empty, y, 64)


# compilation ----------------------------------------------------------------------------------------------------------
SOURCE = f'extern "C" __global__ void k(const float* x, float* out, int n) {{ {REDUCE} }}'


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_compiler_here_compiles_for_both_generations(arch):
    assert compilers(), "NVRTC (in the dev extra) or nvcc is required"
    for compiler in compilers():
        report = compile_check(SOURCE, arch, compiler=compiler)
        assert report.arch == arch and report.cubin_bytes > 1000 and compiler in report.compiler
        assert [use.name for use in report.kernels] == ["k"] and 4 <= report["k"].registers <= 40 and report["k"].spill_bytes == 0


def test_templates_static_shared_spills_and_warnings_are_reported():
    source = """template <class T, int N> __global__ void f(T* x) { __shared__ T s[N]; s[threadIdx.x] = x[threadIdx.x]; __syncthreads(); x[threadIdx.x] = s[N - 1 - threadIdx.x]; }
    extern "C" __global__ void __launch_bounds__(1024, 2) fat(double* x) { int unused; double v[64];
        for (int i = 0; i < 64; ++i) v[i] = x[i]; for (int r = 0; r < 3; ++r) for (int i = 0; i < 64; ++i) v[i] = sqrt(v[i] + v[(i * 7 + 3) % 64]); for (int i = 0; i < 64; ++i) x[i] = v[i]; }"""
    for compiler in compilers():
        report = compile_check(source, names=("f<float, 128>", "f<double, 64>"), compiler=compiler)
        assert report["f<float, 128>"].shared_bytes == 512 and report["f<double, 64>"].shared_bytes == 512
        assert report["fat"].spill_bytes > 0 and any("unused" in w for w in report.warnings)
    with pytest.raises(KeyError, match="compiled were"): report["g"]


def test_compile_errors_carry_the_compilers_log():
    broken = SOURCE.replace("part[t] =", "prat[t] =")
    for compiler in compilers():
        with pytest.raises(KernelCompileError, match="prat") as error: compile_check(broken, compiler=compiler)
        assert '"prat" is undefined' in error.value.log
    with pytest.raises(KernelCompileError, match="kernel.cu:2:.*prat") as error: HostKernel(broken, "k")
    with pytest.raises(KernelCompileError, match="nothing"): HostKernel(SOURCE, "nothing")
    for bad in (dict(arch="hopper"), dict(compiler="clang")):
        with pytest.raises(ValueError): compile_check(SOURCE, **bad)


def test_no_compiler_is_one_line(monkeypatch):
    import builtins
    real = builtins.__import__
    def without(name, *args, **kwargs):
        if name.startswith("cuda"): raise ModuleNotFoundError("No module named 'cuda'", name="cuda")
        return real(name, *args, **kwargs)
    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("importlib.import_module", lambda name: without(name))
    monkeypatch.setenv("PATH", "")
    assert compilers() == []
    with pytest.raises(ImportError, match=r'pip install "iclr26\[dev\]"'): compile_check(SOURCE)


def test_host_builds_are_cached_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("ICLR26_CACHE", str(tmp_path))
    HostKernel(SOURCE, "k")
    built = {p: p.stat().st_mtime_ns for p in (tmp_path / "kernels").glob("*.so")}
    HostKernel(SOURCE, "k")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "kernels").glob("*.so")} == built and len(built) == 1
    HostKernel(SOURCE + " ", "k")
    assert len(list((tmp_path / "kernels").glob("*.so"))) == 2


def test_every_kernel_of_the_package_compiles():
    files = sorted(p.name for p in K.resource("kernels").glob("*.cu"))
    assert "ecf8_decode.cu" in files
    for file in files:
        for arch in ("sm_80", "sm_90"): assert compile_check(file, arch).cubin_bytes > 0


def test_kernel_source_by_name_path_and_missing(tmp_path):
    assert "__global__" in kernel_source("ecf8_decode.cu")
    (tmp_path / "mine.cu").write_text(SOURCE)
    assert kernel_source(tmp_path / "mine.cu") == SOURCE and HostKernel(tmp_path / "mine.cu", "k").name == "k"
    with pytest.raises(FileNotFoundError, match="ecf8_decode.cu"): kernel_source("absent.cu")


# GPU ------------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(cuda_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_launching_is_one_clear_line():
    assert cuda_problem() and "\n" not in cuda_problem()
    with pytest.raises(RuntimeError, match="cannot launch k: "): CudaKernel(SOURCE, "k").launch(1, 32, None, np.int32(1))
    with pytest.raises(ValueError, match="CUDA tensor"): CudaKernel(SOURCE, "k").launch(1, 32, torch.zeros(3))
    with pytest.raises(TypeError, match="NumPy scalar"): CudaKernel(SOURCE, "k").launch(1, 32, 3)


@pytest.mark.skipif(not cuda_available(), reason="needs a GPU and CuPy")
def test_gpu_and_host_agree_on_torchs_stream():
    x = torch.randn(1000)
    host = np.zeros(4, np.float32)
    HostKernel(SOURCE, "k").launch(4, 256, x, host, 1000, shared=1024)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out = torch.zeros(4, device="cuda")
        CudaKernel(SOURCE, "k").launch(4, 256, x.cuda(), out, np.int32(1000), shared=1024)
        doubled = out * 2
    side.synchronize()
    assert np.array_equal(doubled.cpu().numpy(), host * 2)
