"""Claim E8: both CUDA kernels, run from their own text on the CPU, restore every byte; and they compile for sm_80 and sm_90."""
import gc

import numpy as np
import pytest
import torch
from dahuffman import HuffmanCodec

from iclr26.ecf8.codec import cascaded_luts, decode, encode, split_fp8
from iclr26.ecf8 import kernels as E
from iclr26.ecf8.kernels import decode_ceiling, decode_cuda, decode_host, launch_plan, occupancy, relayout
from iclr26.lab.kernels import HostKernel, KernelTimeoutError, compile_check, cuda_available, kernel_source

RNG = lambda seed=0: np.random.default_rng(seed)


def gauss(n, seed=0): return (torch.from_numpy(RNG(seed).standard_normal(n).astype(np.float32)) * 0.05).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def geometric(n):
    "Exponent k with probability 2^-k: codes of 1 to 12 (or 15) bits, the deepest trees."
    e = np.minimum(RNG(1).geometric(0.5, n) - 1, 15).astype(np.uint8)
    return e << 3 | RNG(2).integers(0, 256, n).astype(np.uint8) & 0x87


CASES = {"1": gauss(1), "2": gauss(2), "3": gauss(3), "7": gauss(7), "1000": gauss(1000), "16384": gauss(16384), "50001 constant": np.full(50_001, 0x38, np.uint8),
         "100001 random bytes": RNG(3).integers(0, 256, 100_001).astype(np.uint8), "200001": gauss(200_001), "65535 geometric": geometric(65_535)}


@pytest.fixture(scope="module")
def encoded():
    return {name: {1: encode(x, paper_layout=True, raw=False), 2: encode(x, raw=False)} for name, x in CASES.items()}


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_bit_exact(encoded, name, version, seed):
    got = decode_host(encoded[name][version], version, seed=seed)
    assert got.dtype == torch.float8_e4m3fn and np.array_equal(got.view(torch.uint8).numpy(), CASES[name])


def test_the_cases_exercise_the_tables(encoded):
    lengths = {name: t[1].lengths for name, t in encoded.items()}
    assert lengths["65535 geometric"].max() > 8 and lengths["50001 constant"].max() == 1     # second table row; one-bit codes, fullest blocks
    assert len(cascaded_luts(lengths["65535 geometric"])) > 2
    assert (encoded["200001"][2].gaps != 0).any() and encoded["200001"][2].n_blocks > 10


@pytest.mark.parametrize("version", [1, 2])
def test_agrees_with_the_lockstep_reference(version):
    t = encode(gauss(30_001, 7), raw=False, paper_layout=version == 1)
    assert torch.equal(decode_host(t, version).view(torch.uint8), decode(t, backend="numpy").view(torch.uint8))


@pytest.mark.parametrize("bytes_per_thread, threads, gaps", [(16, 256, False), (8, 512, False), (4, 64, True), (32, 100, True), (7, 33, False)])
@pytest.mark.parametrize("version", [1, 2])
def test_any_layout_is_laid_out_anew(bytes_per_thread, threads, gaps, version):
    x = gauss(20_003, 5)
    t = encode(x, bytes_per_thread=bytes_per_thread, threads_per_block=threads, gaps=gaps, raw=False)
    assert np.array_equal(decode_host(t, version).view(torch.uint8).numpy(), x)


def test_relayout_equals_encoding_for_that_layout():
    for x in (gauss(100_001), geometric(40_000), np.full(33_000, 9, np.uint8), gauss(1)):
        paper, ours = (encode(x, max_len=12, bytes_per_thread=b, threads_per_block=t, raw=False) for b, t in ((8, 512), (16, 256)))
        for a, b in ((paper, ours), (ours, paper), (encode(x, gaps=False, raw=False), ours)):
            got = relayout(a, b.bytes_per_thread, b.threads_per_block)
            assert np.array_equal(got.gaps, b.gaps) and np.array_equal(got.positions, b.positions) and np.array_equal(got.bitstream, b.bitstream)
    assert relayout(ours, 16, 256) is ours


