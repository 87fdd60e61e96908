"""Wraps the views on a slab in a TensorDict."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorDict
from torch import Tensor

__all__ = ["BatchMaker"]


_Plan: TypeAlias = tuple[list[tuple[str, int]], list[tuple[str, Any]]]


class BatchMaker:
    """Makes the TensorDicts of batches of ``rows`` rows with the nested keys of ``tree``.

    TensorDict's constructor checks every leaf again, which costs more than the gather of a small
    batch; ``_new_unsafe`` is what the library itself uses where leaves are known to be right. It is
    tried once here, and the constructor is used where it does not give an equal TensorDict.
    Likewise for the loss scale, which every batch has to itself, since it can be set in place.
    """

    def __init__(self, tree: Mapping[str, Any], *, rows: int, device: torch.device) -> None:
        self._size, self._device = torch.Size([rows]), device
        self._plan = _plan(tree)
        self._scales: dict[float, NonTensorData] = {}
        self._new: Callable[..., TensorDict]
        self._copy: Callable[[NonTensorData], NonTensorData]
        self._unsafe = _unsafe_works()
        self._new = TensorDict._new_unsafe if self._unsafe else TensorDict
        self._copy = _twin if _twins_work() else copy.copy

    def make(
        self, columns: list[Tensor], index: NDArray[np.int64], *, loss_scale: float = 1.0
    ) -> TensorDict:
        """A TensorDict of ``columns`` (in column order), index and loss scale."""
        batch = self.prepare(columns, loss_scale=loss_scale)
        self.number(batch, index)
        return batch

    def number(self, batch: TensorDict, index: NDArray[np.int64]) -> None:
        """Adds the logical indices of its rows to a batch that was prepared without them."""
        tensor = torch.from_numpy(index)
        if self._device.type != "cpu":
            tensor = tensor.to(self._device)
        if self._unsafe:
            batch._tensordict["index"] = tensor
        else:
            batch["index"] = tensor

    def prepare(self, columns: list[Tensor], *, loss_scale: float = 1.0) -> TensorDict:
        """``make`` without the index."""
        fields = self._nest(self._plan, columns)
        scale = self._scales.get(loss_scale)
        if scale is None:
            scale = NonTensorData(loss_scale, batch_size=self._size, device=self._device)
            self._scales[loss_scale] = scale
        fields["loss_scale"] = self._copy(scale)
        return self._new(fields, batch_size=self._size, device=self._device)

    def _nest(self, plan: _Plan, columns: list[Tensor]) -> dict[str, Any]:
        leaves, branches = plan
        fields: dict[str, Any] = {name: columns[i] for name, i in leaves}
        for name, branch in branches:
            fields[name] = self._new(
                self._nest(branch, columns), batch_size=self._size, device=self._device
            )
        return fields


def _plan(tree: Mapping[str, Any]) -> _Plan:
    leaves = [(name, sub) for name, sub in tree.items() if isinstance(sub, int)]
    branches = [(name, _plan(sub)) for name, sub in tree.items() if not isinstance(sub, int)]
    return leaves, branches


def _unsafe_works() -> bool:
    size, device = torch.Size([2]), torch.device("cpu")
    fields: dict[Any, Any] = {"a": torch.zeros(2, 3, device=device)}
    try:
        made = TensorDict._new_unsafe(dict(fields), batch_size=size, device=device)
        made._tensordict["b"] = fields["b"] = torch.ones(2, device=device)
        same = TensorDict(fields, batch_size=size, device=device)
        return bool((made == same).all()) and made.batch_size == same.batch_size
    except Exception:  # whatever it is that an undocumented function does when it changes
        return False


def _twin(data: NonTensorData) -> NonTensorData:
    """``copy.copy(data)`` at a third of its cost."""
    twin: NonTensorData = object.__new__(NonTensorData)
    twin.__dict__.update(data.__dict__)
    state: dict[str, Any] = twin.__dict__
    state["_tensordict"] = TensorDict._new_unsafe(
        batch_size=data.batch_size, device=data.device
    )
    state["_non_tensordict"] = dict(state["_non_tensordict"])
    return twin


def _twins_work() -> bool:
    data = NonTensorData(1.0, batch_size=torch.Size([2]), device=torch.device("cpu"))
    try:
        twin, copied = _twin(data), copy.copy(data)
        alike = repr(twin) == repr(copied)
        twin.data = 2.0
        return alike and (twin.data, data.data) == (2.0, 1.0)
    except Exception:  # as above
        return False
