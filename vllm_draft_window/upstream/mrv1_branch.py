# SPDX-License-Identifier: Apache-2.0
"""Branch 1: the draft window of Model Runner V1, mended in its present place."""

import libcst.matchers as m

from .checkout import Tree
from .in_tree import PACKAGE, adapter, ours, template
from .python_source import assigns, edited, mentions
from .test_config import add_dependency

_CONFIG = "vllm_ascend/ascend_config.py"
_UTILS = "vllm_ascend/spec_decode/utils.py"
_BASE = "vllm_ascend/spec_decode/llm_base_proposer.py", "AscendSpecDecodeBaseProposer"
_DSPARK = "vllm_ascend/spec_decode/dspark_proposer.py", "AscendDSparkProposer"
_STEP3P5 = "vllm_ascend/spec_decode/step3p5.py", "AscendStep3p5MTPProposer"
# Only some versions give it to drafts that plan on the host.
_PARALLEL_HOST_LENGTHS = "parallel_draft_seq_lens_cpu"

_METADATA_POSITIONS = m.Attribute(value=m.Name("common_attn_metadata"), attr=m.Name("positions"))

_INIT = '''\
def _init_draft_window(self, block_size: int) -> None:
    """Limit draft attention to the newest ``draft_window_size`` tokens, from a multiple of ``block_size`` on."""
    self.draft_window_size = window = get_ascend_config().draft_window_size
    if window is None:
        return
    tokens = self.num_speculative_tokens
    parallel = self.method in ("dflash", "dspark")
    smallest = self.num_query_per_req if self.method == "dspark" else tokens + 1
    if window < smallest:
        raise ValueError(f"draft_window_size={window} is too small, it must be at least {smallest}")
    self.sliding_window = SlidingWindowAdapter(
        window,
        block_size,
        self.runner.max_num_reqs,
        # DFlash and DSpark count their query tokens into seq_lens; elsewhere the drafts lie beyond it.
        0 if parallel else tokens,
        self.device,
        max_model_len=self.vllm_config.model_config.max_model_len,
        # The host may count as accepted what this batch drafted, and what those in flight did.
        max_rejected=tokens * (1 + self.vllm_config.parallel_config.pipeline_parallel_size),
        read_from=@PARALLEL@ if parallel else "_seq_lens_cpu",
    )
'''
_NO_WINDOW = '''\
def _init_draft_window(self, block_size: int) -> None:
    """The loop over the steps, which is this class's own, applies none."""
    if (window := get_ascend_config().draft_window_size) is not None:
        logger.warning("draft_window_size=%s is ignored: %s has no draft window.", window, type(self).__name__)
'''
_OPTION = """
draft_window_size = additional_config.get("draft_window_size")
if draft_window_size is not None and (type(draft_window_size) is not int or draft_window_size < 1):
    raise ValueError(f"draft_window_size={draft_window_size!r} must be an integer of at least 1")
self.draft_window_size = draft_window_size
"""
_GROUPS = """
if getattr(self, "draft_window_size", None) is not None:
    # The groups share the windowed lengths, so they must start at one token.
    self._init_draft_window(math.lcm(*(group.kv_cache_spec.block_size for group in self.draft_attn_groups)))
"""
_CROP = """
if block_table is not None and self.draft_window_size is not None:
    common_attn_metadata.block_table_tensor = self.sliding_window.crop_group(
        common_attn_metadata.block_table_tensor, gid, attn_group.kv_cache_spec.block_size
    )
"""
_LENGTHEN = """
if self.draft_window_size is not None:
    self.sliding_window.before_next_step(common_attn_metadata, self.max_model_len)
"""


def add_option(tree: Tree) -> None:
    read = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(target=m.Name("additional_config"))])])
    with edited(tree, _CONFIG) as source:
        source.insert_after("AscendConfig", "__init__", read, "the additional config", _OPTION)


def write_geometry(tree: Tree) -> None:
    tree.write(f"{PACKAGE}/__init__.py", "")
    tree.write(f"{PACKAGE}/geometry.py", ours("crop.py"))
    # Whatever tests a proposer tests what it computes with.
    proposers = ("llm_base_proposer", "dflash_proposer", "dspark_proposer")
    add_dependency(tree, PACKAGE, beside=[f"vllm_ascend/spec_decode/{name}.py" for name in proposers])


def mend_adapter(tree: Tree) -> None:
    code, imports = adapter()
    with edited(tree, _UTILS) as source:
        source.replace_class("SlidingWindowAdapter", code)
        source.add_import(*imports)


def mend_proposers(tree: Tree) -> None:
    in_attention = _PARALLEL_HOST_LENGTHS in tree.read("vllm_ascend/attention/utils.py")
    init = _INIT.replace("@PARALLEL@", f'"{_PARALLEL_HOST_LENGTHS if in_attention else "seq_lens"}"')
    building = m.If(body=mentions(m.Call(func=m.Name("SlidingWindowAdapter"))))
    cut = assigns("block_table_tensor", "common_attn_metadata")
    sets_table = m.If(test=mentions(m.Name("block_table")), body=m.IndentedBlock(body=[cut]))
    clones = m.SimpleStatementLine(
        body=[m.Assign(targets=[m.AssignTarget(_METADATA_POSITIONS)], value=m.Call(m.Attribute(attr=m.Name("clone"))))]
    )
    path, base = _BASE
    with edited(tree, path) as source:
        # Both are read where draft_window_size is set only.
        source.add_class_attributes(base, "sliding_window: SlidingWindowAdapter\n")
        source.replace_lines(base, "__init__", [assigns("sliding_window")], "sliding_window", "")
        source.replace_lines(
            base,
            "load_model",
            [assigns("draft_window_size"), building],
            "the SlidingWindowAdapter of draft_window_size",
            "self._init_draft_window(self.kernel_block_size)\n",
        )
        source.add_method(base, init, before="_maybe_share_embeddings")
        source.insert_after(base, "build_draft_attn_metadata", sets_table, "the block table of a DSpark group", _CROP)
        source.insert_after(base, "attn_update_stack_num_spec_norm", clones, "the clone of the positions", _LENGTHEN)
    path, dspark = _DSPARK
    with edited(tree, path) as source:
        source.append_to(dspark, "initialize_attn_backend", _GROUPS)
        source.add_import("import math")
    path, step3p5 = _STEP3P5
    with edited(tree, path) as source:
        source.add_method(step3p5, _NO_WINDOW, before="dummy_run")
        source.add_import("from vllm.logger import logger")


def write_tests(tree: Tree) -> None:
    tree.write("tests/ut/spec_decode/test_sliding_window.py", template("mrv1/test_sliding_window.py.txt"))
