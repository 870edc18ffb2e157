# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""The workers of one engine: which of them speaks, and that all of them window alike."""

from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store
from vllm.distributed import get_tp_group

from .seams.vllm import prefill_context_parallel_size

PATIENCE = timedelta(seconds=120)
"""How long a rank waits for the others, which set up their attention at the same time."""


def speaks(parallel_config: Any) -> bool:
    """Whether this worker logs and counts for its engine: the first rank of the last pipeline stage, which drafts."""
    width = parallel_config.tensor_parallel_size * prefill_context_parallel_size(parallel_config)
    stages = parallel_config.pipeline_parallel_size
    # Some launchers number the ranks of all data parallel engines in one row.
    return parallel_config.rank % (width * stages) == width * (stages - 1)


def agree(in_force: str, parallel_config: Any) -> None:
    """Compare what is in force on this rank with the other tensor parallel ranks of the draft.

    Ranks that window differently would still run, and propose badly. A rank without the plugin takes part in nothing,
    so this is no collective: each rank leaves a note in the store that all of them share.

    Args:
        in_force: the window, or why there is none.

    Raises:
        RuntimeError: some rank has no window, or another one; names the rank and both.
    """
    if parallel_config.tensor_parallel_size == 1:
        return
    group, store = get_tp_group(), _get_default_store()
    in_force = f"{in_force}, version {_version()}"
    store.set(_key(group.rank), in_force)
    for rank in group.ranks:
        try:
            store.wait([_key(rank)], PATIENCE)
        except RuntimeError as error:  # torch.distributed.DistStoreError
            raise RuntimeError(
                f"the draft window is asked for, and rank {rank} says nothing of one (rank {group.rank}: {in_force}); "
                f"install the plugin on every node, and let VLLM_PLUGINS, if set, name draft_window on each"
            ) from error
        theirs = store.get(_key(rank)).decode()
        if theirs != in_force:
            raise RuntimeError(
                f"the draft window differs between ranks: {in_force} on rank {group.rank}, {theirs} on rank {rank}; "
                f"install the same version on every node"
            )


def _version() -> str:
    try:
        return version("vllm-draft-window")
    except PackageNotFoundError:
        return "built in"


def _key(rank: int) -> str:
    return f"draft_window/{rank}"
