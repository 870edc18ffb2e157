# SPDX-License-Identifier: Apache-2.0
"""The Model Runner V1 hooks on the real proposers of a vLLM-Ascend checkout, with torch_npu mocked as its tests do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
CHECKOUT = os.environ.get("VLLM_ASCEND_SRC")

pytestmark = pytest.mark.skipif(
    CHECKOUT is None, reason="needs a vLLM-Ascend checkout: set VLLM_ASCEND_SRC to its folder and run this file again"
)

# Loaded by pytest beside the checkout's own conftest, which mocks torch_npu before anything imports it.
_PLUGIN = '''
import importlib.util
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest

class NamesOnly:
    """Finds every module of a package that is not there, with whatever names one imports from it."""

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda attribute: MagicMock()
        return module

    def exec_module(self, module):
        pass


if importlib.util.find_spec("torchvision") is None:  # image processors, which nothing here uses, import it
    sys.meta_path.append(NamesOnly())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    from vllm_ascend.draft_window import mrv1

    assert mrv1.install()
    for item in items:  # the test module has imported the adapter by name
        item.module.SlidingWindowAdapter = sys.modules["vllm_ascend.spec_decode.utils"].SlidingWindowAdapter
'''

_OWN_TESTS = '''
import copy
import sys
from types import SimpleNamespace

import torch

from tests_of_the_shim.metadata import make_metadata, make_table
from vllm_ascend.spec_decode import llm_base_proposer, utils
from vllm_ascend.spec_decode.dspark_proposer import AscendDSparkProposer
from vllm_ascend.spec_decode.eagle_proposer import AscendEagleProposer
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata
from vllm_ascend.spec_decode.sliding_window import SlidingWindowAdapter as Shim


class SlidingWindowAdapter:
    """A name for the plugin to replace."""


def test_names():
    assert utils.SlidingWindowAdapter is llm_base_proposer.SlidingWindowAdapter is Shim is SlidingWindowAdapter


def ascend_metadata(seq_lens, table):
    metadata = make_metadata(seq_lens, table)
    fields = {k: v for k, v in vars(metadata).items() if k in AscendCommonAttentionMetadata.__dataclass_fields__}
    return AscendCommonAttentionMetadata(**fields)


def test_dspark_builds_every_group_from_its_cropped_table():
    proposer = object.__new__(AscendDSparkProposer)
    torch.nn.Module.__init__(proposer) if isinstance(proposer, torch.nn.Module) else None
    tables = {0: make_table(4, 40), 3: make_table(4, 40, seed=1)}
    built = []
    builder = SimpleNamespace(build_for_drafting=lambda metadata, **_: built.append(metadata))
    proposer.method, proposer.use_compress = "dspark", False
    proposer.draft_attn_groups = [
        SimpleNamespace(
            kv_cache_group_id=gid,
            layer_names=[f"draft.{gid}"],
            kv_cache_spec=SimpleNamespace(block_size=128),
            get_metadata_builder=lambda: builder,
        )
        for gid in tables
    ]
    proposer._per_group_block_table_buffers = tables
    proposer._per_group_query_slot_mapping_buffers = {gid: torch.zeros(8, dtype=torch.int32) for gid in tables}
    proposer.sliding_window = Shim(256, 128, 4, 0, torch.device("cpu"))
    metadata = ascend_metadata([1000, 255], tables[0][:2])
    proposer.sliding_window.apply(metadata)
    metadata.seq_lens = metadata.seq_lens.clone()
    proposer.build_draft_attn_metadata(metadata, 8, 8)
    for table, of_group in zip(tables.values(), built, strict=True):
        assert torch.equal(of_group.block_table_tensor[0, :3], table[0, 5:8])
        assert of_group.seq_lens.tolist() == [360, 255]


def test_eagle_lengthens_by_unwindowed_lengths():
    """Two steps of the real update near max_model_len, the window beside none."""
    seen = {}
    for windowed in (True, False):
        table = make_table(2, 32, high=1000)
        proposer = object.__new__(AscendEagleProposer)
        built = []
        builder = SimpleNamespace(build_for_drafting=lambda metadata, index, **_: built.append(metadata))
        group = SimpleNamespace(get_metadata_builder=lambda: builder)
        vars(proposer).update(
            method="eagle3", uses_mrope=False, use_compress=False, has_gdn=False, block_size=128,
            max_model_len=4096, runner=SimpleNamespace(), draft_attn_groups=[group],
            arange=torch.arange(8, dtype=torch.int32), token_arange_np=torch.arange(8, dtype=torch.int32).numpy(),
            slot_mapping_group=[torch.zeros(8, dtype=torch.int32) for _ in range(4)],
            seq_lens_group=[torch.zeros(8, dtype=torch.int32) for _ in range(4)],
            query_start_loc_group=[torch.zeros(8, dtype=torch.int32) for _ in range(4)],
            draft_window_size=512 if windowed else None, sliding_window=None,
        )
        metadata = ascend_metadata([4095, 2000], table)
        metadata.positions = torch.tensor([4094, 1999])
        metadata.num_computed_tokens_cpu = torch.tensor([4094, 1999], dtype=torch.int32)
        if windowed:
            proposer.sliding_window = Shim(512, 128, 4, 3, torch.device("cpu"))
            proposer.sliding_window.apply(metadata)
        positions = torch.tensor([4094, 1999])
        for index in (1, 2):
            metadata, _ = proposer.attn_update_stack_num_spec_norm(
                index, metadata, 2, 2, positions, None, attn_group=group
            )
        seen[windowed] = [(m.seq_lens.tolist(), m._seq_lens_cpu.tolist(), m.slot_mapping.tolist()) for m in built]
    removed = 2000 - 2000 + (2000 + 3 - 512) // 128 * 128
    first = 4095 - (4095 + 3 - 512) // 128 * 128
    assert [lengths for lengths, _, _ in seen[False]] == [[4096, 2001], [1, 2002]]
    assert [lengths for lengths, _, _ in seen[True]] == [[first + 1, 2001 - removed], [1, 2002 - removed]]
    assert [host for _, host, _ in seen[True]] == [lengths for lengths, _, _ in seen[True]]
    assert [slots for _, _, slots in seen[True]] == [slots for _, _, slots in seen[False]], "slots never move"
'''


@pytest.fixture
def merged(tmp_path) -> Path:
    """The checkout with our files merged in, as the wheel merges into an installed vllm_ascend."""
    source = Path(CHECKOUT)
    for origin in (source, REPOSITORY):
        for path in (origin / "vllm_ascend").rglob("*.py"):
            link = tmp_path / path.relative_to(origin)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "ut").symlink_to(source / "tests" / "ut")
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests_of_the_shim").mkdir()
    (tmp_path / "tests_of_the_shim" / "metadata.py").symlink_to(REPOSITORY / "tests/ut/spec_decode/metadata.py")
    (tmp_path / "shim_plugin.py").write_text(_PLUGIN)
    return tmp_path


def run_pytest(merged: Path, *args: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRITON_"))}
    environment |= {"PYTHONPATH": str(merged), "VLLM_PLUGINS": ""}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "shim_plugin", "-p", "no:cacheprovider", "-c", os.devnull,
         f"--rootdir={merged}", *args],
        cwd=merged,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip


def test_vllm_ascends_contract_test_passes_on_the_shim(merged):
    result = run_pytest(merged, "tests/ut/spec_decode/a2/test_eagle_proposer.py", "-k", "TestSlidingWindowAdapter")
    assert result.returncode == 0 and "1 passed" in result.stdout, result.stdout[-4000:] + result.stderr[-2000:]


def test_hooks_on_the_real_proposers(merged):
    (merged / "test_real_proposers.py").write_text(_OWN_TESTS)
    result = run_pytest(merged, "-p", "tests.ut.conftest", "test_real_proposers.py")
    assert result.returncode == 0 and "3 passed" in result.stdout, result.stdout[-6000:] + result.stderr[-2000:]
