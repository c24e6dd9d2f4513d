"""ONNX counterparts of torch's elementwise operators, and of those that move values without computing.

Each converter takes the `Converter`, the operator's outputs and its arguments in the order of its schema, and returns
the names of the results. Layers and reductions are in `layers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from clusterenv.policy.onnx.convert import Converter
from clusterenv.policy.onnx.errors import NotExportable
from clusterenv.policy.onnx.trace import Rows, Value

__all__ = ["ELEMENTWISE", "MOVING", "axis_of"]

Outputs = Sequence[Any]
_LAST = np.iinfo(np.int64).max


def axis_of(value: Value, axis: int) -> int:
    return axis % max(1, len(value.shape))


# -- one value in, one out ------------------------------------------------------------------------------------


def _unary(op: str, **attributes: Any) -> Callable[..., str]:
    def convert(c: Converter, out: Outputs, x: Value, *rest: Any) -> str:
        return c.node(op, c.cast(x, out[0].dtype), **attributes)

    return convert


def _formula(write: Callable[..., str]) -> Callable[..., str]:
    """Make a converter of a formula over the input, in the output's dtype: `write(f, x, *arguments)`."""

    def convert(c: Converter, out: Outputs, x: Value, *arguments: Any) -> str:
        return write(_Formula(c, out[0].dtype), c.cast(x, out[0].dtype), *arguments)

    return convert


class _Formula:
    def __init__(self, converter: Converter, dtype: torch.dtype) -> None:
        self._c, self._dtype = converter, dtype

    def __call__(self, op: str, *operands: Any, **attributes: Any) -> str:
        names = [operand if isinstance(operand, str) else self._c.operand(operand, self._dtype) for operand in operands]
        return self._c.node(op, *names, **attributes)


def _elu(f: _Formula, x: str, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> str:
    x = x if input_scale == 1 else f("Mul", x, input_scale)
    y = f("Elu", x, alpha=float(alpha))
    return y if scale == 1 else f("Mul", y, scale)


def _gelu(f: _Formula, x: str, approximate: str = "none") -> str:
    if approximate == "tanh":
        cube = f("Mul", f("Mul", x, x), x)
        inner = f("Mul", f("Add", x, f("Mul", cube, 0.044715)), math.sqrt(2 / math.pi))
        return f("Mul", f("Mul", x, 0.5), f("Add", f("Tanh", inner), 1.0))
    return f("Mul", f("Mul", x, 0.5), f("Add", f("Erf", f("Mul", x, math.sqrt(0.5))), 1.0))


def _softplus(f: _Formula, x: str, beta: float = 1.0, threshold: float = 20.0) -> str:
    scaled = x if beta == 1 else f("Mul", x, beta)
    y = f("Softplus", scaled)
    y = y if beta == 1 else f("Div", y, beta)
    return y if threshold >= 15 else f("Where", f("Greater", scaled, float(threshold)), x, y)


def _clip(f: _Formula, x: str, low: Any = None, high: Any = None) -> str:
    x = x if low is None else f("Max", x, low)
    return x if high is None else f("Min", x, high)


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{
        op.lower(): _unary(op)
        for op in (
            *("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "Log", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid"),
            *("Sign", "Sin", "Sqrt", "Tanh"),
        )
    },
    "logical_not": lambda c, out, x: c.node("Not", c.cast(x, torch.bool)),
    "bitwise_not": lambda c, out, x: c.node("Not", _only_bool(c, x)),
    "celu": _formula(lambda f, x, alpha=1.0: f("Celu", x, alpha=float(alpha))),
    "clamp": _formula(_clip),
    "clamp_max": _formula(lambda f, x, high: f("Min", x, high)),
    "clamp_min": _formula(lambda f, x, low: f("Max", x, low)),
    "elu": _formula(_elu),
    "expm1": _formula(lambda f, x: f("Sub", f("Exp", x), 1.0)),
    "gelu": _formula(_gelu),
    "hardsigmoid": _formula(lambda f, x: f("HardSigmoid", x, alpha=1 / 6, beta=0.5)),
    "hardswish": _formula(lambda f, x: f("Mul", x, f("HardSigmoid", x, alpha=1 / 6, beta=0.5))),
    "hardtanh": _formula(lambda f, x, low=-1.0, high=1.0: _clip(f, x, low, high)),
    "leaky_relu": _formula(lambda f, x, slope=0.01: f("LeakyRelu", x, alpha=float(slope))),
    "log1p": _formula(lambda f, x: f("Log", f("Add", x, 1.0))),
    "log_sigmoid_forward": _formula(lambda f, x: f("Neg", f("Softplus", f("Neg", x)))),
    "mish": _formula(lambda f, x: f("Mul", x, f("Tanh", f("Softplus", x)))),
    "relu6": _formula(lambda f, x: _clip(f, x, 0.0, 6.0)),
    "rsqrt": _formula(lambda f, x: f("Reciprocal", f("Sqrt", x))),
    "silu": _formula(lambda f, x: f("Mul", x, f("Sigmoid", x))),
    "softplus": _formula(_softplus),
    "square": _formula(lambda f, x: f("Mul", x, x)),
    "threshold": _formula(lambda f, x, at, other: f("Where", f("Greater", x, at), x, other)),
}


