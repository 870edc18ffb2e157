# SPDX-License-Identifier: Apache-2.0
"""What the window promises about a running engine: identity, addresses, launches, errors, start-up."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.e2e.conftest import VLLM_VERSION
from tests.e2e.recorder import Recorder
from tests.e2e.test_lossless import MAX_TOKENS, WINDOW, mixed_prompts
from tests.option_mistakes import LOOK_ALIKES
from tools.demo_pair import DEMO_SPECULATION, demo_speculation
from vllm_draft_window.measuring.engine import Engine


def recorded_run(shared_engine, additional_config, *, window, prepare=lambda speculator: None):
    with shared_engine(
        speculative_config=DEMO_SPECULATION, additional_config=additional_config, max_model_len=1024
    ) as engine:
        prepare(engine.speculator)
        with Recorder(engine.speculator, window=window, compare=False) as recorder:
            tokens = engine.run(mixed_prompts(), max_tokens=MAX_TOKENS).tokens
    return recorder, tokens


@pytest.mark.parametrize("refreshed", [False, True], ids=["skipped", "refreshed"])
def test_window_that_covers_every_context_changes_nothing(refreshed, shared_engine, monkeypatch):
    """Slot mappings, lengths and every column that is read are bit-identical to *off*."""

    def always_refresh(speculator):
        """As if a FULL graph read the windowed tensors: every build uses them, also where nothing is cropped."""
        build = speculator.window.build
        monkeypatch.setattr(speculator.window, "build", lambda *args: build(*args[:-1], refreshed))

    off, tokens_off = recorded_run(shared_engine, {}, window=None)
    on, tokens_on = recorded_run(shared_engine, {"draft_window_size": 992}, window=992, prepare=always_refresh)
    assert tokens_on == tokens_off
    assert bool(on.windowed_addresses) == refreshed
    assert len(on.slots) == len(off.slots) > 0
    assert all(torch.equal(a, b) for a, b in zip(on.slots, off.slots, strict=True))
    assert len(on.metadata) == len(off.metadata) > 0
    for a, b in zip(on.metadata, off.metadata, strict=True):
        tables = a.pop("block_table"), b.pop("block_table")
        for row, length in enumerate(b["seq_lens"].tolist()):
            columns = -(-length // 32)
            assert torch.equal(tables[0][row, :columns], tables[1][row, :columns])
        for key in a:
            equal = torch.equal if isinstance(a[key], torch.Tensor) else type(a[key]).__eq__
            assert equal(a[key], b[key]), key


def test_one_pair_of_addresses_over_a_whole_run(shared_engine):
    recorder, _ = recorded_run(shared_engine, WINDOW, window=64)
    assert len(recorder.windowed_addresses) == 1
    assert len(recorder.addresses) > 10


def test_dummy_and_profile_runs_leave_no_state(shared_engine, without_speculation):
    """Idle data-parallel ranks and start-up run the draft on batches that nobody sent."""
    prompts = mixed_prompts()
    expected = without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    with shared_engine(speculative_config=DEMO_SPECULATION, additional_config=WINDOW, max_model_len=1024) as engine:
        counters = engine.speculator.window._counters
        first = engine.run(prompts[:3], max_tokens=MAX_TOKENS)
        counted = counters._totals
        engine.runner.profile_run()
        engine.runner._dummy_run(16, uniform_decode=True)
        assert counters._totals == counted > (0, 0, 0)
        second = engine.run(prompts, max_tokens=MAX_TOKENS)
    assert first.tokens == expected[:3]
    assert second.tokens == expected


class SynchronizingOps(TorchDispatchMode):
    """Operations that would wait for a device, or copy from one to the host."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten._to_copy,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
        ):
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_one_launch_per_build_that_crops_none_otherwise_and_no_synchronization(monkeypatch):
    """Counted around every step of the window, in a batch that grows past the window."""
    from vllm_ascend.draft_window import kernels

    launches = 0
    launch = kernels.Launch.__call__

    def counting(self, *args):
        nonlocal launches
        launches += 1
        launch(self, *args)

    monkeypatch.setattr(kernels.Launch, "__call__", counting)
    steps = []
    with Engine(speculative_config=DEMO_SPECULATION, additional_config=WINDOW, max_model_len=1024) as engine:
        speculator, window = engine.speculator, engine.speculator.window
        build = window.build

        def counted_build(upstream, *args, **kwargs):
            def unwatched(upper_bound):
                with _disable_current_modes():
                    return upstream(upper_bound)

            before, operations = launches, SynchronizingOps()
            with operations:
                metadata = build(unwatched, *args, **kwargs)
            longest = int(speculator.input_buffers.seq_lens.max())
            steps.append((longest, launches - before, operations.seen))
            return metadata

        window.build = counted_build
        with SynchronizingOps() as control:
            speculator.input_buffers.seq_lens.max().item()
        assert control.seen, "the detector does not see a device-to-host copy"
        engine.run([mixed_prompts()[1][-40:]], max_tokens=70)
    assert {len(seen) for _, _, seen in steps} == {0}
    # W = 64 for each of 7 rows, in blocks of 32: the first crop is at 102 tokens; the host may be 2 proposals ahead.
    assert {count for longest, count, _ in steps if longest >= 102} == {1}
    assert {count for longest, count, _ in steps if longest < 102 - 2 * 8} == {0}


