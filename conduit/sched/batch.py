"""Wraps the views on a slab in a TensorDict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorDict
from torch import Tensor

__all__ = ["BatchMaker"]


class BatchMaker:
    """Makes the TensorDicts of batches of ``rows`` rows with the nested keys of ``tree``.

    TensorDict's constructor checks every leaf again, which costs more than the gather of a small
    batch; ``_new_unsafe`` is what the library itself uses where leaves are known to be right. It is
    tried once here, and the constructor is used where it does not give an equal TensorDict.
    """

    def __init__(self, tree: Mapping[str, Any], *, rows: int, device: torch.device) -> None:
        self._tree, self._size, self._device = tree, torch.Size([rows]), device
        self._scales: dict[float, Any] = {}
        self._new = TensorDict._new_unsafe if _unsafe_works() else TensorDict

    def make(
        self, columns: list[Tensor], index: NDArray[np.int64], *, loss_scale: float
    ) -> TensorDict:
        """A TensorDict of ``columns`` (in column order), index and loss scale."""
        fields = self._nest(self._tree, columns)
        tensor = torch.from_numpy(index)
        fields["index"] = tensor if self._device.type == "cpu" else tensor.to(self._device)
        scale = self._scales.get(loss_scale)
        if scale is None:
            # Immutable, so batches share it.
            scale = NonTensorData(loss_scale, batch_size=self._size, device=self._device)
            self._scales[loss_scale] = scale
        fields["loss_scale"] = scale
        return self._new(fields, batch_size=self._size, device=self._device)

    def _nest(self, tree: Mapping[str, Any], columns: list[Tensor]) -> dict[str, Any]:
        return {
            name: columns[sub] if type(sub) is int
            else self._new(self._nest(sub, columns), batch_size=self._size, device=self._device)
            for name, sub in tree.items()
        }


def _unsafe_works() -> bool:
    fields = {"a": torch.zeros(2, 3)}
    size, device = torch.Size([2]), torch.device("cpu")
    try:
        made = TensorDict._new_unsafe(dict(fields), batch_size=size, device=device)
        same = TensorDict(fields, batch_size=size, device=device)
        return bool((made == same).all()) and made.batch_size == same.batch_size
    except (AttributeError, TypeError):
        return False
