"""The compiled exponential against NumPy's in float64."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numba import njit

from iclr26.blocks.vector_math import exp32


@settings(deadline=None)
@given(st.floats(-87, 88, width=32))
def test_one_unit_in_the_last_place(t):
    assert exp32(np.float32(t)) == pytest.approx(np.exp(np.float64(np.float32(t))), rel=2**-23)


@pytest.mark.parametrize("t, value", [(-87.001, 0), (-1e30, 0), (-np.inf, 0), (0, 1), (-0.0, 1)])
def test_ends(t, value):
    assert exp32(np.float32(t)) == value


def test_saturation_and_nan():
    top = exp32(np.float32(88))
    assert np.isfinite(top) and exp32(np.float32(1e30)) == exp32(np.float32(np.inf)) == top and np.isnan(exp32(np.float32(np.nan)))


@pytest.mark.parametrize("flags", [set(), {"reassoc", "contract", "nsz", "arcp"}, True])
def test_callers_flags_do_not_reach_it(flags):
    @njit(fastmath=flags)
    def apply(x, out):
        for i in range(len(x)): out[i] = exp32(np.float32(2) * x[i])
    x = np.linspace(-40, 40, 4001, dtype=np.float32)
    out = np.empty_like(x)
    apply(x, out)
    assert np.allclose(out, np.exp(2 * x.astype(np.float64)), rtol=2**-22, atol=0)
