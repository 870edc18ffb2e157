# SPDX-License-Identifier: Apache-2.0
"""Backends of vLLM-Ascend that plan on the host (public case 13), and what cannot be windowed."""

import copy
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.worker.utils import AttentionGroup

from tests import oracle
from tests.ascend.check_waits import watched
from tests.ascend.engine import BLOCK_SIZE, ascend_engine
from tests.ascend.steps import ScriptedSteps
from tests.e2e.drafts import speculation
from tests.oracle import Case
from vllm_ascend.attention import mla_v1, sfa_v1
from vllm_ascend.attention.attention_v1 import AscendAttentionBackend
from vllm_ascend.attention.dsa_v1 import AscendDSABackend, AscendDSAC4Backend, AscendDSAC128Backend, AscendDSASWABackend
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec, AscendSFAIndexerCacheSpec
from vllm_ascend.draft_window.config import WindowOff
from vllm_ascend.draft_window.groups import inspect_draft_layers
from vllm_ascend.draft_window.seams import ascend

WINDOW = 512
MAX_MODEL_LEN = 2048
LENGTHS = [300, 1500, 129]  # those of public case 13
SPEC = AscendMLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def speculator(tmp_path_factory):
    layout = speculation("dspark-anchor", tmp_path_factory.mktemp("draft"))
    with ascend_engine(layout, max_model_len=MAX_MODEL_LEN, draft_window_size=WINDOW) as engine:
        assert isinstance(engine.speculator.window, ascend.HostDecidedWindow)
        yield engine.speculator


@pytest.fixture
def planned_by(speculator, monkeypatch):
    """Let a backend's own builder make the running draft's metadata; RoPE and MLA dimensions are not looked at."""

    def parent_init(self, spec, layer_names, vllm_config, device, metadata_cls=None, *_):
        self.kv_cache_spec, self.layer_names, self.device = spec, layer_names, device
        self.vllm_config, self.model_config, self.metadata_cls = vllm_config, vllm_config.model_config, metadata_cls

    def swap(module, backend, builder_class):
        config = speculator.vllm_config
        monkeypatch.setattr(MLACommonMetadataBuilder, "__init__", parent_init)
        monkeypatch.setattr(module, "get_cos_and_sin_mla", lambda positions, **_: (positions, positions))
        monkeypatch.setattr(config.model_config.hf_text_config, "qk_rope_head_dim", 16, raising=False)
        names = sorted(speculator.draft_attn_layer_names)
        group = AttentionGroup(backend, names, SPEC, 0)
        group.metadata_builders = [builder_class(SPEC, names, config, CPU)]
        monkeypatch.setattr(speculator, "attn_groups", [[group]])
        monkeypatch.setattr(speculator.window, "host_decides", ascend.plans_on_host([[group]], parallel=True))

    return swap


def build(speculator, seq_lens, num_reqs_padded):
    """The second of the two builds around a FULL replay, by the speculator's own method."""
    ScriptedSteps(speculator).prepare(seq_lens)
    bound = speculator.input_batch.seq_lens_cpu_upper_bound
    (metadata,) = speculator.build_draft_attn_metadatas(num_reqs_padded, bound)
    return next(iter(metadata.values()))


def windowed(speculator, seq_lens):
    tables = speculator.block_tables
    case = Case(
        window=WINDOW,
        block_sizes=(BLOCK_SIZE,),
        full_columns=(tables.input_block_tables[0].shape[1],),
        max_model_len=MAX_MODEL_LEN,
        queries=speculator.num_query_per_req,
    )
    return [oracle.windowed_length(case, s) for s in seq_lens]


