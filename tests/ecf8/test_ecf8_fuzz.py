"""Mutated blobs: each is refused, or decodes to the very bytes that were encoded.

ICLR26_FUZZ sets the number of blobs (100,000 by default)."""
import os, time

import numpy as np
import pytest
import torch

from iclr26.ecf8.codec import ECF8FormatError, ECF8Tensor, decode, encode

COUNT = int(os.environ.get("ICLR26_FUZZ", 100_000))
SHARDS = 10

def seeds():
    "Small blobs of every kind, and the bytes they stand for."
    rng = np.random.default_rng(0)
    gauss = lambda n: (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 60).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    small = dict(bytes_per_thread=2, threads_per_block=8)
    pool = [(gauss(777), {}), (gauss(501), dict(gaps=False, **small)), (gauss(640), dict(paper_layout=True)), (gauss(903), dict(symbols="pair", max_len=11, **small)),
            (gauss(1400), dict(gaps=False, symbols="pair")), (np.full(333, 0x38, np.uint8), {}), (rng.integers(0, 256, 100, dtype=np.uint8), dict(raw=True)),
            (rng.choice(np.array([1, 0x77], np.uint8), 600), dict(bytes_per_thread=3, threads_per_block=5)), (gauss(2), {}), (np.zeros(0, np.uint8), dict(raw=None))]
    return [(b, encode(b, **{"raw": False, **options}).to_bytes()) for b, options in pool]

def mutate(rng, blob, others):
    "One of: bit flips, random bytes, special values in the header, cut, insert, repeat, splice."
    bad, kind = bytearray(blob), rng.integers(8)
    at = lambda: int(rng.integers(len(bad))) if len(bad) else 0
    if kind == 0: bad[at()] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        for _ in range(int(rng.integers(1, 9))): bad[at()] ^= 1 << int(rng.integers(8))
    elif kind == 2:
        for _ in range(int(rng.integers(1, 4))): bad[int(rng.integers(min(96, len(bad))))] = int(rng.integers(256))
    elif kind == 3:
        start, size = int(rng.choice([4, 8, 16, 24, 26, 28, 32, 48, 64])), int(rng.choice([1, 2, 4, 8]))
        value = int(rng.choice([0, 1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1]))
        bad[start : start + size] = (value % 256**size).to_bytes(size, "little")
    elif kind == 4: del bad[at():]
    elif kind == 5: bad[at():at()] = rng.bytes(int(rng.integers(1, 20)))
    elif kind == 6:
        i, j, size = at(), at(), int(rng.integers(1, 40))
        bad[j : j + size] = bad[i : i + size]
    else:
        other, cut = others[int(rng.integers(len(others)))][1], at()
        bad[cut:] = other[cut:]
    return bytes(bad)

@pytest.mark.parametrize("shard", range(SHARDS))
def test_mutated_blobs_are_refused_or_harmless(shard):
    rng, pool = np.random.default_rng([shard, COUNT]), seeds()
    contents, refused, slowest = [b.tobytes() for b, _ in pool], 0, 0.0
    decode(ECF8Tensor.from_bytes(pool[0][1])), decode(ECF8Tensor.from_bytes(pool[3][1]))        # compile before the clock runs
    guarded, size = np.full(4096 + 128, 0xA5, np.uint8), 0
    for i in range(-(-COUNT // SHARDS)):
        which = int(rng.integers(len(pool)))
        blob = mutate(rng, pool[which][1], pool)
        began = time.process_time()
        try:
            t = ECF8Tensor.from_bytes(blob)
            size = t.numel
            assert size <= 2 * len(blob) < 4096
            guarded[:] = 0xA5
            decoded = decode(t, guarded[64 : 64 + size]).view(torch.uint8).numpy().tobytes()
            assert decoded in contents, f"shard {shard}, blob {i}: decodes to other bytes"
        except ECF8FormatError:
            refused += 1
        slowest = max(slowest, time.process_time() - began)
        if i % 7 == 0 and blob[:5] == b"ECF8\x01":
            try: ECF8Tensor.from_bytes(blob).verify()
            except ECF8FormatError: pass
        assert (guarded[:64] == 0xA5).all() and (guarded[64 + size :] == 0xA5).all(), f"shard {shard}, blob {i}: wrote outside the output"
    assert 0 < refused < -(-COUNT // SHARDS)
    assert slowest < 5.0

def test_the_numpy_decoder_agrees_on_mutated_blobs():
    rng, pool = np.random.default_rng(1), seeds()
    outcomes = set()
    for _ in range(400):
        blob = mutate(rng, pool[int(rng.integers(len(pool)))][1], pool)
        try: t = ECF8Tensor.from_bytes(blob)
        except ECF8FormatError: continue
        results = []
        for backend in ("numba", "numpy"):
            try: results.append(decode(t, backend=backend).view(torch.uint8).numpy().tobytes())
            except ECF8FormatError: results.append(None)
        assert results[0] == results[1]
        outcomes.add(results[0] is None)
    assert outcomes == {True, False}
