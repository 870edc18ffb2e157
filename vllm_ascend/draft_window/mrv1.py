# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM-Ascend project
"""Model Runner V1 of an installed vLLM-Ascend: same options, same rules, the shim instead of its own adapter.

Its proposers build an adapter from the bare ``draft_window_size``, unchecked and whatever the method. So the option is
hidden from them while they load, and what :func:`decide` says is put in place afterwards. Three more methods need help:
where KV groups become known, and with them the window's blocks and the engine's final length; where a parallel drafter
builds metadata per KV group from tables that the adapter never saw; and where a later step compares lengths with
``max_model_len``, windowed ones by then.
"""

import logging
import math
import sys
from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any

from .config import DraftWindow, WindowOff
from .facts import max_rejected
from .groups import inspect_draft_layers
from .inputs import swapped
from .positions import DraftPositions
from .ranks import agree
from .startup import decide, report_in_force, report_off

_PROPOSERS = "vllm_ascend.spec_decode"


def install() -> bool:
    """Put the shim in place of vLLM-Ascend's adapter; calling it again changes nothing.

    Imports nothing of vLLM-Ascend: its worker module has loaded the proposers before a worker is constructed.

    Returns:
        Whether this process has proposers of Model Runner V1 that know a draft window.
    """
    base_module = sys.modules.get(f"{_PROPOSERS}.llm_base_proposer")
    upstream = vars(base_module).get("SlidingWindowAdapter") if base_module is not None else None
    if base_module is None or upstream is None:
        return False
    from vllm_ascend.spec_decode.sliding_window import SlidingWindowAdapter

    if upstream is SlidingWindowAdapter:
        return True
    base = base_module.AscendSpecDecodeBaseProposer
    wrapped = [
        (base, "load_model", _loading),
        (base, "initialize_attn_backend", _attach_to_groups),
        (base, "build_draft_attn_metadata", _crop_each_group),
        (base, "attn_update_stack_num_spec_norm", _compare_full_lengths),
    ]
    dspark_module = sys.modules.get(f"{_PROPOSERS}.dspark_proposer")
    if dspark_module is not None:  # has an initialize_attn_backend of its own
        wrapped.append((dspark_module.AscendDSparkProposer, "initialize_attn_backend", _attach_to_groups))
    # All are found before one is replaced.
    replaced: list[tuple[Any, str, Any]] = [(owner, name, wrap(getattr(owner, name))) for owner, name, wrap in wrapped]
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm_ascend.") and vars(module).get("SlidingWindowAdapter") is upstream:
            replaced.append((module, "SlidingWindowAdapter", SlidingWindowAdapter))
    for owner, name, value in replaced:
        setattr(owner, name, value)
    return True


def _loading(load_model: Callable[..., None]) -> Callable[..., None]:
    @wraps(load_model)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        decision = decide(self.vllm_config)
        if decision is None:
            return load_model(self, *args, **kwargs)
        if isinstance(decision, DraftWindow) and _has_loop_of_its_own(self):
            decision = WindowOff(
                f"{type(self).__name__} has a drafting loop of its own, without a window", logging.WARNING
            )
            report_off(decision, self.vllm_config)
        self.draft_positions = DraftPositions(self.vllm_config) if isinstance(decision, DraftWindow) else None
        options = self.vllm_config.additional_config
        hidden = {key: value for key, value in options.items() if not key.startswith("draft_window")}
        with swapped(self.vllm_config, additional_config=hidden):
            load_model(self, *args, **kwargs)
        if isinstance(decision, DraftWindow):
            self.draft_positions.extend(self.model)
            _attach(self, decision, self.kernel_block_size)

    return wrapper


def _has_loop_of_its_own(proposer: Any) -> bool:
    """Such a proposer never applies the adapter."""
    owner = next((cls for cls in type(proposer).__mro__ if "_propose" in vars(cls)), None)
    return owner is not None and owner.__name__ != "AscendSpecDecodeBaseProposer"


