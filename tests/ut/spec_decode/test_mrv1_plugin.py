# SPDX-License-Identifier: Apache-2.0
"""Model Runner V1 of an installed vLLM-Ascend: the shim takes the adapter's place, with the same options and rules.

The proposers here stand in for those of vLLM-Ascend, which import torch_npu; ``test_vllm_ascend_checkout.py`` runs the
same hooks on the real ones where a checkout is at hand.
"""

import copy
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.worker.utils import AttentionGroup

from tests.ut.spec_decode.metadata import make_metadata, make_table
from vllm_ascend.draft_window import mrv1
from vllm_ascend.draft_window.strict_config import hide_options
from vllm_ascend.spec_decode.sliding_window import SlidingWindowAdapter

CPU = torch.device("cpu")
PACKAGE = "vllm_ascend.spec_decode"


class UpstreamAdapter:
    """What vLLM-Ascend would have built."""

    def __init__(self, *args) -> None:
        self.args = args


@pytest.fixture
def proposers(monkeypatch):
    """Modules named, and classes shaped, like those of vLLM-Ascend's Model Runner V1."""
    utils, base, dspark = (ModuleType(f"{PACKAGE}.{n}") for n in ("utils", "llm_base_proposer", "dspark_proposer"))

    class AscendSpecDecodeBaseProposer:
        method = "eagle3"

        def __init__(self, vllm_config) -> None:
            self.vllm_config = vllm_config
            self.method = vllm_config.speculative_config.method
            self.num_speculative_tokens = vllm_config.speculative_config.num_speculative_tokens
            self.max_model_len = vllm_config.model_config.max_model_len
            self.device, self.runner = CPU, SimpleNamespace(max_num_reqs=4)
            self.draft_window_size = self.sliding_window = None
            self.model = torch.nn.Identity()
            self.updated: list = []
            self.built: list = []

        def load_model(self, model) -> None:
            self.kernel_block_size = 128
            self.options_seen = dict(self.vllm_config.additional_config)
            self.draft_window_size = self.vllm_config.additional_config.get("draft_window_size")
            if self.draft_window_size is not None:
                self.sliding_window = base.SlidingWindowAdapter(
                    self.draft_window_size, 128, 4, self.num_speculative_tokens, CPU
                )

        def initialize_attn_backend(self, groups) -> None:
            self.draft_attn_groups = groups

        def build_draft_attn_metadata(self, common_attn_metadata, *_):
            for group in self.draft_attn_groups:
                if self.method == "dspark":
                    common_attn_metadata = copy.copy(common_attn_metadata)
                    table = self._per_group_block_table_buffers[group.kv_cache_group_id]
                    common_attn_metadata.block_table_tensor = table[: common_attn_metadata.num_reqs]
                self.built.append(common_attn_metadata)

        def attn_update_stack_num_spec_norm(self, draft_index, old_common_metadata, *_):
            self.updated.append((draft_index, old_common_metadata.seq_lens.tolist()))

    class AscendDSparkProposer(AscendSpecDecodeBaseProposer):
        def initialize_attn_backend(self, groups) -> None:
            self.draft_attn_groups = groups

    utils.SlidingWindowAdapter = base.SlidingWindowAdapter = UpstreamAdapter
    base.AscendSpecDecodeBaseProposer, dspark.AscendDSparkProposer = AscendSpecDecodeBaseProposer, AscendDSparkProposer
    for module in (utils, base, dspark):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(utils=utils, base=base, dspark=dspark)


@pytest.fixture
def strict_config(proposers, monkeypatch):
    """vLLM-Ascend from 2026-08-30 on: the size comes from a config of its own, which is made before any proposer."""
    module = ModuleType("vllm_ascend.ascend_config")

    class AscendConfig:
        def __init__(self, *, draft_window_size: int | None = None, another_option: int = 0) -> None:
            self.draft_window_size = draft_window_size

    def load_model(self, model) -> None:
        self.kernel_block_size = 128
        self.draft_window_size = module.AscendConfig(**module.user_input).draft_window_size
        if self.draft_window_size is not None:
            self.sliding_window = proposers.base.SlidingWindowAdapter(self.draft_window_size, 128, 4, 3, CPU)

    module.AscendConfig = AscendConfig
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(proposers.base.AscendSpecDecodeBaseProposer, "load_model", load_model)
    return module


