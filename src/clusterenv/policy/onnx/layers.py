"""ONNX counterparts of torch's layers and reductions; see `operators.py` for the form of a converter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from clusterenv.policy.onnx.convert import Converter, numpy_dtype
from clusterenv.policy.onnx.errors import NotExportable
from clusterenv.policy.onnx.operators import ELEMENTWISE, MOVING, Outputs, axis_of
from clusterenv.policy.onnx.trace import Rows, Value

__all__ = ["KEEP", "TABLE"]

KEEP = frozenset(("linear", "one_hot", "scaled_dot_product_attention", "square", "relu6"))
"""Composite operators with a converter."""


# -- matrix products ------------------------------------------------------------------------------------------


def _linear(c: Converter, out: Outputs, x: Value, weight: Value, bias: Value | None = None) -> str:
    more = [] if bias is None else [c.name(bias)]
    if len(x.shape) == 2:
        return c.node("Gemm", c.name(x), c.name(weight), *more, transB=1)
    flat = c.node("Reshape", c.name(x), c.numbers([-1, _static(weight.shape[1])]))
    return c.reshape(c.node("Gemm", flat, c.name(weight), *more, transB=1), out[0].shape)


def _addmm(c: Converter, out: Outputs, bias: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1) -> str:
    return c.node("Gemm", c.name(a), c.name(b), c.name(bias), alpha=float(alpha), beta=float(beta))


def _baddbmm(c: Converter, out: Outputs, bias: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1) -> str:
    dtype = out[0].dtype
    product = c.node("MatMul", c.name(a), c.name(b))
    product = product if alpha == 1 else c.node("Mul", product, c.operand(alpha, dtype))
    if beta == 0:
        return product
    more = c.name(bias) if beta == 1 else c.node("Mul", c.name(bias), c.operand(beta, dtype))
    return c.node("Add", product, more)


def _product(c: Converter, out: Outputs, a: Value, b: Value) -> str:
    return c.node("MatMul", c.name(a), c.name(b))


def _attention(
    c: Converter,
    out: Outputs,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    if dropout or is_causal or enable_gqa:
        raise NotExportable("attention with dropout, a causal mask or groups is not computed here")
    dtype, rank = query.dtype, len(key.shape)
    order = [*range(rank - 2), rank - 1, rank - 2]
    factor = _static(query.shape[-1]) ** -0.5 if scale is None else scale
    scores = c.node("MatMul", c.name(query), c.node("Transpose", c.name(key), perm=order))
    scores = c.node("Mul", scores, c.operand(factor, dtype))
    if mask is not None and mask.dtype == torch.bool:
        scores = c.node("Where", c.name(mask), scores, c.operand(float("-inf"), dtype))
    elif mask is not None:
        scores = c.node("Add", scores, c.name(mask))
    return c.node("MatMul", c.node("Softmax", scores, axis=-1), c.name(value))


# -- convolution and pooling ----------------------------------------------------------------------------------


def _convolution(
    c: Converter,
    out: Outputs,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> str:
    names = [c.name(x), c.name(weight), *([] if bias is None else [c.name(bias)])]
    attributes = {"strides": stride, "pads": [*padding, *padding], "dilations": dilation, "group": groups}
    if transposed:
        return c.node("ConvTranspose", *names, **attributes, output_padding=output_padding)
    return c.node("Conv", *names, **attributes)


def _each(values: Any, count: int) -> list[int]:
    return list(values) * count if len(values) == 1 else list(values)


def _pool(c: Converter, op: str, x: Value, kernel: list[int], stride: Any, padding: Any, **attributes: Any) -> str:
    count = len(kernel)
    if len(x.shape) != count + 2:
        raise NotExportable("pooling without an axis of rows is not computed here")
    pads = _each(padding, count)
    strides = _each(stride, count) if stride else kernel
    return c.node(op, c.name(x), kernel_shape=kernel, strides=strides, pads=[*pads, *pads], **attributes)


def _max_pool(dims: int) -> Callable[..., Any]:
    def convert(
        c: Converter,
        out: Outputs,
        x: Value,
        kernel: Any,
        stride: Any = (),
        padding: Any = (0,),
        dilation: Any = (1,),
        ceil_mode: bool = False,
    ) -> list[str]:
        kernel = _each(kernel, dims)
        return [
            _pool(c, "MaxPool", x, kernel, stride, padding, dilations=_each(dilation, dims), ceil_mode=int(ceil_mode))
        ]

    return convert


def _avg_pool(dims: int) -> Callable[..., Any]:
    def convert(
        c: Converter,
        out: Outputs,
        x: Value,
        kernel: Any,
        stride: Any = (),
        padding: Any = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> str:
        if divisor_override is not None or ceil_mode:
            raise NotExportable("this kind of average pooling is not computed here")
        return _pool(
            c, "AveragePool", x, _each(kernel, dims), stride, padding, count_include_pad=int(count_include_pad)
        )

    return convert


def _adaptive_avg_pool(c: Converter, out: Outputs, x: Value, sizes: list[int]) -> str:
    given = [_static(size) for size in x.shape[-len(sizes) :]]
    if any(size % wanted for size, wanted in zip(given, sizes, strict=True)):
        raise NotExportable("adaptive pooling to sizes that do not divide the input's is not computed here")
    return _pool(c, "AveragePool", x, [size // wanted for size, wanted in zip(given, sizes, strict=True)], (), (0,))


# -- normalisation --------------------------------------------------------------------------------------------


def _or_constant(c: Converter, value: Value | None, like: Value, shape: Sequence[Any], fill: float) -> str:
    sizes = [_static(size) for size in shape]
    return c.name(value) if value is not None else c.constant(np.full(sizes, fill), numpy_dtype(like.dtype))


def _layer_norm(
    c: Converter, out: Outputs, x: Value, shape: list[int], weight: Value | None, bias: Value | None, eps: float
) -> list[str]:
    scale = _or_constant(c, weight, x, shape, 1.0)
    shift = _or_constant(c, bias, x, shape, 0.0)
    return [c.node("LayerNormalization", c.name(x), scale, shift, axis=-len(shape), epsilon=float(eps))]


def _batch_norm(
    c: Converter,
    out: Outputs,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> list[str]:
    if training or mean is None or variance is None:
        raise NotExportable("batch normalisation by the batch itself would depend on the other rows")
    channels = [x.shape[1]]
    scale = _or_constant(c, weight, x, channels, 1.0)
    shift = _or_constant(c, bias, x, channels, 0.0)
    return [c.node("BatchNormalization", c.name(x), scale, shift, c.name(mean), c.name(variance), epsilon=float(eps))]


def _group_norm(
    c: Converter,
    out: Outputs,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    rows: Any,
    channels: int,
    size: Any,
    groups: int,
    eps: float,
) -> list[str]:
    dtype = numpy_dtype(x.dtype)
    parts = c.node("Reshape", c.name(x), c.numbers([0, groups, -1]))
    ones, zeros = c.constant(np.ones(groups), dtype), c.constant(np.zeros(groups), dtype)
    y = c.node("InstanceNormalization", parts, ones, zeros, epsilon=float(eps))
    y = c.reshape(y, x.shape)
    column = [channels, *[1] * (len(x.shape) - 2)]
    for op, value in (("Mul", weight), ("Add", bias)):
        if value is not None:
            y = c.node(op, y, c.reshape(c.name(value), column))
    return [y]


# -- reductions -----------------------------------------------------------------------------------------------


def _reduce(op: str) -> Callable[..., str]:
    def convert(c: Converter, out: Outputs, x: Value, axes: Any = None, keep: bool = False, *rest: Any) -> str:
        return _reduced(c, op, c.cast(x, out[0].dtype), axes, keep)

    return convert


def _reduced(c: Converter, op: str, name: str, axes: Any, keep: bool) -> str:
    if isinstance(axes, int):
        axes = [axes]
    more = [c.numbers(axes)] if axes else []
    return c.node(op, name, *more, keepdims=int(keep))


def _reduce_all(op: str) -> Callable[..., str]:
    return lambda c, out, x, *rest: _reduced(c, op, c.cast(x, out[0].dtype), None, False)


def _best(reduce: str, argument: str) -> Callable[..., list[str]]:
    def convert(c: Converter, out: Outputs, x: Value, axis: int, keep: bool = False) -> list[str]:
        where = c.node(argument, c.name(x), axis=axis_of(x, axis), keepdims=int(keep))
        return [_reduced(c, reduce, c.name(x), axis, keep), where]

    return convert


def _argument(op: str) -> Callable[..., str]:
    def convert(c: Converter, out: Outputs, x: Value, axis: int | None = None, keep: bool = False) -> str:
        if axis is None:
            raise NotExportable("an index among all rows depends on the other rows")
        return c.node(op, c.name(x), axis=axis_of(x, axis), keepdims=int(keep))

    return convert


def _variance(is_root: bool) -> Callable[..., str]:
    def convert(
        c: Converter, out: Outputs, x: Value, axes: Any = None, correction: Any = None, keep: bool = False
    ) -> str:
        axes = list(range(len(x.shape))) if not axes else [axis_of(x, axis) for axis in axes]
        count = int(np.prod([_static(x.shape[axis]) for axis in axes]))
        mean = c.node("ReduceMean", c.name(x), c.numbers(axes), keepdims=1)
        off = c.node("Sub", c.name(x), mean)
        total = c.node("ReduceSum", c.node("Mul", off, off), c.numbers(axes), keepdims=int(keep))
        found = c.node("Div", total, c.operand(count - (1 if correction is None else correction), x.dtype))
        return c.node("Sqrt", found) if is_root else found

    return convert


def _vector_norm(
    c: Converter, out: Outputs, x: Value, order: Any = 2, axes: Any = None, keep: bool = False, dtype: Any = None
) -> str:
    ops = {1: "ReduceL1", 2: "ReduceL2"}
    if order not in ops:
        raise NotExportable(f"the norm of order {order} is not computed here")
    return _reduced(c, ops[order], c.cast(x, out[0].dtype), axes, keep)


def _static(size: Any) -> int:
    if isinstance(size, Rows):
        raise NotExportable("it mixes rows: a result depends on their number")
    return int(size)


LAYERS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), _product),
    "scaled_dot_product_attention": _attention,
    "convolution": _convolution,
    "max_pool1d": _max_pool(1),
    "max_pool2d_with_indices": _max_pool(2),
    "avg_pool1d": _avg_pool(1),
    "avg_pool2d": _avg_pool(2),
    "_adaptive_avg_pool2d": _adaptive_avg_pool,
    "native_layer_norm": _layer_norm,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": lambda c, out, x, w, b, mean, var, momentum, eps: _batch_norm(
        c, out, x, w, b, mean, var, False, momentum, eps
    ),
    "native_group_norm": _group_norm,
    "_prelu_kernel": lambda c, out, x, slope: c.node("PRelu", c.name(x), c.name(slope)),
    "sum.dim_IntList": _reduce("ReduceSum"),
    "sum.default": _reduce_all("ReduceSum"),
    "mean.dim": _reduce("ReduceMean"),
    "mean.default": _reduce_all("ReduceMean"),
    "amax": _reduce("ReduceMax"),
    "amin": _reduce("ReduceMin"),
    "logsumexp": _reduce("ReduceLogSumExp"),
    "max.dim": _best("ReduceMax", "ArgMax"),
    "min.dim": _best("ReduceMin", "ArgMin"),
    "argmax": _argument("ArgMax"),
    "argmin": _argument("ArgMin"),
    "var.correction": _variance(False),
    "std.correction": _variance(True),
    "linalg_vector_norm": _vector_norm,
    "cumsum": lambda c, out, x, axis, dtype=None: c.node("CumSum", c.cast(x, out[0].dtype), c.constant(axis, np.int64)),
    "_softmax": lambda c, out, x, axis, *rest: c.node("Softmax", c.cast(x, out[0].dtype), axis=axis_of(x, axis)),
    "_log_softmax": lambda c, out, x, axis, *rest: c.node("LogSoftmax", c.cast(x, out[0].dtype), axis=axis_of(x, axis)),
}

TABLE = ELEMENTWISE | MOVING | LAYERS
