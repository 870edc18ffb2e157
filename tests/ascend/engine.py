# SPDX-License-Identifier: Apache-2.0
"""vLLM-Ascend's own model runners inside a vLLM engine on this CPU, target and draft on its attention backend.

Not a line of the runners, of the speculators and proposers or of the attention backend is replaced; vLLM's CPU worker
starts the runner, and the operators are the stand-ins of ``fia.py``.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu import model_runner as cpu_model_runner

from tests.ascend.fia import watch
from tests.ascend.npu import has_window
from tests.ascend.reference import DraftReference, ParallelReference
from tools.demo_pair import DEMO_PAIR
from vllm_ascend.ascend_config import init_ascend_config
from vllm_ascend.attention import utils as attention_utils
from vllm_ascend.compilation import acl_graph
from vllm_ascend.ops.triton import triton_utils
from vllm_ascend.sample import rejection_sampler
from vllm_ascend.worker import model_runner_v1
from vllm_ascend.worker.v2.model_runner import NPUModelRunner
from vllm_draft_window.measuring.engine import Engine

MAX_MODEL_LEN = 1024
BLOCK_SIZE = 128

Reference = TypeVar("Reference", bound=DraftReference)


class RunnerOnCpu(NPUModelRunner):
    """What vLLM-Ascend's worker does around its runner, and vLLM's CPU worker does not."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        init_ascend_config(vllm_config)
        triton_utils.init_device_properties_triton()
        super().__init__(vllm_config, device)

    def warming_up_model(self) -> None:
        self.profile_run()


class RunnerV1OnCpu(model_runner_v1.NPUModelRunner):
    """The same for Model Runner V1."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        init_ascend_config(vllm_config)
        super().__init__(vllm_config, device)

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model()

    def warming_up_model(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            self.profile_run()

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        with set_current_vllm_config(self.vllm_config):
            return super().execute_model(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        with set_current_vllm_config(self.vllm_config):
            return super().sample_tokens(*args, **kwargs)


cpu_model_runner.CPUModelRunner = RunnerOnCpu
cpu_worker.CPUModelRunner = RunnerV1OnCpu
CpuPlatform.graph_pool_handle = classmethod(lambda cls: object())
CpuPlatform.opaque_attention_op = classmethod(lambda cls: False)
CpuPlatform.get_attn_backend_cls = classmethod(
    lambda cls, *_, **__: "vllm_ascend.attention.attention_v1.AscendAttentionBackend"
)
if not has_window(os.environ["VLLM_ASCEND_SRC"]):
    from vllm_ascend.draft_window import plugin

    plugin.register()
rejection_sampler.HAS_TRITON = False  # its kernels use operations of triton-ascend; then it is plain torch
_rotary_embedding = _custom_ops.rotary_embedding
# The device's operator takes the int32 positions of Model Runner V1.
_custom_ops.rotary_embedding = lambda positions, *args: _rotary_embedding(positions.long(), *args)


@contextmanager
def ascend_engine(
    speculation: dict[str, Any] | None,
    *,
    model: Path = DEMO_PAIR / "target",
    runner: int = 2,
    max_model_len: int = MAX_MODEL_LEN,
    **options: Any,
) -> Iterator[Engine]:
    """An engine whose model runner, of that version, is vLLM-Ascend's; ``options`` go into ``additional_config``."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == 2))
    acl_graph._graph_params = acl_graph._draft_graph_params = None
    for name in {"enable_dcp", "enable_pcp"} & set(vars(attention_utils)):  # 0.26 has the first only
        vars(attention_utils)[name].cache_clear()
    with Engine(
        model,
        speculative_config=speculation,
        additional_config=options,
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
        max_num_seqs=20,
        kv_cache_memory_bytes=160 << 20,
    ) as engine:
        _note_layers(engine.runner)
        yield engine


def _note_layers(runner: Any) -> None:
    """Tell the stand-in which layer a query belongs to; layers of different KV cache groups share their memory."""
    for layer in runner.vllm_config.compilation_config.static_forward_context.values():

        def noted(module: Any, query: Any, *args: Any, forward: Any = layer.impl.forward, **kwargs: Any) -> Any:
            watch.layers[query.data_ptr()] = module.layer_name
            return forward(module, query, *args, **kwargs)

        layer.impl.forward = noted


def source_code(length: int) -> list[int]:
    """A prompt of Python source, which the byte-level demo pair was trained on."""
    return list(Path(__file__).read_bytes()[:length])


def capture_graphs(speculator: Any, sizes: Sequence[int]) -> None:
    """Capture a parallel drafter's FULL graphs of so many requests, as the runner does where graphs are on."""
    _capture(speculator, [size * speculator.num_query_per_req for size in sizes])
    assert len(speculator.query_cudagraph_manager.graphs) == len(sizes)


def capture_autoregressive_graphs(speculator: Any, tokens: Sequence[int]) -> list[list[Any]]:
    """Capture FULL graphs of so many tokens; returns those of the first step, and those of all later ones together."""
    _capture(speculator, tokens)
    managers = [speculator.prefill_cudagraph_manager, speculator.decode_cudagraph_manager]
    graphs = [list(manager.graphs.values()) for manager in managers[: speculator.num_speculative_steps]]
    assert all(graphs)
    return graphs


def _capture(speculator: Any, tokens: Sequence[int]) -> None:
    acl_graph._draft_graph_params = acl_graph._draft_graph_prefill_params = None
    config = speculator.vllm_config.compilation_config
    config.cudagraph_capture_sizes = list(tokens)
    config.max_cudagraph_capture_size = max(tokens)
    speculator.update_stream = torch.npu.Stream()
    speculator.idx_mapping.zero_()  # as before the first batch: dummy requests are state 0
    speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
    with watch.dummy_batches():
        speculator.capture()


@contextmanager
def compared(
    speculator: Any, window: int | None, reference_class: type[Reference] = ParallelReference, **options: int
) -> Iterator[Reference]:
    """Every draft attention inside equals a masked reference over the unwindowed table."""
    reference = reference_class(speculator, window, **options)
    watch.listeners.append(reference)
    try:
        yield reference
    finally:
        watch.listeners.remove(reference)