@pytest.mark.parametrize("hidden", [False, True], ids=["upstream", "with the plugin"])
def test_where_the_product_says_off_upstreams_adapter_is_off_too(proposers, strict_config, hidden):
    strict_config.user_input = {"draft_window_size": 512}
    if hidden:
        hide_options()
    proposer = load(proposers, make_config("mtp", draft_window_size=512))
    assert (proposer.sliding_window is None) == (proposer.draft_window_size is None) == hidden


def test_every_option_with_a_strict_config(proposers, strict_config):
    options = {"draft_window_size": 512, "draft_window_sink_size": 4, "draft_window_mtp": True}
    strict_config.user_input = {"another_option": 1, **options}
    hide_options()
    adapter = load(proposers, make_config("mtp", **options)).sliding_window
    assert (type(adapter), adapter.window_size, adapter._sink_size) == (SlidingWindowAdapter, 512, 4)


def make_config(method: str, *, max_model_len: int = 4096, tokens: int = 3, **options):
    return SimpleNamespace(
        additional_config={"another_option": 1, **options},
        speculative_config=SimpleNamespace(
            method=method,
            num_speculative_tokens=tokens,
            draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(max_position_embeddings=max_model_len)),
        ),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=SimpleNamespace(
            rank=0, decode_context_parallel_size=1, pipeline_parallel_size=1, tensor_parallel_size=1
        ),
    )


def load(proposers, config):
    mrv1.install()
    dspark = config.speculative_config.method == "dspark"
    cls = proposers.dspark.AscendDSparkProposer if dspark else proposers.base.AscendSpecDecodeBaseProposer
    proposer = cls(config)
    proposer.load_model(None)
    return proposer


def make_group(group_id: int, block_size: int, spec=None) -> AttentionGroup:
    spec = spec or FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    return AttentionGroup(CPUAttentionBackend, [f"draft.{group_id}"], spec, group_id)


def test_nothing_to_do_without_vllm_ascend():
    assert not mrv1.install()


def test_nothing_to_do_before_vllm_ascend_had_an_adapter(proposers):
    del proposers.base.SlidingWindowAdapter
    assert not mrv1.install()


def test_every_module_that_imported_the_adapter_gets_the_shim(proposers):
    assert mrv1.install()
    assert proposers.utils.SlidingWindowAdapter is SlidingWindowAdapter
    assert proposers.base.SlidingWindowAdapter is SlidingWindowAdapter
    load_model = proposers.base.AscendSpecDecodeBaseProposer.load_model
    assert mrv1.install()
    assert proposers.base.AscendSpecDecodeBaseProposer.load_model is load_model, "installed once"


@pytest.mark.parametrize(("method", "lookahead"), [("eagle3", 3), ("eagle", 3), ("draft_model", 3), ("dflash", 0)])
def test_the_window_in_force(proposers, method, lookahead):
    options = {"draft_window_size": 512, "draft_window_sink_size": 4, "draft_window_min_context": 100}
    proposer = load(proposers, make_config(method, **options))
    adapter = proposer.sliding_window
    assert isinstance(adapter, SlidingWindowAdapter)
    assert (proposer.draft_window_size, adapter.window_size, adapter.block_size) == (512, 512, 128)
    assert (adapter._future_offset, adapter._sink_size, adapter._min_context) == (lookahead, 4, 100)
    assert proposer.options_seen == {"another_option": 1}, "the proposer must not build an adapter by itself"
    assert proposer.vllm_config.additional_config == {"another_option": 1, **options}