def test_shapes_raw_tensors_and_versions():
    x = torch.from_numpy(gauss(600)).view(torch.float8_e4m3fn).view(20, 5, 6)
    t = encode(x, raw=False)
    assert decode_host(t).shape == (20, 5, 6)
    raw = encode(x, raw=True)
    assert torch.equal(decode_host(raw).view(torch.uint8), x.view(torch.uint8)) and decode_host(raw, report=True)[1] is None
    assert launch_plan(t).kernel == "ecf8_decode_v2"
    long = encode(geometric(65_535), max_len=16, raw=False)
    assert long.lengths.max() > 12 and launch_plan(long).kernel == "ecf8_decode_v1"
    assert np.array_equal(decode_host(long, None).view(torch.uint8).numpy(), geometric(65_535))
    for bad, text in ((lambda: launch_plan(long, 2), "takes 12"), (lambda: launch_plan(raw), "raw"), (lambda: launch_plan(t, 3), "version=3"),
                      (lambda: launch_plan(encode(x, symbols="pair", raw=False)), "pair")):
        with pytest.raises(ValueError, match=text): bad()


def test_unaligned_arrays_take_the_narrow_paths():
    x = gauss(30_001, 9)
    plan = launch_plan(encode(x, raw=False), 2)
    for shift in (1, 4, 8):
        def moved(a):
            room = np.zeros(a.nbytes + 64, np.uint8)
            at = -room.ctypes.data % 16 + shift
            room[at : at + a.nbytes] = a
            return room[at : at + a.nbytes]
        out = moved(np.full(len(x), 0xA5, np.uint8))
        arguments = [out if a is None else moved(a) if isinstance(a, np.ndarray) and a.dtype == np.uint8 else a for a in plan.arguments]
        HostKernel("ecf8_decode.cu", plan.kernel).launch(plan.grid, plan.block, *arguments, shared=plan.shared)
        assert np.array_equal(out, x)


def test_barriers():
    t = encode(gauss(50_000), raw=False)
    for version, barriers in ((1, 21), (2, 3)):
        report = decode_host(t, version, report=True)[1]
        assert report.barriers_per_block == barriers and report.threads == (512 if version == 1 else 256)


def test_shared_memory_formula_is_tight_enough_for_the_fullest_block():
    plan = launch_plan(encode(np.full(70_000, 0x11, np.uint8), raw=False), 2)
    assert plan.shared == (2 << 12) + 144 + 32768 < 48 << 10


