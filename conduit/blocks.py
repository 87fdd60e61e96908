"""Blocks of packed rows: their columns as views, and how fields are written into them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conduit.fields import Column

__all__ = ["BlockViews", "BlockWriter", "Records", "new_block", "records_of"]

Records: TypeAlias = NDArray[np.void] | Tensor

_WORD = torch.float32
_WORD_BYTES = _WORD.itemsize

_JOINT_BYTES = 1 << 20
"""Up to this many bytes, rows are put together in one pass over them."""


def new_block(rows: int, row_bytes: int, device: torch.device | None = None) -> Tensor:
    """Uninitialised packed rows on ``device``, by default the CPU: uint8 ``[rows, row_bytes]``."""
    # Outlives the mode it is made in: in inference mode it could never be trained on.
    with torch.inference_mode(False):
        device = device or torch.device("cpu")
        return torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)


def records_of(block: Tensor) -> Records:
    """``block`` as gathers see it: opaque numpy records ``[n]`` on the CPU, else itself.

    On rows as opaque records numpy's ``take`` is 10 to 40% faster than ``index_select``.
    """
    if block.device.type != "cpu":
        return block
    return block.numpy().view(np.dtype((np.void, block.shape[1])))[:, 0]


class BlockViews:
    """The columns of one block (contiguous uint8 ``[n, row_bytes]``) as views, made cheaply again
    and again: the hot path of ``sample``, with one split per dtype instead of one call per field.

    Each call of ``fresh`` hands out new tensors that share no autograd history with the block, with
    earlier calls or with each other (torch's "unsafe" split, which is unsafe where parts overlap or
    the whole is used in between), so nothing a user does to a batch can reach the block's own
    tensors.
    """

    def __init__(self, columns: Sequence[Column], block: Tensor) -> None:
        self._reshaped = [
            (i, column.field.shape) for i, column in enumerate(columns)
            if len(column.field.shape) != 1
        ]
        self._groups: list[tuple[Tensor, list[int]]] = []
        with torch.inference_mode(False):
            for neighbours in _neighbours(columns):
                first = neighbours[0]
                dtype, sizes = first.field.dtype, [one.field.numel for one in neighbours]
                start = first.offset_bytes // dtype.itemsize
                self._groups.append((block.view(dtype).narrow(1, start, sum(sizes)), sizes))
        self._rows = len(block)

    def fresh(self) -> list[Tensor]:
        """New views ``[n, *shape]`` of all fields, in column order."""
        views: list[Tensor] = []
        for base, sizes in self._groups:
            views += base.unsafe_split_with_sizes(sizes, 1)
        for i, shape in self._reshaped:
            views[i] = views[i].view(self._rows, *shape)
        return views


def _neighbours(columns: Sequence[Column]) -> list[list[Column]]:
    """The columns in groups of one dtype, with nothing between them."""
    groups: list[list[Column]] = []
    for column in columns:
        last = groups[-1][-1] if groups else None
        if (
            last is not None and last.field.dtype is column.field.dtype
            and last.offset_bytes + last.field.size_bytes == column.offset_bytes
        ):
            groups[-1].append(column)
        else:
            groups.append([column])
    return groups


class _Run(NamedTuple):
    """Neighbouring columns, by number, that fill whole words together with ``padding`` items of
    ``dtype``: the dtype they share, or bytes."""

    columns: list[int]
    dtype: torch.dtype
    padding: int


class BlockWriter:
    """Copies fields into the rows of one block: the hot path of ``extend``.

    Small rows are written once, whole, from beginning to end: one ``cat`` of all fields, seen as
    32-bit words, straight into the block, which for words is a plain loop of vector copies. Going
    over the rows once for every field or dtype would fetch each line from memory again. Fields that
    are no whole words are first joined to words of their own; padding becomes zero. Wide rows take
    one pass for each field, which costs them nothing more.
    """

    def __init__(self, columns: Sequence[Column], block: Tensor) -> None:
        self._block = block
        self._sizes = [column.field.numel for column in columns]
        self._reshaped = [i for i, c in enumerate(columns) if len(c.field.shape) != 1]
        with torch.inference_mode(False):
            self._words = block.view(_WORD)
            self._columns = [
                block.view(c.field.dtype).narrow(
                    1, c.offset_bytes // c.field.dtype.itemsize, c.field.numel
                ) for c in columns
            ]
        self._runs, used_bytes = _runs(columns)
        self._tail_words = (block.shape[1] - used_bytes) // _WORD_BYTES
        self._padded_rows, self._padding_device = -1, block.device
        self._paddings: list[Tensor] = []

    def write(self, values: Sequence[Tensor], start: int, stop: int) -> None:
        """Copies ``values`` (column order, ``[stop - start, *shape]``) into rows start to stop."""
        fields, rows = list(values), stop - start
        for i in self._reshaped:
            fields[i] = fields[i].reshape(rows, self._sizes[i])
        joint = rows * self._block.shape[1] <= _JOINT_BYTES
        with torch.no_grad():
            if joint and len({field.device for field in fields}) == 1:
                self._write_words(fields, rows, self._words[start:stop])
            else:
                for column, field in zip(self._columns, fields, strict=True):
                    _copy_wide(column[start:stop], field)

    def _write_words(self, fields: list[Tensor], rows: int, out: Tensor) -> None:
        device = fields[0].device
        if rows != self._padded_rows or device != self._padding_device:
            self._make_paddings(rows, device)
        parts = []
        for (columns, dtype, padding), zeros in zip(self._runs, self._paddings, strict=False):
            if len(columns) == 1 and not padding:
                parts.append(_as(_WORD, fields[columns[0]]))
            else:
                run = [_as(dtype, fields[i]) for i in columns]
                parts.append(_as(_WORD, torch.cat([*run, zeros] if padding else run, 1)))
        parts.append(self._paddings[-1])
        if device == out.device:
            torch.cat(parts, 1, out=out)
        else:
            out.copy_(torch.cat(parts, 1))

    def _make_paddings(self, rows: int, device: torch.device) -> None:
        """Zeros for every run and for the row's end. People extend by equal numbers of rows, and
        to make or cut zeros costs more than to write them: they are kept until the number changes.
        """
        widths = [(run.padding, run.dtype) for run in self._runs]
        with torch.inference_mode(False):
            self._paddings = [
                torch.zeros(rows, width, dtype=dtype, device=device)
                for width, dtype in (*widths, (self._tail_words, _WORD))
            ]
        self._padded_rows, self._padding_device = rows, device


def _runs(columns: Sequence[Column]) -> tuple[list[_Run], int]:
    """The columns in runs that fill whole words, as short as they can be, and the runs' bytes."""
    runs: list[_Run] = []
    members: list[int] = []
    end = 0
    filled = [i for i, column in enumerate(columns) if column.field.size_bytes]
    for i, following in zip_longest(filled, filled[1:]):
        members.append(i)
        end = columns[i].offset_bytes + columns[i].field.size_bytes
        stop = end + -end % _WORD_BYTES if following is None else columns[following].offset_bytes
        if end % _WORD_BYTES == 0 or stop != end:
            dtypes = {columns[j].field.dtype for j in members}
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
            runs.append(_Run(members, dtype, (stop - end) // dtype.itemsize))
            members = []
            end = stop
    return runs, end


def _as(dtype: torch.dtype, field: Tensor) -> Tensor:
    """The bytes of ``field`` (``[rows, numel]``) as ``dtype``."""
    if field.dtype is dtype:
        return field
    field = field.resolve_conj().resolve_neg()
    # A dimension of one element may have any stride, even in what is contiguous, and bytes may
    # begin anywhere.
    words = dtype.itemsize // field.dtype.itemsize or 1
    whole = field.storage_offset() % words == 0 and field.stride(0) % words == 0
    if not (whole and field.is_contiguous() and field.stride(-1) == 1):
        field = torch.empty_like(field, memory_format=torch.contiguous_format).copy_(field)
    return field.view(dtype)


def _copy_wide(out: Tensor, field: Tensor) -> None:
    """``out.copy_(field)`` for large ``[rows, numel]``, where numpy's row by row memcpy is up to a
    fifth faster than torch's strided copy."""
    plain = field.is_contiguous() and field.stride(-1) == 1
    plain = plain and not (field.is_conj() or field.is_neg())
    if plain and out.device.type == field.device.type == "cpu":
        field = field.detach()
        np.copyto(out.view(torch.uint8).numpy(), field.view(torch.uint8).numpy())
    else:
        out.copy_(field)
