"""The forms in which compiled kernels multiply plain weights, by dtype."""

from __future__ import annotations

from typing import Any

import torch

FLOATS = {torch.float32: "FLOAT32", torch.float16: "FLOAT16"}
"""Names, in the module of the kernels, of the forms whose calls take and return float32."""
FORMS = {torch.bfloat16: "PLAIN", **FLOATS}
"""Names of all forms of plain weights."""
OF_PROMPTS = (torch.bfloat16, torch.float32)
"""The dtypes of plain weights that the kernels for many rows multiply."""


def plain_form(kernels: Any, dtype: torch.dtype) -> tuple[int | str, int]:
    """Return the form of plain weights in this dtype, which is one of FORMS."""
    form: tuple[int | str, int] = getattr(kernels, FORMS[dtype])
    return form