# the published implementation's streams -------------------------------------------------------------------------------
def official(x):
    "A stream as the published encoder makes it: dahuffman's codes with an end symbol, whose first bits fill the last byte."
    e, n = split_fp8(x)[0], len(x)
    values, counts = np.unique(e, return_counts=True)
    table = HuffmanCodec.from_frequencies(dict(zip(values.tolist(), counts.tolist()))).get_code_table()
    text = {s: format(code, f"0{bits}b") for s, (bits, code) in table.items()}
    end = next(code for s, code in text.items() if not isinstance(s, int))
    lengths, codes = np.zeros(16, np.uint8), np.zeros(16, np.uint32)
    for s, (bits, code) in table.items():
        if isinstance(s, int): lengths[s], codes[s] = bits, code
    assert lengths.max() <= 16
    starts = np.concatenate([[0], np.cumsum(lengths[e], dtype=np.int64)])
    stream = "".join(text[s] for s in e.tolist())
    stream += (end * 8)[: -len(stream) % 8] if len(end) >= 8 else (end + "0" * 8)[: -len(stream) % 8]
    enc = np.packbits(np.frombuffer(stream.encode(), np.uint8) - 48)
    blocks = -(-len(enc) // 4096)
    chunk = np.arange(blocks * 512) * 64
    first = np.searchsorted(starts, chunk)
    gaps = np.where(chunk < starts[-1], starts[np.minimum(first, n)] - chunk, 0).astype(np.uint8)
    positions = np.append(first[::512], n).astype(np.uint64)
    return cascaded_luts(lengths, codes), enc, split_fp8(x)[1], positions, gaps[0::2] << 4 | gaps[1::2]


def run_v1(parts, n, source="ecf8_decode.cu", **how):
    luts, enc, sm, positions, gaps = parts
    out = np.full(n, 0xA5, np.uint8)
    HostKernel(source, "ecf8_decode_v1").launch(len(positions) - 1, 512, luts, enc, sm, positions, gaps, out, len(luts), len(enc), n,
                                                shared=4 * 512 + 4 + int(np.diff(positions).max()), **how)
    return out


@pytest.mark.parametrize("data", [gauss(1), gauss(7), gauss(40_001), geometric(30_000), np.full(50_001, 0x38, np.uint8), np.full(5, 0x00, np.uint8),
                                  RNG(4).integers(0, 256, 20_000).astype(np.uint8), 0x30 + RNG(5).integers(0, 32, 9_999).astype(np.uint8)],
                         ids=["1", "7", "gauss", "geometric", "constant", "zeros", "random", "without exponent 0"])
def test_v1_accepts_official_streams(data):
    for seed in (None, 2): assert np.array_equal(run_v1(official(data), len(data), seed=seed), data)


def test_without_the_length_check_a_constant_tensor_never_ends():
    data = np.full(5001, 0x38, np.uint8)
    unguarded = kernel_source("ecf8_decode.cu").replace("if (length == 0) break;", "")
    assert unguarded != kernel_source("ecf8_decode.cu")
    with pytest.raises(KernelTimeoutError): run_v1(official(data), len(data), unguarded, timeout=0.2)
    varied = RNG(6).integers(0, 256, 5001).astype(np.uint8)     # exponent 0 occurs: the look-ups behind the end have a length
    assert np.array_equal(run_v1(official(varied), len(varied), unguarded), varied)


# damage ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", [1, 2])
def test_damaged_input_neither_hangs_nor_leaves_its_arrays(version):
    t = encode(gauss(30_001), paper_layout=version == 1, raw=False)
    plan, rng = launch_plan(t, version), RNG(8)
    for trial in range(12):
        out = np.full(t.numel, 0xA5, np.uint8)
        arguments = [out if a is None else np.array(a) if isinstance(a, np.ndarray) else a for a in plan.arguments]
        for i, a in enumerate(arguments):
            if isinstance(a, np.ndarray) and a.dtype != np.uint64 and a is not out and (trial >> i % 5 & 1 or trial > 9):
                a.reshape(-1).view(np.uint8)[:] = rng.integers(0, 256, a.nbytes) if trial % 2 else 0
        HostKernel("ecf8_decode.cu", plan.kernel).launch(plan.grid, plan.block, *arguments, shared=plan.shared, timeout=5)


# compiled for GPUs ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_compiles_without_spills(arch):
    report = compile_check("ecf8_decode.cu", arch)
    assert {use.name for use in report.kernels} == {"ecf8_decode_v1", "ecf8_decode_v2"} and not report.warnings
    assert all(use.spill_bytes == 0 and use.registers <= 32 for use in report.kernels)


def test_occupancy_and_ceiling():
    assert occupancy(32, 256, 0) == 1 and occupancy(64, 256, 0) == 0.5 and occupancy(33, 256, 0) == 0.75
    assert occupancy(32, 256, 41_104) == 5 / 8 and occupancy(32, 1024, 200 << 10) == 0.5
    assert decode_ceiling(8, 4e12) == 2e12
    for bad in ((0,), (-1,), (6, 0)):
        with pytest.raises(ValueError): decode_ceiling(*bad)


@pytest.mark.skipif(cuda_available(), reason="this is about machines without a GPU")
def test_without_a_gpu():
    t = encode(gauss(1000), raw=False)
    with pytest.raises(RuntimeError, match="needs a GPU"): decode_cuda(t)
    with pytest.raises(RuntimeError): decode(t, backend="cuda")


def test_resident_copies_are_made_once_and_die_with_the_tensor():
    t = encode(gauss(1000), raw=False)
    plan = E._resident(t, torch.device("cpu", 0))       # the upload, to the only device that is always there
    assert E._resident(t, torch.device("cpu", 0)) is plan and all(isinstance(a, (torch.Tensor, np.generic, type(None))) for a in plan.arguments)
    count = len(E._RESIDENT)
    del t; gc.collect()
    assert len(E._RESIDENT) == count - 1


@pytest.mark.skipif(not cuda_available(), reason="needs a GPU and CuPy")
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(encoded, name):
    for t in encoded[name].values():
        assert np.array_equal(decode(t, backend="cuda").view(torch.uint8).cpu().numpy(), CASES[name])
        out = torch.empty(t.numel, dtype=torch.float8_e4m3fn, device="cuda")
        assert decode_cuda(t, out).data_ptr() == out.data_ptr()
