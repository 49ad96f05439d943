"""A step's work as tensors: which rows, where their KV lies, who attends with whom."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloud.engine.attention import lower_right_mask
from cloud.engine.block_table import BlockTable
from cloud.engine.lora import Adapter

__all__ = ["Chunk", "Decodes", "PagedDecodes", "StepBatch", "StepWork", "make_batch"]

# Decodes are computed together where the shortest has at least this share of the
# longest one's blocks: what is padded costs less than another call.
_ALIKE = 0.75


@dataclass(frozen=True, slots=True)
class StepWork:
    """One request's share of a step."""

    tokens: Sequence[int]  # All that are known of the request.
    start: int  # First position to compute.
    end: int  # One past the last one.
    table: BlockTable
    samples: bool
    adapter: Adapter | None = None
    # (first position, embeddings [n, hidden]) of what stands in place of tokens.
    soft_tokens: Sequence[tuple[int, Tensor]] = ()

    @property
    def is_decode(self) -> bool:
        """Whether one row is computed, however it came to be only one."""
        return self.end - self.start == 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several rows of one request."""

    rows: slice
    length: int  # Positions up to and including the last row's.
    blocks: Tensor  # Of those positions, int64 [n].
    mask: Tensor | None  # `lower_right_mask`.


@dataclass(frozen=True, slots=True)
class Decodes:
    """One row of each of several requests whose lengths are alike."""

    rows: slice
    blocks: Tensor  # int64 [n, longest], short ones filled up with any block.
    mask: Tensor | None  # [n, 1, 1, longest · block_tokens], see `attend_decodes`.
    run: slice | None = None  # KV rows in place, for a single request.


@dataclass(frozen=True, slots=True)
class PagedDecodes:
    """All decodes of a step, whatever their lengths, for an operation that follows block tables."""

    blocks: Tensor  # int64, one table behind the other.
    first_blocks: Tensor  # int64 [n], where each one's begins.
    lengths: Tensor  # int64 [n], positions up to and including the new one.
    longest: int


@dataclass(slots=True)
class StepBatch:
    """All tokens of a step as one flat batch: decodes first, then chunks."""

    tokens: Tensor  # int64 [rows].
    positions: Tensor  # int64 [rows], of each token in its own request.
    write_rows: Tensor  # int64 [rows], the KV row of each token.
    last_rows: Tensor  # int64 [n], the rows whose next token is wanted, in the plan's order.
    # Of the two, the one that was asked for.
    decodes: list[Decodes] = field(default_factory=list)
    paged: PagedDecodes | None = None
    chunks: list[Chunk] = field(default_factory=list)
    # Rows that go through an adapter too, each a run.
    adapted: list[tuple[Adapter, slice]] = field(default_factory=list)
    soft_tokens: list[tuple[slice, Tensor]] = field(default_factory=list)


def make_batch(
    work: Sequence[StepWork],
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    needs_groups: bool = True,
) -> StepBatch:
    """Lays the work of a step out.

    Args:
        work: at least one, in the plan's order.
        block_tokens: tokens in a block of KV.
        dtype: of queries.
        device: where the model is.
        needs_groups: whether decodes are laid out in groups of like length, or as block tables.
    """
    order = sorted(range(len(work)), key=lambda index: _layout_key(work[index]))
    rows: list[slice] = [slice(0)] * len(work)
    num_rows = 0
    for index in order:
        num = work[index].end - work[index].start
        rows[index] = slice(num_rows, num_rows + num)
        num_rows += num
    ordered = [(work[index], rows[index]) for index in order]

    def on_device(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device)

    last_rows = [rows[i].stop - 1 for i, one in enumerate(work) if one.samples]
    tokens = [token for one, _ in ordered for token in one.tokens[one.start : one.end]]
    batch = StepBatch(
        tokens=torch.tensor(tokens, device=device),
        positions=on_device(np.concatenate([np.arange(w.start, w.end) for w, _ in ordered])),
        write_rows=on_device(np.concatenate([w.table.rows(w.start, w.end) for w, _ in ordered])),
        last_rows=torch.tensor(last_rows, dtype=torch.int64, device=device),
        adapted=_adapted_runs(ordered),
        soft_tokens=[part for one, span in ordered for part in _soft_rows(one, span)],
    )
    if needs_groups:
        for alike in _alike(ordered):
            batch.decodes.append(_decodes(alike, block_tokens, dtype, device))
    else:
        batch.paged = _paged([one for one, _ in ordered if one.is_decode])
    for one, span in ordered:
        if not one.is_decode:
            mask = lower_right_mask(one.end - one.start, one.end, dtype, device)
            batch.chunks.append(Chunk(span, one.end, on_device(one.table.upto(one.end)), mask))
    return batch


def _layout_key(one: StepWork) -> tuple[bool, str, int]:
    """Decodes before chunks, each adapter's together, the longest first."""
    return (not one.is_decode, one.adapter.name if one.adapter else "", -one.end)


