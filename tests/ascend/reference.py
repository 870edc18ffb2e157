# SPDX-License-Identifier: Apache-2.0
"""Compares every draft attention with a masked reference over the *unwindowed* block table, while vLLM-Ascend runs.

The reference finds keys and values by their absolute slots through the full table, and asks the oracle which tokens
are visible. It never looks at the cropped table, nor at a length that was handed to the operator.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests import oracle
from tests.ascend.fia import Call, masked_attention
from tests.ascend.graphs import NPUGraph
from tests.oracle import Case


def max_rejected(vllm_config: Any) -> int:
    """Drafts that a host may count as accepted: those of a batch, and of the one in flight on each pipeline stage."""
    tokens = vllm_config.speculative_config.num_speculative_tokens
    return tokens * (1 + vllm_config.parallel_config.pipeline_parallel_size)


class DraftReference:
    """A listener for :data:`tests.ascend.fia.watch`; raises ``AssertionError`` as soon as something is off.

    Attributes:
        calls: draft attention calls compared.
        windowed_rows: of their rows, those from which the window hid something.
        worst: largest difference.
        tables: addresses of the tables that the operator was given, by layer.
        modes: values of ``sparse_mode`` that it was given, by layer.
        causal: what the draft's own config says, by layer.
    """

    causal: dict[str, bool]

    def __init__(self, vllm_config: Any, layer_names: set[str], tolerance: float = 1e-4) -> None:
        context = vllm_config.compilation_config.static_forward_context
        self._layers = {name: context[name] for name in layer_names}
        self._tolerance = tolerance
        self.calls = self.windowed_rows = 0
        self.worst = 0.0
        self.tables: dict[str, set[int]] = {}
        self.modes: dict[str, set[int]] = {}

    def __call__(self, call: Call) -> None:
        if call.layer not in self._layers:  # the target's
            return
        self.modes.setdefault(call.layer, set()).add(call.sparse_mode)
        if call.block_table is not None:
            self.calls += 1
            self.tables.setdefault(call.layer, set()).add(call.block_table.data_ptr())
        self._check_call(call.layer, call)

    def _check_call(self, name: str, call: Call) -> None:
        raise NotImplementedError

    def _compare(
        self,
        name: str,
        row: int,
        call: Call,
        *,
        case: Case,
        full_len: int,
        full_row: np.ndarray,
        size: int,
        decided_at: int | None = None,
    ) -> None:
        """One request of one layer; ``full_len`` and ``full_row`` are what no window ever touched.

        ``decided_at`` is the length by which the host decided what is hidden, where it decides.
        """
        impl = self._layers[name].impl
        shortest = min(full_len if decided_at is None else max(decided_at, 0), case.limit)
        hidden_tokens = np.setdiff1d(np.arange(shortest), oracle.visible_tokens(case, shortest))
        visible = np.setdiff1d(np.arange(min(full_len, case.limit)), hidden_tokens)
        assert call.kv_lens[row] == len(visible), f"{name}, request {row}: {call.kv_lens[row]} of {full_len} tokens"
        everything = np.arange(min(full_len, case.limit))
        slots = torch.from_numpy(oracle.physical_slots(full_row, size, everything))
        # [full_len, kv_heads, head_size]
        keys, values = (cache.view(-1, *cache.shape[2:])[slots] for cache in (impl.key_cache, impl.value_cache))
        first, last = (0, *call.query_ends)[row : row + 2]
        query = call.query[first:last]
        # [queries, full_len]: how far a token lies before the query
        distance = torch.arange(len(query))[:, None] + len(keys) - len(query) - torch.arange(len(keys))
        hidden = torch.from_numpy(~np.isin(everything, visible)).expand_as(distance)
        if self.causal[name]:
            hidden = hidden | (distance < 0)
            if impl.sliding_window is not None:  # as the operator counts: the token that many before is visible
                hidden |= distance > impl.sliding_window
        expected = masked_attention(query, keys, values, scale=impl.scale, hidden=hidden, sink=impl.sinks)
        difference = (call.output[first:last] - expected).abs().max().item()
        self.worst = max(self.worst, difference)
        self.windowed_rows += len(visible) < len(everything)
        assert difference < self._tolerance, f"{name}, request {row}: {difference} away from the masked reference"


class SpeculatorReference(DraftReference):
    """For a speculator of Model Runner V2, whose originals are always at hand."""

    def __init__(self, speculator: Any) -> None:
        self._group = {
            name: gid
            for gid, groups in enumerate(speculator.attn_groups)
            for group in groups
            for name in group.layer_names
        }
        super().__init__(speculator.vllm_config, set(self._group))
        self._speculator = speculator
        tables = speculator.block_tables
        # Held from the start: a build may leave other tensors in their place.
        self._full_lens, self._full_tables = speculator.input_buffers.seq_lens, list(tables.input_block_tables)
        self._sizes = tables.kernel_block_sizes


class ParallelReference(SpeculatorReference):
    """For the parallel drafters of Model Runner V2; padding rows and slot mappings are checked too."""

    def __init__(self, speculator: Any, window: int | None, *, sink: int = 0, min_context: int = 0) -> None:
        super().__init__(speculator)
        groups = sorted(set(self._group.values()))
        self.case = Case(
            window=window or speculator.max_model_len,
            sink=sink,
            min_context=min_context,
            block_sizes=tuple(self._sizes[g] for g in groups),
            full_columns=tuple(self._full_tables[g].shape[1] for g in groups),
            max_model_len=speculator.max_model_len,
            queries=speculator.num_query_per_req,
        )
        model = speculator.model
        self.causal = dict(zip(model.get_draft_kv_cache_layer_names(), model.get_draft_attn_causal(), strict=True))

    def _check_call(self, name: str, call: Call) -> None:
        live, queries = self._speculator.input_batch.num_reqs, self.case.queries
        assert call.table is not None
        assert list(call.query_ends[:live]) == [(row + 1) * queries for row in range(live)]
        assert not any(call.kv_lens[live:]), f"lengths of padding rows: {call.kv_lens[live:]}"
        assert not call.table[live:].any(), "tables of padding rows"
        gid = self._group[name]
        full_table, size = self._full_tables[gid].numpy(), self._sizes[gid]
        self._check_slots(gid, full_table, live)
        for row in range(live):
            self._compare(
                name,
                row,
                call,
                case=self.case,
                full_len=int(self._full_lens[row]),
                full_row=full_table[row],
                size=size,
                decided_at=self._decided_at(row),
            )

    def _decided_at(self, row: int) -> int | None:
        return None

    def _check_slots(self, gid: int, full_table: np.ndarray, live: int) -> None:
        """The draft's own tokens are written at absolute positions, through the full table."""
        queries, size = self.case.queries, self._sizes[gid]
        positions = self._speculator.input_buffers.positions[: live * queries].view(live, queries).numpy()
        slots = self._speculator.block_tables.slot_mappings[gid][: live * queries].view(live, queries).numpy()
        for row, position in enumerate(positions):
            inside = position < self.case.max_model_len - 1  # past the end the position is clamped, not the slot
            expected = oracle.physical_slots(full_table[row], size, position[inside])
            assert (slots[row][inside] == expected).all(), f"request {row}: slots {slots[row]}"


