"""Every change of a policy's weights is noticed, also those that torch does not number, and at little cost."""

from __future__ import annotations

import tracemalloc

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from clusterenv.policy.acting import torch_changes  # noqa: E402
from clusterenv.policy.acting.torch_changes import Changes  # noqa: E402


@pytest.fixture(params=["cpu", "device"])
def changes(request, monkeypatch):
    if request.param == "device":  # what runs on a GPU, run here
        monkeypatch.setattr(torch_changes, "_sums", torch_changes._sums_on_device)
    return Changes()


def large(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(512, 1024, generator=generator).to(dtype)


def one_weight(tensor):
    tensor.data[300, 7] += 1.0


def opposite_rows(tensor):
    """As the gradients of two actions are, in weights that were equal."""
    tensor.data[10:14] = 0.75
    yield
    tensor.data[11] += 2.0**-20
    tensor.data[12] -= 2.0**-20


def swapped_rows(tensor):
    tensor.data[[3, 200]] = tensor.data[[200, 3]]


def negated(tensor):
    tensor.data.neg_()


def numpy_view(tensor):
    tensor.numpy()[0, 0] += 1


def last_weight(tensor):
    tensor.data[-1, -1] += 1.0


def fused(tensor):
    tensor.requires_grad_()
    yield
    tensor.grad = torch.full_like(tensor, 1e-3)
    torch.optim.SGD([tensor], lr=1.0, fused=True).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "change",
    [one_weight, opposite_rows, swapped_rows, negated, numpy_view, last_weight, fused],
    ids=lambda f: f.__name__,
)
def test_changes_that_torch_does_not_number_are_noticed(changes, change, dtype):
    tensor = large(dtype)
    steps = change(tensor) if change in (opposite_rows, fused) else None
    if steps is not None:
        next(steps)
    before, version = changes.count([tensor]), tensor._version
    assert changes.count([tensor]) == before
    if steps is None:
        change(tensor)
    else:
        next(steps, None)
    assert tensor._version == version, "torch numbered it"
    after = changes.count([tensor])
    assert after == before + 1 and changes.count([tensor]) == after


def test_a_change_between_two_numbered_ones_is_noticed(changes):
    tensor = large()
    seen = [changes.count([tensor])]
    for change in (lambda: tensor.add_(1.0), lambda: one_weight(tensor), lambda: tensor.add_(1.0)):
        change()
        seen += [changes.count([tensor]), changes.count([tensor])]
    assert seen == [1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(()),
        lambda: torch.ones(3, dtype=torch.bool),
        lambda: torch.ones(5, dtype=torch.bfloat16),
        lambda: torch.ones(200_000, dtype=torch.bfloat16),
        lambda: torch.ones(300_000)[1:],
        lambda: torch.ones(400, 500).T,
        lambda: torch.ones(3, 5, dtype=torch.complex64),
        lambda: torch.ones(8, 64, 32, 32).to(memory_format=torch.channels_last),
    ],
    ids=["scalar", "bool", "bfloat16", "large bfloat16", "odd offset", "transposed", "complex", "channels last"],
)
def test_tensors_of_any_kind_are_compared(changes, make):
    tensors = [torch.ones(0), make()]
    before = changes.count(tensors)
    assert changes.count(tensors) == before
    tensors[1].data[...] = 0
    assert changes.count(tensors) == before + 1 == changes.count(tensors)


@pytest.mark.parametrize("make", [lambda: torch.ones(4), large], ids=["small", "large"])
def test_nan_in_the_weights_is_one_change(changes, make):
    tensor = make()
    before = changes.count([tensor])
    tensor.data[0] = float("nan")
    assert [changes.count([tensor]) for _ in range(3)] == [before + 1] * 3


def test_another_tensor_is_a_change(changes):
    assert [changes.count([tensor]) for tensor in (torch.ones(4), torch.ones(4))] == [1, 2]
    assert changes.count([]) == 3 == changes.count([])


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made, views aside."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        storages = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)]
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in storages:
            self.size = max(self.size, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("is_changed", [False, True])
def test_large_tensors_are_not_copied(changes, is_changed):
    """A copy would take longer than a gradient step of a small batch, and as much memory as the module."""
    tensor = torch.zeros(4 << 20)
    changes.count([tensor])
    tensor.add_(int(is_changed))
    tracemalloc.start()
    try:
        with Largest() as largest:
            changes.count([tensor])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(largest.size, peak) < tensor.nbytes / 16
