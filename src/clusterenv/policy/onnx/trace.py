"""Record what a torch function does, as a list of operators that no longer depends on the number of rows.

The function runs twice, on batches of different sizes, under a dispatch mode that notes every operator. Numbers that
differ between the two recordings must be linear in the number of rows. What a function does with values that it reads
in Python cannot be recorded, so reading them is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from clusterenv.policy.onnx.errors import NotExportable

__all__ = ["Recording", "Rows", "Step", "Value", "record"]


class Rows(NamedTuple):
    """A number that depends on the number of rows: `per_row * rows + plus`."""

    per_row: int
    plus: int


class Value:
    """A tensor of the recording."""

    def __init__(self, number: int, shape: tuple[int | Rows, ...], dtype: torch.dtype) -> None:
        self.number, self.shape, self.dtype = number, shape, dtype


class Step(NamedTuple):
    """One operator; arguments in the order of its schema, with a `Value` for each tensor."""

    operator: str
    """`name.overload`, without the underscore of operators that work in place"""
    arguments: list[Any]
    outputs: list[Value | None]


class Recording(NamedTuple):
    steps: list[Step]
    given: list[Value]
    """The tensors that were passed in."""
    outputs: list[Value]
    constants: dict[int, Any]
    """By value number: tensors that were neither passed in nor computed."""


class _Raw(NamedTuple):
    operator: str
    arguments: list[Any]
    outputs: list[int | None]


class _Ref(NamedTuple):
    """Stands for a tensor in the arguments of one recording."""

    number: int


_READS = ("_local_scalar_dense", "equal")
"""Operators whose results are not tensors, but depend on tensors' values."""

_QUIET_READS = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__)
"""Methods that read values without an operator."""


def record(function: Callable[..., Sequence[Any]], batches: Sequence[Sequence[Any]], keep: frozenset[str]) -> Recording:
    """Record `function(*tensors) -> tensors` for two batches of different sizes. The first tensor's length counts rows.

    `keep`: composite operators that are recorded as such; others are recorded as what they consist of.
    """
    first, second = (_run(function, tensors, keep) for tensors in batches)
    merge = _Merge(len(batches[0][0]), len(batches[1][0]))
    if [raw.operator for raw in first.steps] != [raw.operator for raw in second.steps]:
        raise NotExportable("it takes other paths for another number of rows")
    values = [
        Value(number, merge(tuple(a.shape), tuple(b.shape)), a.dtype)
        for number, (a, b) in enumerate(zip(first.tensors, second.tensors, strict=True))
    ]
    steps = []
    for a, b in zip(first.steps, second.steps, strict=True):
        arguments = _replace(merge(a.arguments, b.arguments), values)
        if a.outputs != b.outputs:
            raise NotExportable("it takes other paths for another number of rows")
        steps.append(Step(a.operator, arguments, [None if n is None else values[n] for n in a.outputs]))
    for number, tensor in first.constants.items():
        other = second.constants[number]
        if tensor.shape != other.shape or not torch.equal(tensor, other):
            raise NotExportable("a tensor that it makes in Python depends on the observations or on their number")
    constants = {number: tensor.numpy() for number, tensor in first.constants.items()}
    given = values[: len(batches[0])]
    return Recording(steps, given, [values[n] for n in first.outputs], constants)


