# SPDX-License-Identifier: Apache-2.0
"""What FULL graphs and fused loops of an autoregressive draft rely on, as far as it runs without a GPU."""

from types import SimpleNamespace

import pytest

from tests.e2e.conftest import VLLM_VERSION
from tests.e2e.test_autoregressive import MAX_TOKENS, WINDOW, mixed_prompts, record
from tests.parity import eagle3_draft
from vllm_draft_window.measuring.engine import Engine


def capture_without_graphs(speculator, num_reqs: int) -> list[SimpleNamespace]:
    """Run what capture records, once per graph; returns what each attention builder was given and what came of it."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    seen = []
    (group,) = (group for groups in speculator.attn_groups for group in groups)
    builder = group.get_metadata_builder(0)
    build = builder.build_for_cudagraph_capture
    builder.build_for_cudagraph_capture = lambda common: seen.append(SimpleNamespace(common=common)) or build(common)
    for manager, queries in (
        (speculator.prefill_cudagraph_manager, speculator.num_speculative_steps + 1),
        (speculator.decode_cudagraph_manager, 1),
    ):
        desc = BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.FULL, num_tokens=num_reqs * queries, num_reqs=num_reqs, uniform_token_count=queries
        )
        manager._capture_descs = {CUDAGraphMode.FULL: [desc]}
    originals = speculator.input_buffers.seq_lens
    speculator.current_draft_step.zero_()  # the last step of a proposal advances nothing

    def run_once(self, create_forward_fn, *_, **__):
        (desc,) = self._capture_descs[CUDAGraphMode.FULL]
        forward = create_forward_fn(desc, False)
        windowed = seen[-1].common.seq_lens
        before = [lengths[:num_reqs].clone() for lengths in (originals, windowed)]
        forward(CUDAGraphMode.NONE)
        seen[-1].advanced, seen[-1].windowed_advanced = (
            (lengths[:num_reqs] - old).tolist() for lengths, old in zip((originals, windowed), before, strict=True)
        )

    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    real, CudaGraphManager.capture = CudaGraphManager.capture, run_once
    try:
        speculator.capture()
    finally:
        CudaGraphManager.capture = real
    return seen


def test_capture_bakes_in_the_windowed_tensors_and_advances_the_originals(tmp_path):
    with Engine(
        speculative_config=eagle3_draft.speculation(tmp_path, num_tokens=3),
        additional_config=WINDOW,
        max_model_len=1024,
    ) as engine:
        speculator, names = engine.speculator, ("prefill_cudagraph_manager", "decode_cudagraph_manager")
        window, managers = speculator.window, [getattr(speculator, name) for name in names]
        first_step, later_step = capture_without_graphs(speculator, num_reqs=4)
        assert [getattr(speculator, name) for name in names] == managers
    for graph in (first_step, later_step):
        assert graph.common.seq_lens.data_ptr() == window.inputs.seq_lens.data_ptr()
        assert graph.common.block_table_tensor.data_ptr() == window.inputs.block_tables[0].data_ptr()
        assert graph.common.query_start_loc.data_ptr() == speculator.input_buffers.query_start_loc.data_ptr()
    # A later step of the graph reads windowed lengths, and advances those that the next build starts from.
    assert (first_step.advanced, later_step.advanced) == ([0] * 4, [1] * 4)
    assert not any(first_step.windowed_advanced + later_step.windowed_advanced)
    assert window.captured and not window.capturing


def test_first_step_is_built_before_its_graph_is_replayed(tmp_path, monkeypatch):
    """Nothing is replayed on a CPU: upstream's proposal is taken over by one that replays at once."""
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

    events = []
    desc, batch = SimpleNamespace(num_reqs=4, num_tokens=16), SimpleNamespace(num_reqs=2)
    with Engine(
        speculative_config=eagle3_draft.speculation(tmp_path, num_tokens=3),
        additional_config=WINDOW,
        max_model_len=1024,
    ) as engine:
        speculator = engine.speculator
        manager = speculator.prefill_cudagraph_manager
        manager.run_fullgraph = lambda desc: events.append(("replay", desc))
        speculator.build_first_step = lambda *args: events.append(("build", *args))
        monkeypatch.setattr(
            EagleSpeculator,
            "propose",
            lambda self, *_, **__: self.prefill_cudagraph_manager.run_fullgraph(desc),
            raising=False,
        )
        nothing = [None] * 5
        speculator.propose(batch, *nothing, dummy_run=True)  # so that the batch needs no lengths to count
        assert speculator.prefill_cudagraph_manager is manager
        speculator.window = None
        speculator.propose(batch, *nothing)
    assert events == [("build", batch, 16, desc), ("replay", desc), ("replay", desc)]


@pytest.mark.skipif(VLLM_VERSION < (0, 32), reason="the fused loop as tested here came with vLLM 0.32")
def test_fused_loop_of_later_steps(tmp_path, monkeypatch, without_speculation):
    """Backends that can refresh their metadata run all later steps on one build; here the CPU's is taught to."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    def update_draft_decode_metadata(self, metadata):
        metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(metadata.seq_lens),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=metadata.seq_lens,
            dtype=self.dtype,
            query_start_loc=metadata.query_start_loc,
            causal=True,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=False,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    monkeypatch.setattr(CPUAttentionMetadataBuilder, "supports_draft_decode_metadata_update", True)
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "update_draft_decode_metadata", update_draft_decode_metadata)
    prompts = mixed_prompts()
    with Engine(
        speculative_config=eagle3_draft.speculation(tmp_path, num_tokens=7),
        additional_config=WINDOW,
        max_model_len=1024,
    ) as engine:
        assert engine.speculator.supports_decode_metadata_update
        recorder, counted = record(engine, WINDOW), engine.speculator.window._counters
        windowed = engine.run(prompts, max_tokens=MAX_TOKENS)
        # As in eager mode, although these forwards have one build.
        assert counted.builds == len(recorder.metadata)
    assert windowed.tokens == without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    assert recorder.windowed_rows > 50
    assert len(recorder.windowed_addresses) == 1
