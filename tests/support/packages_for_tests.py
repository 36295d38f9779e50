"""Marks of tests that need an optional package. A file never skips as a whole, so the tests of fallbacks run everywhere.

A test without a mark passes where no optional package is installed, except in files that import such a package themselves.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(package: str, of: str) -> pytest.MarkDecorator:
    """Return the mark of tests that need this package. `of` says where it comes from."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}, of {of}")


needs_numba = needs("numba", of="the extra `fast`")
needs_matplotlib = needs("matplotlib", of="the extra `plots`")
needs_llguidance = needs("llguidance", of="the extra `serve`")
needs_lm_eval = needs("lm_eval", of="the extra `tasks`")
needs_triton = needs("triton", of="the extra `dev`")