def _only_bool(c: Converter, x: Value) -> str:
    if x.dtype != torch.bool:
        raise NotExportable("bits of integers are not computed here")
    return c.name(x)


# -- two values in, one out -----------------------------------------------------------------------------------


def _arithmetic(op: str) -> Callable[..., str]:
    def convert(c: Converter, out: Outputs, a: Any, b: Any, alpha: Any = 1) -> str:
        dtype = out[0].dtype
        second = c.operand(b, dtype)
        if alpha != 1:
            second = c.node("Mul", second, c.operand(alpha, dtype))
        return c.node(op, c.operand(a, dtype), second)

    return convert


def _plain(op: str) -> Callable[..., str]:
    return lambda c, out, a, b: c.node(op, c.operand(a, out[0].dtype), c.operand(b, out[0].dtype))


def _div(c: Converter, out: Outputs, a: Any, b: Any, rounding_mode: str | None = None) -> str:
    dtype = out[0].dtype
    quotient = c.node("Div", c.operand(a, dtype), c.operand(b, dtype))
    if rounding_mode is None:
        return quotient
    if rounding_mode != "floor" or not dtype.is_floating_point:
        raise NotExportable(f"division with rounding_mode={rounding_mode!r} of {dtype} is not computed here")
    return c.node("Floor", quotient)


def _pow(c: Converter, out: Outputs, base: Any, exponent: Any) -> str:
    dtype = out[0].dtype
    x = c.operand(base, dtype)
    return c.node("Mul", x, x) if exponent == 2 else c.node("Pow", x, c.operand(exponent, dtype))


def _compare(op: str, negated: bool = False) -> Callable[..., str]:
    def convert(c: Converter, out: Outputs, a: Value, b: Any) -> str:
        dtype = _common(a, b)
        found = c.node(op, c.cast(a, dtype), c.operand(b, dtype))
        return c.node("Not", found) if negated else found

    return convert


def _common(a: Value, b: Any) -> torch.dtype:
    """Return the dtype in which torch compares these."""
    if isinstance(b, Value):
        return torch.result_type(
            torch.empty([1] * len(a.shape), dtype=a.dtype), torch.empty([1] * len(b.shape), dtype=b.dtype)
        )
    return torch.result_type(torch.empty(1, dtype=a.dtype), 1 if isinstance(b, Rows) else b)


def _logical(op: str) -> Callable[..., str]:
    return lambda c, out, a, b: c.node(op, c.operand(a, torch.bool), c.operand(b, torch.bool))


def _bitwise(op: str) -> Callable[..., str]:
    return lambda c, out, a, b: c.node(op, _only_bool(c, a), _only_bool(c, b))


def _where(c: Converter, out: Outputs, condition: Value, a: Any, b: Any) -> str:
    dtype = out[0].dtype
    return c.node("Where", c.cast(condition, torch.bool), c.operand(a, dtype), c.operand(b, dtype))