@pytest.mark.skipif(VLLM_VERSION >= (0, 32), reason="vLLM 0.32 leaves builds before replays out by itself")
@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_builds_that_wait_for_their_forward(method, without_speculation):
    """As with FlashAttention on a GPU: here no builder says that it allows it, though in eager mode every one does."""
    prompts = mixed_prompts()
    with Engine(speculative_config=demo_speculation(method), additional_config=WINDOW, max_model_len=1024) as engine:
        speculator = engine.speculator
        speculator.window.defers_builds = True
        recorder = Recorder(speculator, window=64)
        tokens = engine.run(prompts, max_tokens=MAX_TOKENS).tokens
    assert tokens == without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    assert recorder.windowed_rows > 100 and len(recorder.windowed_addresses) == 1


def test_exception_in_the_build_leaves_everything_as_it_was_and_the_next_step_is_right(without_speculation):
    prompts = mixed_prompts()
    expected = without_speculation(prompts, max_tokens=MAX_TOKENS, max_model_len=1024)
    with Engine(speculative_config=DEMO_SPECULATION, additional_config=WINDOW, max_model_len=1024) as engine:
        speculator = engine.speculator
        recorder = Recorder(speculator, window=64)
        (group,) = (group for groups in speculator.attn_groups for group in groups)
        builder = group.get_metadata_builder(0)
        build, propose, failures = builder.build, speculator.propose, []

        def build_that_fails_once(*args, **kwargs):
            if len(recorder.addresses) > 6 and not failures:
                failures.append(speculator.input_buffers.seq_lens)
                raise RuntimeError("the build failed")
            return build(*args, **kwargs)

        def propose_that_survives(input_batch, *args, **kwargs):
            before = speculator.input_buffers, speculator.block_tables
            try:
                return propose(input_batch, *args, **kwargs)
            except RuntimeError:
                assert failures[0] is speculator.window.inputs.seq_lens, "the failing build was a windowed one"
                assert (speculator.input_buffers, speculator.block_tables) == before
                assert speculator.draft_max_seq_len > 64 + 31
                return speculator.draft_tokens[: input_batch.num_reqs]

        builder.build, speculator.propose = build_that_fails_once, propose_that_survives
        tokens = engine.run(prompts, max_tokens=MAX_TOKENS).tokens
    assert failures
    assert tokens == expected
    assert recorder.windowed_rows > 100