def test_auto_stays_at_its_start(proposers):
    config = make_config("eagle3", draft_window_size="auto", draft_window_candidates=[256, 1024])
    config.use_v2_model_runner = False
    config.speculative_config.draft_model_config.hf_config.max_position_embeddings = 512
    proposer = load(proposers, config)
    assert proposer.sliding_window.window_size == 256
    said = "draft_window_size='auto' stays at 256 tokens: Model Runner V1 plans lengths on the host"
    assert said in proposer.draft_window.warnings


def test_no_option_no_window(proposers):
    proposer = load(proposers, make_config("eagle3"))
    assert proposer.sliding_window is None and proposer.draft_window_size is None


@pytest.mark.parametrize("size", [1, 512, 4096])
def test_mtp_is_not_windowed(proposers, size):
    """vLLM-Ascend itself windows it, and a window below K would give lengths of zero and less."""
    proposer = load(proposers, make_config("mtp", draft_window_size=size))
    assert proposer.sliding_window is None and proposer.draft_window_size is None


def test_mtp_is_windowed_on_demand(proposers):
    proposer = load(proposers, make_config("mtp", draft_window_size=512, draft_window_mtp=True))
    assert (proposer.sliding_window.window_size, proposer.sliding_window._future_offset) == (512, 3)


def test_a_drafting_loop_that_applies_no_window_says_so(proposers, window_lines):
    """As vLLM-Ascend's proposer for Step 3.5 has one."""
    mrv1.install()
    loop = type("OwnLoopProposer", (proposers.base.AscendSpecDecodeBaseProposer,), {"_propose": lambda self: None})
    proposer = loop(make_config("mtp", draft_window_size=512, draft_window_mtp=True))
    proposer.load_model(None)
    assert proposer.sliding_window is None
    ((level, line),) = window_lines
    assert level == "WARNING" and line.startswith("Draft window off: OwnLoopProposer has a drafting loop of its own")


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_a_window_over_the_whole_context_is_off(proposers, method):
    assert load(proposers, make_config(method, draft_window_size=4096)).sliding_window is None


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("eagle3", {"draft_window_size": 3}, "draft_window_size=3 is too small for eagle3: it must be at least 4"),
        ("dflash", {"draft_window_size": 3}, "draft_window_size=3 is too small for dflash: it must be at least 4"),
        ("eagle3", {"draft_window_size": "512"}, "draft_window_size='512' is not allowed"),
        ("eagle3", {"draft_window_size": 0}, "draft_window_size=0 is not allowed"),
        ("mtp", {"draft_window_size": True}, "draft_window_size=True is not allowed"),
        ("eagle3", {"draft_window_sise": 512}, "did you mean 'draft_window_size'"),
    ],
)
def test_option_mistakes(proposers, method, options, message):
    with pytest.raises(ValueError, match=message):
        load(proposers, make_config(method, **options))


def test_a_failing_load_leaves_the_options_alone(proposers, monkeypatch):
    def fail(self, model) -> None:
        raise RuntimeError("no weights")

    monkeypatch.setattr(proposers.base.AscendSpecDecodeBaseProposer, "load_model", fail)
    config = make_config("eagle3", draft_window_size=512)
    with pytest.raises(RuntimeError, match="no weights"):
        load(proposers, config)
    assert config.additional_config["draft_window_size"] == 512


def test_a_parallel_drafter_builds_every_group_from_its_cropped_table(proposers):
    proposer = load(proposers, make_config("dspark", draft_window_size=256))
    proposer.initialize_attn_backend([make_group(0, 128), make_group(2, 64)])
    assert proposer.sliding_window.block_size == 128
    tables = {0: make_table(4, 40), 2: make_table(4, 80, seed=1)}
    proposer._per_group_block_table_buffers = tables
    metadata = make_metadata([1000, 255], tables[0][:2])
    proposer.sliding_window.apply(metadata)
    metadata.seq_lens = metadata.seq_lens.clone()  # into a buffer of the proposer's
    proposer.build_draft_attn_metadata(metadata)
    first, second = proposer.built
    # start 1000 - 256 = 744, rounded down to 640
    assert torch.equal(first.block_table_tensor[0, :3], tables[0][0, 5:8])
    assert torch.equal(second.block_table_tensor[0, :6], tables[2][0, 10:16])
    assert torch.equal(second.block_table_tensor[1, :4], tables[2][1, :4])
    assert first.seq_lens.tolist() == second.seq_lens.tolist() == [360, 255]
    assert proposer._per_group_block_table_buffers is tables