ELEMENTWISE |= {
    "add": _arithmetic("Add"),
    "sub": _arithmetic("Sub"),
    "rsub": lambda c, out, a, b, alpha=1: _arithmetic("Sub")(c, out, b, a, alpha),
    "mul": _plain("Mul"),
    "div": _div,
    "pow": _pow,
    "maximum": _plain("Max"),
    "minimum": _plain("Min"),
    "max.other": _plain("Max"),
    "min.other": _plain("Min"),
    "eq": _compare("Equal"),
    "ne": _compare("Equal", negated=True),
    "lt": _compare("Less"),
    "le": _compare("LessOrEqual"),
    "gt": _compare("Greater"),
    "ge": _compare("GreaterOrEqual"),
    "logical_and": _logical("And"),
    "logical_or": _logical("Or"),
    "logical_xor": _logical("Xor"),
    "bitwise_and": _bitwise("And"),
    "bitwise_or": _bitwise("Or"),
    "where": _where,
    "masked_fill": lambda c, out, x, mask, value: _where(c, out, mask, value, x),
    "addcmul": lambda c, out, x, a, b, value=1: _addcmul(c, out, x, a, b, value, "Mul"),
    "addcdiv": lambda c, out, x, a, b, value=1: _addcmul(c, out, x, a, b, value, "Div"),
    "lerp": lambda c, out, a, b, weight: _lerp(c, out, a, b, weight),
}


def _addcmul(c: Converter, out: Outputs, x: Value, a: Value, b: Value, value: Any, op: str) -> str:
    f = _Formula(c, out[0].dtype)
    product = f(op, a, b)
    return f("Add", x, product if value == 1 else f("Mul", product, value))


def _lerp(c: Converter, out: Outputs, a: Value, b: Value, weight: Any) -> str:
    f = _Formula(c, out[0].dtype)
    return f("Add", a, f("Mul", weight, f("Sub", b, a)))


# -- moving values --------------------------------------------------------------------------------------------


def _same(c: Converter, out: Outputs, x: Value, *rest: Any) -> str:
    return c.cast(x, out[0].dtype)


def _reshape(c: Converter, out: Outputs, x: Value, *rest: Any) -> str:
    return c.reshape(c.name(x), out[0].shape)


def _fill(value: Any) -> Callable[..., str]:
    return lambda c, out, *rest: c.expand(c.operand(value, out[0].dtype), out[0].shape)


def _fill_with(position: int) -> Callable[..., str]:
    def convert(c: Converter, out: Outputs, *arguments: Any) -> str:
        return c.expand(c.operand(arguments[position], out[0].dtype), out[0].shape)

    return convert


def _arange(first: int) -> Callable[..., str]:
    """`first`: how many of start and step precede the end: 0, 1 (start) or 2 (start, and step after the end)."""

    def convert(c: Converter, out: Outputs, *arguments: Any) -> str:
        start, end, step = (0, arguments[0], 1) if not first else (*arguments[:2], 1 if first == 1 else arguments[2])
        dtype = out[0].dtype
        return c.node("Range", c.operand(start, dtype), c.operand(end, dtype), c.operand(step, dtype))

    return convert


def _transpose(c: Converter, out: Outputs, x: Value, *axes: int) -> str:
    order = list(range(len(x.shape)))
    a, b = [axis_of(x, axis) for axis in axes] if axes else (0, len(order) - 1)
    if len(order) < 2:
        return c.name(x)
    order[a], order[b] = order[b], order[a]
    return c.node("Transpose", c.name(x), perm=order)


def _permute(c: Converter, out: Outputs, x: Value, axes: list[int]) -> str:
    return c.node("Transpose", c.name(x), perm=[axis_of(x, axis) for axis in axes])


def _select(c: Converter, out: Outputs, x: Value, axis: int, index: Any) -> str:
    where = c.node("Squeeze", c.sizes([index])) if isinstance(index, Rows) else c.constant(index, np.int64)
    return c.node("Gather", c.name(x), where, axis=axis_of(x, axis))