def test_capture_bakes_in_the_windowed_tensors_and_plans_for_the_window(monkeypatch):
    """Graphs cannot be captured on a CPU; what capture would give the attention builder can be looked at."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

    seen = []
    with Engine(speculative_config=DEMO_SPECULATION, additional_config=WINDOW, max_model_len=1024) as engine:
        speculator = engine.speculator
        (group,) = (group for groups in speculator.attn_groups for group in groups)
        builder = group.get_metadata_builder(0)
        build = builder.build_for_cudagraph_capture
        builder.build_for_cudagraph_capture = lambda common: seen.append(common) or build(common)
        queries = speculator.num_query_per_req
        desc = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=4 * queries, num_reqs=4)
        speculator.query_cudagraph_manager._capture_descs = {CUDAGraphMode.FULL: [desc]}
        monkeypatch.setattr(
            CudaGraphManager, "capture", lambda self, create_forward_fn, *_, **__: create_forward_fn(desc, False)
        )
        originals = speculator.input_buffers, speculator.block_tables, speculator.query_cudagraph_manager
        speculator.capture()
        window = speculator.window
        assert (speculator.input_buffers, speculator.block_tables, speculator.query_cudagraph_manager) == originals
        assert window.captured and not window.capturing
    (common,) = seen
    assert common.seq_lens.data_ptr() == window.inputs.seq_lens.data_ptr()
    assert common.block_table_tensor.data_ptr() == window.inputs.block_tables[0].data_ptr()
    assert common.max_seq_len == window.geometry.max_length == 64 + 6 + 31
    assert speculator.max_model_len == 1024


def test_a_vllm_that_nobody_has_tested_gets_one_warning_and_works(monkeypatch, window_lines):
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with Engine(speculative_config=DEMO_SPECULATION, additional_config=WINDOW, max_model_len=1024) as engine:
        assert engine.run(mixed_prompts()[3:4], max_tokens=4).drafts > 0
    newest = "vLLM 0.34.0 is newer than 0.33, the newest that the draft window was tested with"
    assert [said for said in window_lines if "0.34.0" in said[1]] == [("WARNING", f"Draft window: {newest}.")]
    assert window_lines[-1][1].startswith("Draft window in force: method=dspark, W=64")


def test_start_up_line(window_lines):
    with Engine(
        speculative_config=DEMO_SPECULATION,
        additional_config={"draft_window_size": 64, "draft_window_sink_size": 4, "draft_window_min_context": 200},
        max_model_len=1024,
    ) as engine:
        assert type(engine.speculator).__name__ == "WindowedDSparkSpeculator"
    (warning, (level, line)) = window_lines
    assert warning[0] == "WARNING" and "in whole blocks of 32 tokens, draft_window_size=64 shows" in warning[1]
    assert level == "INFO"
    # Gate: up to 199 tokens uncropped; ceil(199 / 32) columns.
    assert line.startswith(
        "Draft window in force: method=dspark, W=64, sink=4, min_context=200, block alignment=32, "
        "tokens seen=96 to 127, table columns=[7], KV cache groups=[0], runner=V2 (WindowedDSparkSpeculator), "
        "decode graphs=NONE"
    )


@pytest.mark.parametrize(
    ("engine_args", "additional_config", "level", "reason"),
    [
        ({}, {"draft_window_size": 1024}, "INFO", "draft_window_size=1024 covers max_model_len=1024"),
        ({"speculative_config": None}, WINDOW, "WARNING", "speculative decoding is not configured"),
        (
            {"block_size": 1056, "max_model_len": 2048},
            {"draft_window_size": 512, "draft_window_sink_size": 4},
            "INFO",
            "draft_window_size=512 and draft_window_sink_size=4, in whole blocks of 1056 tokens, cover max",
        ),
        # 8 MiB hold fewer tokens than the 8192 that the model was made for, and vLLM fits the length to them.
        (
            {"max_model_len": -1, "kv_cache_memory_bytes": 8 << 20, "max_num_batched_tokens": 512},
            {"draft_window_size": 4000},
            "INFO",
            "draft_window_size=4000 covers max_model_len=",
        ),
    ],
    ids=["covers-everything", "no-speculation", "large-blocks", "fitted-length"],
)
def test_option_that_cannot_act_says_so_once(engine_args, additional_config, level, reason, window_lines):
    with Engine(
        **(
            dict(speculative_config=DEMO_SPECULATION, max_model_len=1024)
            | engine_args
            | {"additional_config": additional_config}
        )
    ) as engine:
        assert getattr(engine.speculator, "window", None) is None
    ((said_at, line),) = window_lines
    assert said_at == level and line.startswith(f"Draft window off: {reason}")


def test_without_the_option_nothing_is_wrapped_and_nothing_is_said(window_lines):
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    with Engine(speculative_config=DEMO_SPECULATION, max_model_len=1024) as engine:
        assert type(engine.speculator) is DSparkSpeculator
    assert window_lines == []


@pytest.mark.parametrize(
    ("additional_config", "message"),
    [
        ({"draft_window_size": "64"}, "draft_window_size='64' is not allowed: it must be an integer greater than 0"),
        ({"draft_window_size": 6}, "draft_window_size=6 is too small for dspark: it must be at least 7"),
        ({"draft_window_sise": 64}, "did you mean 'draft_window_size'"),
        ({"draft_window_sink_size": 4}, "draft_window_sink_size needs draft_window_size"),
    ],
)
def test_bad_option_stops_the_start(additional_config, message):
    with pytest.raises(ValueError, match=message):
        Engine(speculative_config=DEMO_SPECULATION, additional_config=additional_config, max_model_len=1024)


@pytest.mark.parametrize("additional_config", LOOK_ALIKES, ids=str)
def test_look_alike_stops_the_start(additional_config):
    with pytest.raises(ValueError, match="did you mean 'draft_window_size'"):
        Engine(speculative_config=DEMO_SPECULATION, additional_config=additional_config, max_model_len=1024)


def test_plugin_is_found_by_vllm_and_registers_once():
    from vllm.plugins import load_plugins_by_group
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
    from vllm.v1.worker.worker_base import WorkerBase

    register = load_plugins_by_group("vllm.general_plugins")["draft_window"]
    register()
    hooks = DraftModelSpeculator.__new__, WorkerBase.__init__
    register()
    assert hooks == (DraftModelSpeculator.__new__, WorkerBase.__init__)
