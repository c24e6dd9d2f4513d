"""The dtypes and scalar types of numpy that may be sent, and their names on the wire."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np

__all__ = ["SCALARS", "TYPES", "TYPE_NAMES", "code_of", "dtype_of"]


def _name_of(dtype: np.dtype[Any]) -> str:
    name = "bool_" if dtype.kind == "b" else dtype.type.__name__  # numpy 1 and 2 call it differently
    # Machines whose long doubles have the same size may still use different formats.
    return f"{name}.{np.finfo(dtype).nmant}" if dtype.char in "gG" else name


def _numeric_code(dtype: np.dtype[Any]) -> str:
    return f"{dtype.str[0]}{_name_of(dtype)}"


_NUMBERS = [np.dtype(char) for char in np.typecodes["All"] if np.dtype(char).kind in "biufc"]
_ORDERED = [ordered for dtype in _NUMBERS for ordered in (dtype, dtype.newbyteorder())]
_DTYPES = {_numeric_code(dtype): dtype for dtype in _ORDERED}
# The dtypes cannot be keys: those of long and long long compare equal.
_CODES = {(dtype.num, dtype.byteorder): _numeric_code(dtype) for dtype in _ORDERED}
_UNITS = "Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as"
_OTHERS = re.compile(rf"[<>]U[1-9][0-9]{{0,6}}|\|S[1-9][0-9]{{0,6}}|[<>][Mm]8(\[[0-9]{{0,9}}({_UNITS})\])?")

SCALARS: list[type] = [np.datetime64, np.timedelta64, *(dtype.type for dtype in _NUMBERS)]
"""Scalar types of a fixed size."""

TYPES: dict[str, type] = {
    **{kind.__name__: kind for kind in (int, float, bool)},
    **{_name_of(dtype): dtype.type for dtype in _NUMBERS},
    **{kind.__name__: kind for kind in (np.str_, np.bytes_, np.datetime64, np.timedelta64)},
}
"""Types that may be sent as values, by name."""

TYPE_NAMES = {kind: name for name, kind in TYPES.items()}


def code_of(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a dtype; None if arrays of it may not be sent."""
    code = _CODES.get((dtype.num, dtype.byteorder))
    if code is None and dtype.kind in "USMm" and _OTHERS.fullmatch(dtype.str):
        return str(dtype.str)
    return code


@functools.lru_cache(maxsize=256)
def dtype_of(code: str) -> np.dtype[Any]:
    """Return the dtype of a name from the wire; raise ValueError for any other name."""
    if code in _DTYPES:
        return _DTYPES[code]
    if not _OTHERS.fullmatch(code):
        raise ValueError(f"arrays of dtype {code!r:.50} cannot be sent")
    return np.dtype(code)