class AutoregressiveReference(SpeculatorReference):
    """For the autoregressive drafts of Model Runner V2: the original lengths are those of the step that runs.

    Attributes:
        steps: places in the proposal of the calls compared.
        replayed_tables: addresses of the tables that graphs were replayed with.
    """

    def __init__(self, speculator: Any, window: int, *, sink: int = 0, min_context: int = 0) -> None:
        super().__init__(speculator)
        self._options = dict(window=window, sink=sink, min_context=min_context)
        self.causal = dict.fromkeys(self._group, True)
        self.steps: set[int] = set()
        self.replayed_tables: set[int] = set()

    def _check_call(self, name: str, call: Call) -> None:
        if call.block_table is None:  # a whole prompt in one chunk reads no cache, and no window
            return
        speculator, gid = self._speculator, self._group[name]
        if NPUGraph.pending is not None:
            self.replayed_tables.add(call.block_table.data_ptr())
        live, steps = speculator.input_batch.num_reqs, speculator.num_speculative_steps
        step = int(speculator.current_draft_step)
        self.steps.add(step)
        assert not any(call.kv_lens[live:]), f"lengths of padding rows: {call.kv_lens[live:]}"
        full_table, size = self._full_tables[gid].numpy(), self._sizes[gid]
        queries = np.diff((0, *call.query_ends))
        assert step == 0 or (queries == 1).all()
        for row in range(live):
            case = Case(
                **self._options,
                block_sizes=(size,),
                full_columns=(full_table.shape[1],),
                max_model_len=speculator.max_model_len,
                queries=int(queries[row]),
                lookahead=steps - step,
                first_lookahead=steps,
            )
            full_len, decided_at = self._lengths(row, step)
            self._compare(
                name,
                row,
                call,
                case=case,
                full_len=full_len,
                full_row=full_table[row],
                size=size,
                decided_at=decided_at,
            )

    def _lengths(self, row: int, step: int) -> tuple[int, int | None]:
        """What attention could read without a window, and the length by which the host decided what it may not."""
        return int(self._full_lens[row]), None


