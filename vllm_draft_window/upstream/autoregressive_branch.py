# SPDX-License-Identifier: Apache-2.0
"""Branch 3: the draft window of EAGLE, EAGLE3 and MTP heads with GQA on Model Runner V2."""

from typing import Any

import libcst as cst
import libcst.matchers as m

from .checkout import Tree
from .docs import add_section
from .in_tree import template
from .parallel_branch import V2
from .python_source import assigns, edited

_PATH, _CLASS = f"{V2}/spec_decode/autoregressive/speculator.py", "AscendAutoRegressiveSpeculator"
_ATTRIBUTES = """
draft_window: HostPlannedWindow | None = None
"""
_SET = """
mixed_mode = self.vllm_config.compilation_config.cudagraph_mode.mixed_mode()
if mixed_mode == CUDAGraphMode.FULL and get_ascend_config().draft_window_size is not None:
    logger.warning("Draft window off: %s does not support cudagraph_mode FULL.", type(self).__name__)
else:
    self.draft_window = make_draft_window(
        self.vllm_config,
        self.attn_groups,
        block_tables,
        queries=1,
        max_queries=min(self.max_num_tokens, self.max_model_len),
        lookahead=self.num_speculative_steps,
    )
"""
_PROPOSE = """
if self.draft_window is not None and attn_metadata is not None:
    attn_metadata = attn_metadata | self._window_first_step(attn_metadata)
"""
_METHODS = (
    '''
def _windowed_build(self, num_reqs: int, step: int) -> Callable[..., Any] | None:
    """What the build of a later forward goes through, one query token per request."""
    # A graph would repeat the crop of its capture at every replay.
    if self.draft_window is None or torch.npu.is_current_stream_capturing():
        return None
    host_lens = self._get_seq_lens_cpu().numpy()[:num_reqs] + step
    return partial(self.draft_window.build, host_lens=host_lens, lookahead=self.num_speculative_steps - step)
''',
    '''
def _window_first_step(self, attn_metadata: dict[str, Any], num_rows: int | None = None) -> dict[str, Any]:
    """Windowed copies of the target's metadata for the draft's layers, of as many rows or of ``num_rows``."""
    assert self.draft_window is not None and self.input_batch is not None
    num_reqs = self.input_batch.num_reqs
    groups = {
        name: gid for gid, of_gid in enumerate(self.attn_groups) for group in of_gid for name in group.layer_names
    }
    first_step = {name: copy(attn_metadata[name]) for name in groups if name in attn_metadata}
    num_rows = num_rows or len(next(iter(first_step.values())).seq_lens_list)
    windowed = self.draft_window.build(
        lambda **arguments: arguments,
        self._get_seq_lens_cpu().numpy()[:num_reqs],
        queries=np.diff(self.input_batch.query_start_loc_np[: num_reqs + 1]),
        lookahead=self.num_speculative_steps,
        num_reqs=num_rows,
        seq_lens=self.target_input_buffers.seq_lens,
        block_tables=self.block_tables.input_block_tables,
        max_seq_len=self.max_model_len,
    )
    seq_lens = torch.from_numpy(windowed["seq_lens_np"])
    for name, metadata in first_step.items():
        metadata.block_tables = windowed["block_tables"][groups[name]][:num_rows]
        metadata.seq_lens = metadata.seq_lens_cpu = seq_lens
        metadata.seq_lens_list = seq_lens.tolist()
    return first_step
''',
)
_FIRST = """
if is_draft_model_prefill and self.draft_window is not None:
    first_step = self._window_first_step(self.model_state.attn_metadata, num_reqs_padded)
    for metadata in first_step.values():
        # The graph's requests all have as many query tokens, those of the padding among them.
        num_queries = self.num_speculative_steps + 1
        metadata.actual_seq_lengths_q = [num_queries * (row + 1) for row in range(num_reqs_padded)]
    return [first_step]
"""
_REMOVED = """
if self.draft_window is not None:
    next_seqs_cpu[:num_reqs] -= torch.from_numpy(self.draft_window.removed[:num_reqs])
"""


def window_speculators(tree: Tree) -> None:
    factory = m.With(items=[m.WithItem(item=m.Call(func=m.Name("build_draft_attn_metadata_factory")))])
    rebuilds = m.If(
        test=m.Comparison(),
        body=m.MatchIfTrue(lambda body: bool(m.findall(body, m.Attribute(attr=m.Name("_build_draft_attn_metadata"))))),
    )
    condition = cst.parse_expression('self.attn_architecture == "MLA" or self.draft_window is not None')
    clears = m.SimpleStatementLine(body=[m.Expr(value=m.Call(func=m.Attribute(attr=m.Name("fill_"))))])
    with edited(tree, _PATH) as source:
        source.add_class_attributes(_CLASS, _ATTRIBUTES)
        source.append_to(_CLASS, "set_attn", _SET)
        source.insert_after(_CLASS, "propose", assigns("input_batch"), "the input batch that it keeps", _PROPOSE)
        for method in _METHODS:
            source.add_method(_CLASS, method, before="build_draft_attn_metadatas")
        build = source.find_method(_CLASS, "_build_draft_attn_metadata")
        source.replace(build, m.replace(build, factory, _through_window))  # type: ignore[arg-type]
        source.prepend_to(_CLASS, "build_draft_attn_metadatas", _FIRST)
        init = source.find_method(_CLASS, "_init_decode_draft_attn_metadatas")
        edit = m.replace(init, rebuilds, lambda node, _: node.with_changes(test=condition))  # type: ignore
        source.replace(init, edit)  # type: ignore[arg-type]
        source.insert_before(_CLASS, "_calc_next_seq_lens_cpu", clears, "where padding rows are cleared", _REMOVED)
        source.add_import(
            "from collections.abc import Callable",
            "from functools import partial",
            "import numpy as np",
            "from vllm_ascend.ascend_config import get_ascend_config",
            "from vllm_ascend.draft_window.host_planned import HostPlannedWindow",
            "from vllm_ascend.worker.v2.spec_decode.draft_window import make_draft_window",
        )
    tree.write(
        "tests/ut/worker/v2/test_autoregressive_draft_window.py", template("autoregressive/test_draft_window.py.txt")
    )


def _through_window(node: Any, _: object) -> cst.With:
    """The same block inside the window's build, one context manager a line."""
    (factory,) = node.items
    call = cst.Module([]).code_for_node(factory).replace("\n", "\n    ")
    window = "build_attn_metadata_wrapper(self._windowed_build(num_reqs, step))"
    both: Any = cst.parse_statement(f"with (\n    {window},\n    {call},\n):\n    ...\n")
    return node.with_changes(lpar=both.lpar, items=both.items, rpar=both.rpar)


def write_docs(tree: Tree) -> None:
    windowed = "windowed where attention is GQA, but for Gemma 4 and Step-3.5 MTP; not with cudagraph_mode FULL"
    add_section(tree, template("parallel/guide.md").replace("@AUTOREGRESSIVE@", windowed))