def _attach_to_groups(initialize_attn_backend: Callable[..., None]) -> Callable[..., None]:
    """Once the draft's KV groups are known: their window, and blocks that all of them can be cropped in."""

    @wraps(initialize_attn_backend)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize_attn_backend(self, *args, **kwargs)
        if self.sliding_window is None:
            return
        native = inspect_draft_layers(self.draft_attn_groups)
        if isinstance(native, WindowOff):
            return _switch_off(self, native)
        window = self.draft_window.widened_to(native)
        sizes = [group.kv_cache_spec.block_size for group in self.draft_attn_groups]
        block_size = math.lcm(*sizes) if self.method == "dspark" else self.sliding_window.block_size
        # vLLM may have fitted the length to its memory since the load.
        if covered := window.covers(self.vllm_config.model_config.max_model_len, block_size=block_size):
            return _switch_off(self, covered)
        _attach(self, window, block_size)
        report_in_force(
            window,
            self.vllm_config,
            f"table columns={self.sliding_window.max_window_blocks}, runner=V1 ({type(self).__name__})"
            f"{self.draft_positions.details}",
            block_size=block_size,
        )

    return wrapper


def _crop_each_group(build_draft_attn_metadata: Callable[..., Any]) -> Callable[..., Any]:
    """DSpark builds from a table per KV group, with the lengths that the adapter windowed."""

    @wraps(build_draft_attn_metadata)
    def wrapper(self: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        # KV group id -> [>= num_reqs, columns]
        tables = getattr(self, "_per_group_block_table_buffers", None)
        if self.sliding_window is None or self.method != "dspark" or not tables:
            return build_draft_attn_metadata(self, common_attn_metadata, *args, **kwargs)
        sizes = {group.kv_cache_group_id: group.kv_cache_spec.block_size for group in self.draft_attn_groups}
        rows = common_attn_metadata.num_reqs
        cropped = {gid: self.sliding_window.crop_group(table[:rows], gid, sizes[gid]) for gid, table in tables.items()}
        with swapped(self, _per_group_block_table_buffers=cropped):
            return build_draft_attn_metadata(self, common_attn_metadata, *args, **kwargs)

    return wrapper


def _compare_full_lengths(attn_update_stack_num_spec_norm: Callable[..., Any]) -> Callable[..., Any]:
    """A later step compares lengths with ``max_model_len``: those that the request has."""

    @wraps(attn_update_stack_num_spec_norm)
    def wrapper(self: Any, draft_index: int, old_common_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if self.sliding_window is not None:
            # The previous step's metadata was built from the old object and stays as it is.
            old_common_metadata = copy(old_common_metadata)
            self.sliding_window.before_next_step(old_common_metadata, self.max_model_len)
        return attn_update_stack_num_spec_norm(self, draft_index, old_common_metadata, *args, **kwargs)

    return wrapper


def _attach(proposer: Any, window: DraftWindow, block_size: int) -> None:
    from vllm_ascend.spec_decode.sliding_window import SlidingWindowAdapter

    vllm_config = proposer.vllm_config
    proposer.draft_window, proposer.draft_window_size = window, window.size
    proposer.sliding_window = SlidingWindowAdapter(
        window.size,
        block_size,
        proposer.runner.max_num_reqs,
        window.max_lookahead,
        proposer.device,
        sink_size=window.sink_size,
        min_context=window.min_context,
        max_model_len=vllm_config.model_config.max_model_len,
        max_rejected=max_rejected(vllm_config),
        # Only vLLM-Ascend 0.26 has the latter, for MLA; other parallel drafts read the device's lengths.
        read_from="_seq_lens_cpu" if window.max_lookahead else "parallel_draft_seq_lens_cpu",
    )


def _switch_off(proposer: Any, off: WindowOff) -> None:
    proposer.draft_window_size = proposer.sliding_window = None
    agree(f"off, because {off.reason}", proposer.vllm_config.parallel_config)
    report_off(off, proposer.vllm_config)
