"""Compiled functions: kept where a folder can be written, compiled anew where none can."""

import numpy as np
import pytest
from numba.core import caching

from fedecider.federation.compiled_rows import compiled


def total(value):
    result = 0.0
    for i in range(len(value)):
        result += 1.0 / value[i]
    return result


@pytest.mark.parametrize("writable", [True, False])
def test_a_function_compiles_whether_or_not_its_code_can_be_kept(writable, monkeypatch, tmp_path):
    if not writable:
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    fast = compiled(total)
    assert (fast._cache.cache_path is not None) == writable
    assert fast(np.array([2.0, 4.0])) == 0.75
    assert fast(np.array([0.0])) == np.inf  # not an exception


def test_options_are_passed_on():
    assert compiled(fastmath={"reassoc"})(total).targetoptions["fastmath"] == {"reassoc"}
    assert compiled(error_model="python")(total).targetoptions["error_model"] == "python"
