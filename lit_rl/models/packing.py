"""Lay sequences of a micro-batch end to end as one row without padding, and bring per-token values back to ``[B, T]``.

Position in the flow: mini-batch -> **pack** -> backbone -> head on the wanted tokens -> **unpack** -> losses.
A row holds only tokens whose hidden state somebody needs: sequences without a wanted token are left out, and a
response ends before its last wanted token, which is predicted but predicts nothing itself. Where samples of one group
stand next to each other, their prompt can be laid down once and seen by all of them.
Nothing here knows a model, a device or a loss. How many sequences go into a row is the planner's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TokenIds = Sequence[int] | Tensor


_MERGED_TOKENS = 128
"""Neighbours with one context are attended to together up to so many tokens: below, calls cost more than arithmetic."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a row that is attended to in one go.

    It has parts, one per sequence. The tokens of a part see each other causally, and all of one earlier stretch.

    Attributes:
        start: First position.
        end: One past the last position.
        context: Start and end of the prompt its parts continue, where that is not in the segment itself.
        parts: Tokens of each part, in order; one part where it is left empty.
    """

    start: int
    end: int
    context: tuple[int, int] | None = None
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Fill in the only part."""
        if not self.parts:
            object.__setattr__(self, "parts", (self.end - self.start,))

    def merged_with(self, other: Segment) -> Segment | None:
        """Return one segment for this and the one that follows, or ``None`` where they are better kept apart."""
        if self.context != other.context or other.end - self.start > _MERGED_TOKENS:
            return None
        return Segment(self.start, other.end, self.context, self.parts + other.parts)

    @property
    def num_tokens(self) -> int:
        """Tokens of the segment itself."""
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        """Tokens it sees: those of its context and its own."""
        return self.num_tokens + (self.context[1] - self.context[0] if self.context else 0)

    def select_keys(self, values: Tensor, dim: int) -> Tensor:
        """Return what it sees of ``values`` along axis ``dim``, context first."""
        own = values.narrow(dim, self.start, self.num_tokens)
        if self.context is None:
            return own
        return torch.cat([values.narrow(dim, self.context[0], self.context[1] - self.context[0]), own], dim)

    def add_to_keys(self, total: Tensor, share: Tensor, dim: int) -> None:
        """Add ``share``, laid out as `select_keys` returns it, to ``total`` in place."""
        num_context = self.num_keys - self.num_tokens
        if self.context is not None:
            total.narrow(dim, self.context[0], num_context).add_(share.narrow(dim, 0, num_context))
        total.narrow(dim, self.start, self.num_tokens).add_(share.narrow(dim, num_context, self.num_tokens))


class PackedSequences:
    """One packed row and where the wanted tokens of a ``[B, T]`` micro-batch are found in it.

    A plain class, because Lightning's precision plugins cast the float tensors of dataclasses and dictionaries.

    Attributes:
        input_ids: ``[1, L]`` int64.
        position_ids: ``[1, L]`` int64; starts again at 0 with each sequence. Where a prompt is shared, each of its
            responses continues from the prompt's length.
        segments: Cover the row in order, and say who sees whom.
        source_index: ``[S]`` int64, position in the row whose hidden state predicts each wanted token.
        target_ids: ``[S]`` int64, the wanted tokens.
        row_index: ``[S]`` int64, sequence of each wanted token, in [0, B).
        column_index: ``[S]`` int64, its position within the response, in [0, T).
        shape: ``(B, T)``: number of sequences and length of the longest response.
    """

    def __init__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        segments: tuple[Segment, ...],
        source_index: Tensor,
        target_ids: Tensor,
        row_index: Tensor,
        column_index: Tensor,
        shape: tuple[int, int],
    ) -> None:
        self.input_ids = input_ids
        self.position_ids = position_ids
        self.segments = segments
        self.source_index = source_index
        self.target_ids = target_ids
        self.row_index = row_index
        self.column_index = column_index
        self.shape = shape

    @property
    def num_tokens(self) -> int:
        """Tokens the backbone computes, L."""
        return self.input_ids.shape[1]

    @property
    def num_targets(self) -> int:
        """Tokens the head scores, S."""
        return self.target_ids.shape[0]

    @property
    def has_shared_prompts(self) -> bool:
        """Whether ``position_ids`` alone do not tell who sees whom."""
        return any(segment.context for segment in self.segments)

    @property
    def attention_mask(self) -> Tensor | None:
        """``[1, 1, L, L]`` bool on the row's device, True where a query (third axis) sees a key (last axis).

        ``None`` where no prompt is shared: transformers then reads the borders of sequences from ``position_ids``.
        """
        if not self.has_shared_prompts:
            return None
        mask = torch.zeros(self.num_tokens, self.num_tokens, dtype=torch.bool)
        for segment in self.segments:
            if segment.context:
                mask[segment.start : segment.end, slice(*segment.context)] = True
            start = segment.start
            for length in segment.parts:
                mask[start : start + length, start : start + length] = True
                start += length
        return mask.tril_()[None, None].to(self.input_ids.device)

    def to(self, device: torch.device | str) -> PackedSequences:
        """Return a copy on ``device``."""
        return PackedSequences(
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            segments=self.segments,
            source_index=self.source_index.to(device),
            target_ids=self.target_ids.to(device),
            row_index=self.row_index.to(device),
            column_index=self.column_index.to(device),
            shape=self.shape,
        )


