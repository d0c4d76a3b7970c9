"""How much memory the tensors of a computation take."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_allocation(computation: Callable[[], object]) -> int:
    """The most bytes that tensors made by `computation` took at one time.

    On whatever device they are; what an operation uses inside, and returns before it ends, does not show.
    """
    allocations = _Allocations()
    with allocations:
        computation()
    return allocations.peak


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Sees the storages that operations make, and when they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, operation: Any, _types: Any, arguments: Any = (), named: Any = None) -> Any:
        given = {_address(tensor) for tensor in tree_leaves((arguments, named)) if isinstance(tensor, Tensor)}
        result = operation(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            # A view shares the storage of the tensor that it is of.
            if isinstance(tensor, Tensor) and _address(tensor) not in given:
                self._made(tensor.untyped_storage())
        self.peak = max(self.peak, sum(self.alive.values()))
        return result

    def _made(self, storage: UntypedStorage) -> None:
        address = storage.data_ptr()
        self.alive[address] = storage.nbytes()
        weakref.finalize(storage, self.alive.pop, address, None)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