def test_groups_of_blocks_that_no_other_divides_start_at_their_common_multiple(proposers):
    proposer = load(proposers, make_config("dspark", draft_window_size=256))
    proposer.initialize_attn_backend([make_group(0, 48), make_group(1, 64)])
    assert proposer.sliding_window.block_size == 192


def test_a_draft_is_not_shrunk_below_the_window_of_its_layers(proposers):
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = SlidingWindowSpec(block_size=128, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=2048)
    proposer = load(proposers, make_config("dspark", draft_window_size=256))
    proposer.initialize_attn_backend([make_group(0, 128), make_group(1, 128, spec)])
    assert proposer.draft_window_size == proposer.sliding_window.window_size == 2048


def test_the_line_comes_once_the_groups_are_known(proposers, window_lines):
    """Only then are the blocks, the draft's own window and the engine's length what they stay."""
    config = make_config("dspark", draft_window_size=256)
    proposer = load(proposers, config)
    assert not window_lines
    config.model_config.max_model_len = 1024  # fitted to the memory
    proposer.initialize_attn_backend([make_group(0, 48), make_group(1, 64)])
    (warning, (level, line)) = window_lines
    assert warning[0] == "WARNING" and "in whole blocks of 192 tokens" in warning[1]
    assert level == "INFO" and "W=256, " in line and "block alignment=192, tokens seen=256 to 447, " in line
    assert "runner=V1 (AscendDSparkProposer)" in line


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (256, "draft_window_size=256 covers max_model_len=256"),
        (300, "draft_window_size=256, in whole blocks of 128 tokens, covers max_model_len=300"),
    ],
)
def test_a_length_fitted_after_the_load_decides_again(proposers, window_lines, length, reason):
    config = make_config("dflash", draft_window_size=256)
    proposer = load(proposers, config)
    config.model_config.max_model_len = length
    proposer.initialize_attn_backend([make_group(0, 128)])
    assert proposer.sliding_window is proposer.draft_window_size is None
    assert window_lines == [("INFO", f"Draft window off: {reason}.")]


def test_a_draft_layer_without_an_attention_cache_is_refused(proposers):
    spec = MambaSpec(block_size=128, shapes=((1,),), dtypes=(torch.float32,))
    proposer = load(proposers, make_config("eagle3", draft_window_size=256))
    with pytest.raises(ValueError, match="does not support the draft's KV cache of type MambaSpec"):
        proposer.initialize_attn_backend([make_group(0, 128, spec)])


def test_later_steps_compare_unwindowed_lengths_with_the_limit(proposers):
    proposer = load(proposers, make_config("eagle3", draft_window_size=512))
    metadata = make_metadata([4096, 2000], make_table(2, 32))
    proposer.sliding_window.apply(metadata)
    proposer.attn_update_stack_num_spec_norm(1, metadata)
    windowed = 2000 - (2000 + 3 - 512) // 128 * 128
    assert proposer.updated == [(1, [0, windowed])]


def test_without_a_window_every_method_is_upstreams(proposers):
    proposer = load(proposers, make_config("dspark"))
    proposer.initialize_attn_backend([make_group(0, 128)])
    table = make_table(2, 32)
    proposer._per_group_block_table_buffers = {0: table}
    metadata = make_metadata([4096, 2000], table)
    proposer.build_draft_attn_metadata(metadata)
    proposer.attn_update_stack_num_spec_norm(1, metadata)
    assert torch.equal(proposer.built[0].block_table_tensor, table)
    assert proposer.updated == [(1, [4096, 2000])]
