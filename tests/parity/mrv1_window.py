# SPDX-License-Identifier: Apache-2.0
"""Applies the shim to vLLM's own Model Runner V1 proposers, in the places where vLLM-Ascend's proposers call it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.spec_decode.dflash import DFlashProposer

from vllm_ascend.spec_decode.sliding_window import SlidingWindowAdapter


@contextmanager
def windowed_proposer(
    proposer: Any, window: int, on_metadata: Callable[..., None] | None = None
) -> Iterator[SlidingWindowAdapter]:
    """Window every proposal of ``proposer``.

    ``on_metadata(proposer, adapter, unwindowed, windowed, step)`` sees what each metadata build is given: a copy of the
    metadata as it was before the window, and the metadata itself.
    """
    parallel = isinstance(proposer, DFlashProposer)
    adapter = SlidingWindowAdapter(
        window,
        proposer.block_size,
        proposer.max_batch_size,
        0 if parallel else proposer.num_speculative_tokens,
        proposer.device,
        max_model_len=proposer.max_model_len,
        max_rejected=2 * proposer.num_speculative_tokens,
    )
    build = proposer.build_per_group_and_layer_attn_metadata
    lengthen = proposer._update_positions_dependent_metadata
    unwindowed = None

    def windowed_build(cad: Any, draft_index: int = 0) -> Any:
        nonlocal unwindowed
        if draft_index == 0:
            unwindowed = cad.replace()
            adapter.apply(cad)
        if on_metadata is not None:
            on_metadata(proposer, adapter, unwindowed, cad, draft_index)
        return build(cad, draft_index)

    def lengthen_on_full_table(positions: Any, cad: Any, *args: Any) -> Any:
        """Slots of later steps come from the full table."""
        cropped, cad.block_table_tensor = cad.block_table_tensor, adapter.full_block_table
        try:
            return lengthen(positions, cad, *args)
        finally:
            cad.block_table_tensor = cropped

    proposer.build_per_group_and_layer_attn_metadata = windowed_build
    proposer._update_positions_dependent_metadata = lengthen_on_full_table
    try:
        yield adapter
    finally:
        del proposer.build_per_group_and_layer_attn_metadata
        del proposer._update_positions_dependent_metadata