def pack(
    prompt_ids: Sequence[TokenIds],
    response_ids: Sequence[TokenIds],
    response_mask: Sequence[TokenIds],
    *,
    group_ids: Sequence[int] | None = None,
    share_prompts: bool,
) -> PackedSequences:
    """Lay B sequences end to end as one row.

    Args:
        prompt_ids: B prompts, each with at least one token.
        response_ids: B responses; an empty one is a row of zeros after `unpack`.
        response_mask: B masks as long as the responses, non-zero where the token's log-prob is wanted.
        group_ids: B numbers, equal for samples of one prompt. ``None`` lets equal neighbouring prompts count as one
            group.
        share_prompts: Compute the prompt of neighbouring sequences of one group once. Needs ``sdpa`` or ``eager``
            attention. On a GPU the row is masked, so that its attention grows with the square of all its tokens.

    Returns:
        The row, on CPU. With no wanted token it holds one filler token, so that a rank without work can still take part
        in a sharded forward.

    Raises:
        ValueError: If the lists differ in length, a mask does not fit its response, or a prompt is empty.
    """
    _check_lengths(prompt_ids, response_ids, response_mask, group_ids)
    row = _Row()
    for i in range(len(prompt_ids)):
        wanted = torch.as_tensor(response_mask[i]).nonzero()[:, 0].tolist()
        if not wanted:
            continue
        prompt = _as_list(prompt_ids[i])
        if not prompt:
            raise ValueError(
                f"Sequence {i} has an empty prompt: nothing predicts its first token. Begin it with a BOS token."
            )
        row.add(
            i, prompt, _as_list(response_ids[i]), wanted, None if group_ids is None else group_ids[i], share_prompts
        )
    longest = max((len(response) for response in response_ids), default=0)
    return row.finish((len(prompt_ids), longest))


def unpack(values: Tensor, packed: PackedSequences) -> Tensor:
    """Put per-token values back in place: ``[S, ...]`` to ``[B, T, ...]``, 0 where none was wanted. Differentiable."""
    padded = values.new_zeros(*packed.shape, *values.shape[1:])
    return padded.index_put((packed.row_index, packed.column_index), values)


class _Row:
    """The row while it grows."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.segments: list[Segment] = []
        self.sources: list[int] = []
        self.targets: list[int] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.prompt: list[int] | None = None
        self.group: int | None = None
        self.prompt_start = 0
        self.prompt_end = 0

    def add(
        self, index: int, prompt: list[int], response: list[int], wanted: list[int], group: int | None, share: bool
    ) -> None:
        """Append a sequence, or only its response where its prompt is the one laid down last."""
        is_shared = share and prompt == self.prompt and group == self.group
        segment_start = len(self.ids)
        if not is_shared:
            self.prompt, self.group = prompt, group
            self._extend(prompt, first_position=0)
            self.prompt_start, self.prompt_end = segment_start, len(self.ids)
        start = len(self.ids)
        # The last wanted token is a target only: its own hidden state predicts nothing that is wanted.
        self._extend(response[: wanted[-1]], first_position=len(prompt))
        if len(self.ids) > segment_start:
            context = (self.prompt_start, self.prompt_end) if is_shared else None
            self._append_segment(Segment(segment_start, len(self.ids), context))
        self.sources += [start + column - 1 if column else self.prompt_end - 1 for column in wanted]
        self.targets += [response[column] for column in wanted]
        self.rows += [index] * len(wanted)
        self.columns += wanted

    def _append_segment(self, segment: Segment) -> None:
        merged = self.segments[-1].merged_with(segment) if self.segments else None
        if merged is None:
            self.segments.append(segment)
        else:
            self.segments[-1] = merged

    def _extend(self, ids: list[int], first_position: int) -> None:
        self.ids += ids
        self.positions += range(first_position, first_position + len(ids))

    def finish(self, shape: tuple[int, int]) -> PackedSequences:
        """Turn the lists into tensors."""
        return PackedSequences(
            input_ids=torch.tensor([self.ids or [0]]),
            position_ids=torch.tensor([self.positions or [0]]),
            segments=tuple(self.segments) or (Segment(0, 1),),
            source_index=torch.tensor(self.sources, dtype=torch.int64),
            target_ids=torch.tensor(self.targets, dtype=torch.int64),
            row_index=torch.tensor(self.rows, dtype=torch.int64),
            column_index=torch.tensor(self.columns, dtype=torch.int64),
            shape=shape,
        )


def _as_list(ids: TokenIds) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


def _check_lengths(
    prompt_ids: Sequence[TokenIds],
    response_ids: Sequence[TokenIds],
    response_mask: Sequence[TokenIds],
    group_ids: Sequence[int] | None,
) -> None:
    counts = {"prompt_ids": len(prompt_ids), "response_ids": len(response_ids), "response_mask": len(response_mask)}
    if group_ids is not None:
        counts["group_ids"] = len(group_ids)
    if len(set(counts.values())) > 1:
        raise ValueError(f"pack() needs one entry per sequence in each list, got {counts}.")
    for i, (response, mask) in enumerate(zip(response_ids, response_mask, strict=True)):
        if len(response) != len(mask):
            raise ValueError(
                f"Sequence {i}: response_mask has {len(mask)} entries for {len(response)} response tokens."
            )