class HostPlannedParallelReference(ParallelReference):
    """Where the host decides, and attention reads the device's lengths."""

    def _decided_at(self, row: int) -> int:
        speculator = self._speculator
        host_len = int(speculator.input_batch.seq_lens_np[row]) + self.case.queries
        return host_len - max_rejected(speculator.vllm_config)


class HostPlannedReference(AutoregressiveReference):
    """Where the host decides, and attention reads its lengths, rejected drafts among them."""

    def _lengths(self, row: int, step: int) -> tuple[int, int | None]:
        speculator = self._speculator
        host_len = int(speculator.input_batch.seq_lens_np[row]) + step
        return min(host_len, speculator.max_model_len), host_len - max_rejected(speculator.vllm_config)


class ProposerReference(DraftReference):
    """For the proposers of Model Runner V1: what a request could see follows from the positions of its queries.

    Attributes:
        steps: calls of the draft model in the proposals so far, by their place in the proposal.
    """

    def __init__(self, runner: Any, window: int | None) -> None:
        self._runner, self._proposer = runner, runner.drafter
        super().__init__(runner.vllm_config, set(self._proposer.attn_layer_names))
        self._window = window
        self._group = {
            name: gid
            for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
            if name in self._layers
        }
        model, method = self._proposer.model, self._proposer.method
        parallel = method in ("dflash", "dspark")
        # Draft positions beyond the lengths of the first forward; a parallel drafter has none.
        self._lookahead = 0 if parallel else self._proposer.num_speculative_tokens
        # The proposers give one causality to all layers.
        self.causal = dict.fromkeys(
            self._layers, not parallel or (method == "dspark" and model.get_draft_attn_causal()[0])
        )
        self._max_rejected = max_rejected(runner.vllm_config)
        self.steps: list[int] = []
        self._undo = [self._before(self._proposer, "set_inputs_first_pass", self._begin)]
        self._handle = model.register_forward_pre_hook(self._note_positions, with_kwargs=True)

    def close(self) -> None:
        self._handle.remove()
        for undo in self._undo:
            undo()

    def _before(self, owner: Any, name: str, action: Callable[[], None]) -> Callable[[], None]:
        method = getattr(owner, name)

        def with_action(*args: Any, **kwargs: Any) -> Any:
            action()
            return method(*args, **kwargs)

        setattr(owner, name, with_action)
        return lambda: delattr(owner, name)

    def _begin(self) -> None:
        self._step = -1
        self._host_lens = self._runner.optimistic_seq_lens_cpu.clone()

    def _note_positions(self, _: Any, args: Any, kwargs: Any) -> None:
        self._step += 1
        self.steps.append(self._step)
        self._positions = kwargs["positions"].clone()

    def _check_call(self, name: str, call: Call) -> None:
        gid = self._group[name]
        blocks = self._runner.input_batch.block_table[gid]
        table, size = blocks.get_device_tensor().numpy(), blocks.block_size
        if self._step == 0:
            # [num_reqs]
            self._first_queries = np.diff((0, *call.query_ends))
            self._first_lens = self._positions[torch.tensor(call.query_ends) - 1].numpy() + 1
        if call.block_table is None:  # a whole prompt in one chunk reads no cache, and no window
            return
        for row in range(len(call.query_ends)):
            case = Case(
                window=self._window or self._runner.max_model_len,
                block_sizes=(size,),
                full_columns=(table.shape[1],),
                max_model_len=self._runner.max_model_len,
                # The start is that of the first forward, whose query tokens all stay visible.
                queries=int(self._first_queries[row]) + self._step,
                lookahead=max(self._lookahead - self._step, 0),
            )
            # Later steps count on from the first, tokens among them that were rejected: so does vLLM-Ascend.
            full_len = int(self._first_lens[row]) + self._step
            if self._step and full_len > case.max_model_len:  # such a draft is thrown away
                assert call.kv_lens[row] == 1, f"{name}, request {row}: {call.kv_lens[row]} tokens past the end"
                continue
            decided_at = None
            if self._lookahead:  # token by token, attention reads its lengths on the host
                decided_at = int(self._host_lens[row]) - self._max_rejected + self._step
            self._compare(
                name, row, call, case=case, full_len=full_len, full_row=table[row], size=size, decided_at=decided_at
            )
