# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""How target and draft share one pool of KV cache blocks, and what keeping only the window saves. Needs nothing.

vLLM splits layers into KV cache groups. A block belongs to one group at a time and has room for one page (the keys and
values of ``block_size`` tokens in one layer) of each layer of the largest group. So smaller groups waste pages: the
target's on every token of the context, the draft's on those of the window only.

Without reclaim all layers are one group, and a request takes a page of every layer for all of its tokens.
"""

from dataclasses import dataclass
from functools import cached_property

SMALLEST_SAVING = 0.05
"""Below it more KV cache groups are not worth having: metadata is built for each of them in every step."""


def kept_tokens(window_size: int, min_context: int, block_size: int) -> int:
    """Tokens behind a request's newest that the cache must keep for its draft.

    The window is rounded out to a block edge, and a request below the length gate reads everything.
    """
    return max(window_size, min_context) + block_size


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """A target and a draft whose layers all have pages of one size, with reclaim.

    Attributes:
        target_layers: attention layers of the target.
        draft_layers: attention layers of the draft.
        block_size: tokens per block.
        kept: tokens that the cache keeps for the draft, see :func:`kept_tokens`.
    """

    target_layers: int
    draft_layers: int
    block_size: int
    kept: int

    @cached_property
    def group_size(self) -> int:
        """Most layers of one group: what wastes the fewest pages, where one more group counts as one page.

        All draft layers are one group; of equally good sizes the larger has fewer groups.
        """

        def cost(size: int) -> tuple[int, int]:
            groups = -(-self.target_layers // size)
            wasted = groups * size - self.target_layers + size - self.draft_layers
            return wasted + groups + 1, -size

        return min(range(self.draft_layers, max(self.target_layers, self.draft_layers) + 1), key=cost)

    @property
    def target_groups(self) -> int:
        return -(-self.target_layers // self.group_size)

    @property
    def groups(self) -> int:
        return self.target_groups + 1

    def blocks(self, tokens: int, in_flight: int = 0) -> int:
        """Blocks that a request of ``tokens`` holds, ``in_flight`` of them in steps that have not ended."""
        whole = -(-tokens // self.block_size)
        # One block more, as the oldest token that is kept need not be the first of its block.
        draft = -(-min(self.kept - 1 + in_flight, tokens) // self.block_size) + 1
        return self.target_groups * whole + draft

    def pages(self, tokens: int, in_flight: int = 0) -> int:
        """The same in pages of one layer."""
        return self.group_size * self.blocks(tokens, in_flight)

    def pages_of_one_group(self, tokens: int) -> int:
        """Pages that the request holds without reclaim."""
        return (self.target_layers + self.draft_layers) * -(-tokens // self.block_size)

    def saved(self, tokens: int, in_flight: int = 0) -> float:
        """Share of a request's KV cache that reclaim saves; negative where it costs."""
        return 1 - self.pages(tokens, in_flight) / self.pages_of_one_group(tokens)

    def too_little_saved(self, max_model_len: int) -> str | None:
        """Why the saving, at its best on the longest request, is not worth the KV cache groups, if it is not."""
        saved = self.saved(max_model_len)
        if saved >= SMALLEST_SAVING:
            return None
        return (
            f"draft layers: {self.draft_layers}, target layers: {self.target_layers}; that would save {saved:.1%} of "
            f"the KV cache at max_model_len={max_model_len} and make {self.groups} KV cache groups of one, and less "
            f"than {SMALLEST_SAVING:.0%} is not worth them"
        )

    def costs_below(self, longest: int) -> int | None:
        """Context from which reclaim takes no more than without it, in whole blocks; None if none up to ``longest``."""
        for tokens in range(self.block_size, longest + self.block_size, self.block_size):
            if self.saved(tokens) >= 0:
                return tokens
        return None
