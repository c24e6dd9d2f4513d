"""Convert per-environment info dicts to Gymnasium's dict of arrays with `_key` masks. Pure.

A worker packs the infos of its rows into columns (`pack`), the head joins the columns of all workers
(`batch`): the head's work stays small when every step has infos. The result does not depend on how slots
are spread over workers, so a column keeps enough to restore each value exactly (`_values`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Column", "batch", "pack", "select"]

_NUMBERS = (int, float, bool)


class Column(NamedTuple):
    """The values of one key for some rows."""

    rows: list[int]
    values: Any
    """An array if every value is a number of one type or an array of one shape and dtype; else a list;
    for nested dicts, a dict of columns."""
    kind: str
    """"dict", "number", "array" or "object"."""
    type: Any = None
    """For numbers, the Python or numpy type that the environment returned."""


Columns = dict[str, Column]


def pack(infos: Iterable[tuple[int, dict[str, Any]]]) -> Columns:
    """Return the columns of (row, info) pairs, keys in order of first appearance."""
    rows: dict[str, list[int]] = {}
    values: dict[str, list[Any]] = {}
    for row, info in infos:
        for key, value in info.items():
            if key in rows:
                rows[key].append(row)
                values[key].append(value)
            else:
                rows[key], values[key] = [row], [value]
    return {key: _column(key, rows[key], values[key]) for key in rows}


def _column(key: str, rows: list[int], values: list[Any]) -> Column:
    first = type(values[0])
    if key == "final_obs":
        return Column(rows, values, "object")
    if all(isinstance(value, dict) for value in values):
        return Column(rows, pack(zip(rows, values, strict=True)), "dict")
    if all(type(value) is first for value in values):
        if first in _NUMBERS or issubclass(first, np.number):
            try:
                return Column(rows, np.array(values, dtype=first), "number", first)
            except OverflowError:  # a Python int past 64 bits
                return Column(rows, values, "object")
        if issubclass(first, np.ndarray):
            shape, dtype = values[0].shape, values[0].dtype
            if all(value.shape == shape and value.dtype == dtype for value in values):
                return Column(rows, np.stack(values), "array")
    return Column(rows, values, "object")


def batch(parts: Sequence[Columns], size: int) -> dict[str, Any]:
    """Join columns whose rows are 0..size-1 into `{key: array, "_key": mask}`."""
    joined: dict[str, list[Column]] = {}
    for part in parts:
        for key, column in part.items():
            joined.setdefault(key, []).append(column)
    infos: dict[str, Any] = {}
    for key, columns in joined.items():
        mask = np.zeros(size, dtype=np.bool_)
        for column in columns:
            mask[_index(column.rows)] = True
        infos[key] = _join(key, columns, size)
        infos[f"_{key}"] = mask
    return infos


def _join(key: str, columns: list[Column], size: int) -> Any:
    kinds = {column.kind for column in columns}
    if kinds == {"dict"}:
        return batch([column.values for column in columns], size)
    if "object" in kinds or len(kinds) > 1 or not _alike(columns):
        rows = [row for column in columns for row in column.rows]
        values = [value for column in columns for value in _values(column)]
        return _place_mixed(key, rows, values, size)
    first = columns[0].values
    out = np.zeros((size, *first.shape[1:]), dtype=first.dtype)
    for column in columns:
        out[_index(column.rows)] = column.values
    return out


def _index(rows: list[int]) -> slice | list[int]:
    """Return ascending rows as a slice if none is missing: numpy is many times faster with slices."""
    return slice(rows[0], rows[-1] + 1) if rows and rows[-1] - rows[0] + 1 == len(rows) else rows


def _alike(columns: list[Column]) -> bool:
    first = columns[0]
    return all(
        c.type is first.type and c.values.dtype == first.values.dtype and c.values.shape[1:] == first.values.shape[1:]
        for c in columns
    )


def _place_mixed(key: str, rows: list[int], values: list[Any], size: int) -> Any:
    """Place values of several types in an array of the dtype that holds all of them, or of objects."""
    if key != "final_obs":
        if all(type(v) in _NUMBERS or isinstance(v, np.number) for v in values):
            try:
                return _place(rows, values, size, np.result_type(*{np.dtype(type(v)) for v in values}))
            except OverflowError:
                pass
        elif all(isinstance(v, np.ndarray) and v.shape == values[0].shape for v in values):
            try:
                return _place(rows, values, size, np.result_type(*{v.dtype for v in values}))
            except TypeError:  # dates and numbers, for example, have no common dtype
                pass
    out = np.full(size, None, dtype=object)
    for row, value in zip(rows, values, strict=True):
        out[row] = value
    return out


def _place(rows: list[int], values: list[Any], size: int, dtype: np.dtype[Any]) -> Any:
    out = np.zeros((size, *np.shape(values[0])), dtype=dtype)
    for row, value in zip(rows, values, strict=True):
        out[row] = value
    return out


def _values(column: Column) -> list[Any]:
    """Return each value as the environment returned it."""
    if column.kind == "dict":
        return [_row_of(column.values, row) for row in column.rows]
    if column.kind == "number":
        return [column.type(value) for value in column.values]
    return list(column.values)


def _row_of(columns: Columns, row: int) -> dict[str, Any]:
    return {key: _values(column)[column.rows.index(row)] for key, column in columns.items() if row in column.rows}


def select(columns: Columns, rows: dict[int, int]) -> Columns:
    """Keep the rows that are keys of `rows`, renamed to its values."""
    kept: Columns = {}
    for key, column in columns.items():
        places = [i for i, row in enumerate(column.rows) if row in rows]
        if not places:
            continue
        names = [rows[column.rows[i]] for i in places]
        if column.kind == "dict":
            inner = select(column.values, rows)
            kept[key] = Column(names, inner, "dict")
        elif column.kind == "object":
            # The values that are left may be of one kind.
            kept[key] = _column(key, names, [column.values[i] for i in places])
        else:
            kept[key] = Column(names, column.values[places], column.kind, column.type)
    return kept