def _run(function: Callable[..., Sequence[Any]], tensors: Sequence[Any], keep: frozenset[str]) -> _Recorder:
    recorder = _Recorder(tensors, keep)
    with torch.inference_mode(), _plain_torch(), _Reads(recorder), recorder:
        outputs = function(*tensors)
    recorder.outputs = [recorder.number(tensor) for tensor in outputs]
    return recorder


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """Turn off what would run as one opaque operator, or read values to check them; keep torch's random state."""
    distribution = torch.distributions.Distribution
    checked, fast = distribution._validate_args, torch.backends.mha.get_fastpath_enabled()
    mkldnn = torch._C._get_mkldnn_enabled()
    random = torch.get_rng_state()
    try:
        distribution.set_default_validate_args(False)
        torch.backends.mha.set_fastpath_enabled(False)
        torch._C._set_mkldnn_enabled(False)
        yield
    finally:
        distribution.set_default_validate_args(checked)
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(mkldnn)
        torch.set_rng_state(random)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tensors: Sequence[Any], keep: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Raw] = []
        self.tensors: list[Any] = []  # by number; kept, so that no id is used twice
        self.constants: dict[int, Any] = {}
        self.outputs: list[int] = []
        self._numbers: dict[int, int] = {}  # by id
        self._varying: set[int] = set()  # numbers of values that depend on what was passed in
        self._stale: set[int] = set()  # ids of tensors that were changed through another one
        self._given = len(tensors)
        self._keep = keep
        for tensor in tensors:
            if id(tensor) not in self._numbers:
                self._add(tensor)
            else:  # parts of a module that share their weights
                self.tensors.append(tensor)
        self._varying.update(range(len(tensors)))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler for this, for two seconds

    def number(self, tensor: Any) -> int:
        """Return the number of a tensor; one that is not known is a constant."""
        if id(tensor) in self._stale:
            raise NotExportable("it changes a tensor in place and uses another view of it")
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        for given in self.tensors[: self._given]:
            if _is_same(given, tensor):  # `.data` of a weight is a new tensor
                return self._numbers[id(given)]
        self.constants[len(self.tensors)] = tensor.detach().clone()
        return self._add(tensor)

    def varies(self, tensor: Any) -> bool:
        """Return whether a tensor depends on what was passed in."""
        return self._numbers.get(id(tensor)) in self._varying

    def _add(self, tensor: Any) -> int:
        self._numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        implicit = torch._C.DispatchKey.CompositeImplicitAutograd
        if name not in self._keep and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit):
            with self:
                return func._op_dk(implicit, *args, **kwargs)
        arguments = [self._argument(value) for value in _positional(func, args, kwargs)]
        varies = any(number in self._varying for number in _numbers(arguments))
        if name in _READS and varies:
            raise NotExportable("it reads the value of a tensor in Python")
        result = func(*args, **kwargs)
        written = [
            value
            for argument, value in zip(func._schema.arguments, _positional(func, args, kwargs), strict=True)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor)
        ]
        for tensor in written:
            self._forget(tensor)
        outputs = [
            self._add(tensor) if isinstance(tensor, torch.Tensor) else None
            for tensor in (result if isinstance(result, (tuple, list)) else [result])
        ]
        if varies:
            self._varying.update(number for number in outputs if number is not None)
        overload = func._overloadname
        self.steps.append(_Raw(f"{name.rstrip('_') if written else name}.{overload}", arguments, outputs))
        return result

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _Ref(self.number(value))
        if isinstance(value, (list, tuple)):
            return [self._argument(item) for item in value]
        return value

    def _forget(self, tensor: Any) -> None:
        """A tensor is about to be changed in place: other tensors that share its memory must not be used any more."""
        if self._numbers.get(id(tensor), self._given) < self._given:
            raise NotExportable("it changes its weights or observations in place")
        storage = tensor.untyped_storage().data_ptr()
        for other in self.tensors:
            if other is not tensor and other.untyped_storage().data_ptr() == storage and _overlap(other, tensor):
                if self._numbers[id(other)] < self._given:
                    raise NotExportable("it changes its weights or observations in place")
                self._stale.add(id(other))


class _Reads(TorchFunctionMode):
    """Refuses methods that read values of tensors without an operator."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUIET_READS and self._recorder.varies(args[0]):
            raise NotExportable("it reads the value of a tensor in Python")
        return func(*args, **(kwargs or {}))


def _is_same(a: Any, b: Any) -> bool:
    is_there = a.data_ptr() == b.data_ptr() and b.numel() > 0
    return is_there and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def _overlap(a: Any, b: Any) -> bool:
    return bool(np.shares_memory(a.detach().numpy(), b.detach().numpy()))


def _positional(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of an operator in the order of its schema, with defaults."""
    schema = func._schema.arguments
    missing = schema[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in missing)]


def _numbers(arguments: Any) -> Iterator[int]:
    for value in arguments:
        if isinstance(value, _Ref):
            yield value.number
        elif isinstance(value, list):
            yield from _numbers(value)


def _replace(arguments: Any, values: list[Value]) -> Any:
    return [
        values[item.number] if isinstance(item, _Ref) else _replace(item, values) if isinstance(item, list) else item
        for item in arguments
    ]


class _Merge:
    """Merges the arguments of the same operator in two recordings."""

    def __init__(self, rows: int, other_rows: int) -> None:
        self._rows, self._other_rows = rows, other_rows

    def __call__(self, a: Any, b: Any) -> Any:
        if type(a) is not type(b):
            raise NotExportable("it takes other paths for another number of rows")
        if isinstance(a, (_Ref, str, bool)) or a is None:
            same = a == b
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                raise NotExportable("it takes other paths for another number of rows")
            return type(a)(self(x, y) for x, y in zip(a, b, strict=True))
        elif isinstance(a, int):
            if a == b:
                return a
            per_row, rest = divmod(b - a, self._other_rows - self._rows)
            if rest:
                raise NotExportable("it uses a number that is not linear in the number of rows")
            return Rows(per_row, a - per_row * self._rows)
        else:
            same = a == b or (isinstance(a, float) and a != a and b != b)
        if not same:
            raise NotExportable("it takes other paths for another number of rows")
        return a