def _slice(
    c: Converter, out: Outputs, x: Value, axis: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> str:
    start, end = start or 0, _LAST if end is None else end
    if start == 0 and end == _LAST and step == 1:
        return c.name(x)
    bounds = [c.sizes([start]), c.sizes([end])]
    return c.node("Slice", c.name(x), *bounds, c.numbers([axis_of(x, axis)]), c.numbers([step]))


def _split(c: Converter, out: Outputs, x: Value, sizes: Any, axis: int = 0) -> list[str]:
    axis = axis_of(x, axis)
    if len(out) == 1:
        return [c.name(x)]
    lengths = c.sizes([part.shape[axis] for part in out])
    return c.graph.node("Split", [c.name(x), lengths], len(out), axis=axis)


def _unbind(c: Converter, out: Outputs, x: Value, axis: int = 0) -> list[str]:
    axis = axis_of(x, axis)
    return [c.node("Gather", c.name(x), c.constant(i, np.int64), axis=axis) for i in range(len(out))]


def _cat(c: Converter, out: Outputs, parts: list[Value], axis: int = 0) -> str:
    rank = len(out[0].shape)
    names = [c.cast(part, out[0].dtype) for part in parts if len(part.shape) == rank]
    return names[0] if len(names) == 1 else c.node("Concat", *names, axis=axis % rank)


def _stack(c: Converter, out: Outputs, parts: list[Value], axis: int = 0) -> str:
    where = axis % len(out[0].shape)
    names = [c.node("Unsqueeze", c.cast(part, out[0].dtype), c.numbers([where])) for part in parts]
    return names[0] if len(names) == 1 else c.node("Concat", *names, axis=where)


def _repeat(c: Converter, out: Outputs, x: Value, repeats: list[Any]) -> str:
    missing = len(repeats) - len(x.shape)
    name = c.name(x) if not missing else c.reshape(c.name(x), [1] * missing + list(x.shape))
    return c.node("Tile", name, c.sizes(repeats))


def _index(c: Converter, out: Outputs, x: Value, indices: list[Any]) -> str:
    used = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(index.dtype == torch.bool for _, index in used):
        raise NotExportable("it selects by a mask, so that a result's size depends on values")
    if len(used) == 1:
        axis, index = used[0]
        return c.node("Gather", c.name(x), c.cast(index, torch.int64), axis=axis)
    if [axis for axis, _ in used] != list(range(len(used))) or len({index.shape for _, index in used}) != 1:
        raise NotExportable("it selects by several index tensors")
    parts = [c.node("Unsqueeze", c.cast(index, torch.int64), c.numbers([-1])) for _, index in used]
    return c.node("GatherND", c.name(x), c.node("Concat", *parts, axis=-1))


def _one_hot(c: Converter, out: Outputs, x: Value, classes: int = -1) -> str:
    if classes < 0:
        raise NotExportable("one_hot without a number of classes depends on values")
    wide = c.node("Unsqueeze", c.name(x), c.numbers([-1]))
    return c.node("Cast", c.node("Equal", wide, c.constant(np.arange(classes), np.int64)), to=7)


def _pad(c: Converter, out: Outputs, x: Value, pad: list[int], value: Any = 0) -> str:
    rank = len(x.shape)
    before, after = [0] * rank, [0] * rank
    for i in range(len(pad) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    return c.node("Pad", c.name(x), c.numbers(before + after), c.operand(value, x.dtype))


MOVING: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("_to_copy", "alias", "clone", "detach", "lift_fresh", "lift_fresh_copy"), _same),
    **dict.fromkeys(("_unsafe_view", "_reshape_alias", "view", "squeeze", "unsqueeze"), _reshape),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), _fill(0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _fill(1)),
    **dict.fromkeys(("full", "full_like", "fill"), _fill_with(1)),
    "new_full": _fill_with(2),
    "scalar_tensor": _fill_with(0),
    "copy": lambda c, out, x, source, *rest: c.expand(c.cast(source, out[0].dtype), out[0].shape),
    "arange.default": _arange(0),
    "arange.start": _arange(1),
    "arange.start_step": _arange(2),
    "cat": _cat,
    "constant_pad_nd": _pad,
    "embedding": lambda c, out, weight, indices, *rest: c.node("Gather", c.name(weight), c.name(indices), axis=0),
    "expand": lambda c, out, x, *rest: c.expand(c.name(x), out[0].shape),
    "gather": lambda c, out, x, axis, index, *rest: c.node(
        "GatherElements", c.name(x), c.cast(index, torch.int64), axis=axis_of(x, axis)
    ),
    "index": _index,
    "index_select": lambda c, out, x, axis, index: c.node("Gather", c.name(x), c.name(index), axis=axis_of(x, axis)),
    "one_hot": _one_hot,
    "permute": _permute,
    "repeat": _repeat,
    "select": _select,
    "slice": _slice,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), _split),
    "stack": _stack,
    **dict.fromkeys(("t", "transpose"), _transpose),
    "unbind": _unbind,
}