def _adapted_runs(ordered: Sequence[tuple[StepWork, slice]]) -> list[tuple[Adapter, slice]]:
    runs: list[tuple[Adapter, slice]] = []
    for one, rows in ordered:
        if one.adapter is None:
            continue
        if runs and runs[-1][0] is one.adapter and runs[-1][1].stop == rows.start:
            rows = slice(runs.pop()[1].start, rows.stop)
        runs.append((one.adapter, rows))
    return runs


def _soft_rows(one: StepWork, rows: slice) -> Iterator[tuple[slice, Tensor]]:
    """The part of a request's soft tokens that the rows are about."""
    for first, embeddings in one.soft_tokens:
        start, end = max(first, one.start), min(first + len(embeddings), one.end)
        if start < end:
            at = rows.start - one.start
            yield slice(at + start, at + end), embeddings[start - first : end - first]


def _alike(ordered: Sequence[tuple[StepWork, slice]]) -> Iterator[list[tuple[StepWork, slice]]]:
    """Decodes that are to be computed together."""
    group: list[tuple[StepWork, slice]] = []
    longest = 0
    for one, rows in ordered:
        if not one.is_decode:
            break
        length = one.end
        if group and not _ALIKE * longest <= length <= longest:
            yield group
            group = []
        if not group:
            longest = length
        group.append((one, rows))
    if group:
        yield group


def _decodes(
    group: Sequence[tuple[StepWork, slice]],
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Decodes:
    rows = slice(group[0][1].start, group[-1][1].stop)
    if len(group) == 1:
        one = group[0][0]
        run = one.table.run_upto(one.end)
        if run is not None:
            return Decodes(rows, torch.empty(0, dtype=torch.int64), None, run)
    tables = [one.table.upto(one.end) for one, _ in group]
    longest = max(map(len, tables))
    blocks = np.zeros((len(group), longest), dtype=np.int64)
    for row, table in enumerate(tables):
        blocks[row, : len(table)] = table
    lengths = torch.tensor([one.end for one, _ in group], device=device).unsqueeze(1)
    is_others = torch.arange(longest * block_tokens, device=device) >= lengths
    mask = torch.zeros(is_others.shape, dtype=dtype, device=device)
    mask.masked_fill_(is_others, float("-inf"))
    return Decodes(rows, torch.from_numpy(blocks).to(device), mask[:, None, None, :])


def _paged(decodes: Sequence[StepWork]) -> PagedDecodes:
    tables = [one.table.upto(one.end) for one in decodes]
    sizes = np.array([len(table) for table in tables], dtype=np.int64)
    blocks = np.concatenate(tables) if tables else np.empty(0, dtype=np.int64)
    lengths = [one.end for one in decodes]
    return PagedDecodes(
        blocks=torch.from_numpy(blocks),
        first_blocks=torch.from_numpy(np.cumsum(sizes) - sizes),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        longest=max(lengths, default=0),
    )