def reads_the_null_block(decode):
    # [num_reqs]
    columns_read = -(-torch.tensor(decode.seq_lens_list) // BLOCK_SIZE)
    return bool((columns_read > decode.block_table.count_nonzero(dim=1)).any())


@pytest.mark.parametrize("padded", [3, 8])
def test_case_13_mla_reads_what_the_request_has(speculator, planned_by, padded):
    planned_by(mla_v1, mla_v1.AscendMLABackend, mla_v1.AscendMLAMetadataBuilder)
    decode = build(speculator, LENGTHS, padded).decode
    assert decode.seq_lens_list == windowed(speculator, LENGTHS) + [0] * (padded - 3)
    twin = speculator.window.inputs.block_tables[0]
    assert decode.block_table.data_ptr() == twin.data_ptr() and decode.block_table.shape == (padded, twin.shape[1])
    assert not reads_the_null_block(decode)


def test_without_host_lengths_mla_would_read_the_longest_for_every_request(speculator, planned_by, monkeypatch):
    """What makes them necessary: the null block behind the second and third request's own columns."""
    planned_by(mla_v1, mla_v1.AscendMLABackend, mla_v1.AscendMLAMetadataBuilder)
    monkeypatch.setattr(speculator.window, "host_decides", False)
    decode = build(speculator, LENGTHS, 3).decode
    assert len(set(decode.seq_lens_list)) == 1
    assert reads_the_null_block(decode)


@pytest.mark.parametrize("padded", [3, 8])
def test_sfa_reads_the_same_on_both_sides(speculator, planned_by, padded):
    planned_by(sfa_v1, sfa_v1.AscendSFABackend, sfa_v1.AscendSFAMetadataBuilder)
    first = build(speculator, LENGTHS, padded)
    expected = windowed(speculator, LENGTHS) + [0] * (padded - 3)
    assert first.seq_lens.tolist() == first.seq_lens_cpu.tolist() == expected
    table, lengths = first.block_table.data_ptr(), first.seq_lens.data_ptr()
    second = build(speculator, [2000, 17], padded)
    assert (
        second.seq_lens.tolist()
        == second.seq_lens_cpu.tolist()
        == windowed(speculator, [2000, 17]) + [0] * (padded - 2)
    )
    assert (second.block_table.data_ptr(), second.seq_lens.data_ptr()) == (table, lengths), "graphs keep addresses"
    assert not second.block_table[2:].any()


def test_gqa_reads_the_devices_lengths(speculator):
    assert speculator.vllm_config.speculative_config.parallel_drafting
    assert not ascend.plans_on_host(speculator.attn_groups, parallel=True)
    assert ascend.plans_on_host(speculator.attn_groups, parallel=False)
    assert speculator.attn_groups[0][0].backend is AscendAttentionBackend
    metadata = build(speculator, LENGTHS, 8)
    assert metadata.seq_lens_list == windowed(speculator, LENGTHS) + [0] * 5
    assert metadata.actual_seq_lengths_q == [(i + 1) * speculator.num_query_per_req for i in range(8)]


def test_originals_come_back_when_a_build_fails(speculator, monkeypatch):
    from vllm.v1.worker.gpu.spec_decode import speculator as upstream

    before = upstream.build_attn_metadata
    monkeypatch.setattr(speculator.window, "host_decides", True)
    monkeypatch.setattr(speculator, "attn_groups", [[SimpleNamespace(get_metadata_builder=lambda _: 1 / 0)]])
    with pytest.raises(ZeroDivisionError):
        build(speculator, LENGTHS, 3)
    assert upstream.build_attn_metadata is before
    assert speculator.input_buffers.seq_lens is not speculator.window.inputs.seq_lens


@pytest.mark.parametrize("backend", [AscendDSABackend, AscendDSAC4Backend, AscendDSAC128Backend, AscendDSASWABackend])
def test_dsa_is_off(backend):
    off = inspect_draft_layers([AttentionGroup(backend, ["draft.0"], SPEC, 0)])
    assert isinstance(off, WindowOff)
    assert off.reason.startswith(f"the sparse backend {backend.get_name()} derives positions from seq_lens;")


def test_mla_and_sfa_caches_can_be_cropped():
    indexer = AscendSFAIndexerCacheSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
    layers = [
        AttentionGroup(mla_v1.AscendMLABackend, ["draft.0"], SPEC, 0),
        AttentionGroup(sfa_v1.AscendSFABackend, ["draft.1"], indexer, 0),
    ]
    assert inspect_draft_layers(layers) == 0


@pytest.mark.parametrize("size", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_context_parallelism_is_refused(speculator, size):
    config = copy.copy(speculator.vllm_config)
    config.parallel_config = copy.copy(config.parallel_config)
    setattr(config.parallel_config, size, 2)
    ascend_class = next(c for c in type(speculator).__mro__ if c.__name__ == "AscendDSparkSpeculator")
    with pytest.raises(ValueError, match=r"draft_window_size=512 is not supported with context parallelism \(size 2\)"):
        ascend_class(config, CPU)


@pytest.mark.parametrize(
    "backend",
    [
        (mla_v1, mla_v1.AscendMLABackend, mla_v1.AscendMLAMetadataBuilder),
        (sfa_v1, sfa_v1.AscendSFABackend, sfa_v1.AscendSFAMetadataBuilder),
    ],
    ids=["mla", "sfa"],
)
def test_nothing_is_read_back_for_backends_that_plan_on_the_host(speculator, planned_by, backend):
    planned_by(*backend)
    ScriptedSteps(speculator).prepare(LENGTHS)
    with watched(speculator, speculator.window) as reads:
        speculator.build_draft_attn_metadatas(8, speculator.input_batch.seq_lens_cpu_upper_bound)
    assert reads == []
