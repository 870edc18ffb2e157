# SPDX-License-Identifier: Apache-2.0
"""The stand-in for the attention operator, by itself: what it computes, what it refuses, and how its graphs replay."""

import pytest
import torch
import torch_npu

from tests.ascend.fia import ContractError, watch
from tests.ascend.graphs import NPUGraph

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 8, 4, 12
QUERIES, KV_LENS = [2, 5], [6, 3]  # cumulative; two requests of 2 and 3 query tokens
MASK = torch.triu(torch.ones(2048, 2048), diagonal=1).to(torch.int8)


def call(**changes):
    """Arguments of a call that is in order: causal, paged, two requests."""
    torch.manual_seed(0)
    arguments = dict(
        query=torch.randn(5, HEADS, SIZE),
        key=torch.randn(BLOCKS, BLOCK, KV_HEADS * SIZE),
        value=torch.randn(BLOCKS, BLOCK, KV_HEADS * SIZE),
        atten_mask=MASK,
        block_table=torch.tensor([[3, 7, 0], [5, 0, 0]], dtype=torch.int32),
        input_layout="TND",
        block_size=BLOCK,
        actual_seq_lengths=list(QUERIES),
        actual_seq_lengths_kv=list(KV_LENS),
        num_key_value_heads=KV_HEADS,
        num_heads=HEADS,
        scale=SIZE**-0.5,
        sparse_mode=3,
    )
    return arguments | changes


def score(**changes):
    return torch_npu.npu_fused_infer_attention_score(**call(**changes))[0]


def by_hand(visible, *, sink=None):
    """Token by token; ``visible(query, token, kv_len, queries)`` counts both from the start of the request."""
    arguments = call()
    output = torch.zeros(5, HEADS, SIZE)
    first = 0
    for row, (last, length) in enumerate(zip(QUERIES, KV_LENS, strict=True)):
        for query in range(last - first):
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                logits, values = [], []
                for token in range(length):
                    if not visible(query, token, length, last - first):
                        continue
                    block, offset = arguments["block_table"][row, token // BLOCK], token % BLOCK
                    part = slice(kv_head * SIZE, (kv_head + 1) * SIZE)
                    key, value = arguments["key"][block, offset, part], arguments["value"][block, offset, part]
                    logits.append(arguments["query"][first + query, head] @ key * SIZE**-0.5)
                    values.append(value)
                if sink is not None:
                    logits.append(sink[head])
                    values.append(torch.zeros(SIZE))
                shares = torch.stack(logits).softmax(0)
                output[first + query, head] = shares @ torch.stack(values)
        first = last
    return output


def causal(query, token, length, queries):
    return token <= length - queries + query


def test_sparse_mode_0_masks_nothing():
    torch.testing.assert_close(score(sparse_mode=0, atten_mask=None), by_hand(lambda *_: True))


def test_sparse_mode_3_is_causal_from_the_newest_token():
    torch.testing.assert_close(score(), by_hand(causal))


def test_sparse_mode_4_is_a_band():
    def band(query, token, length, queries):
        return causal(query, token, length, queries) and token >= length - queries + query - 2

    torch.testing.assert_close(score(sparse_mode=4, pre_tokens=2, next_tokens=0), by_hand(band))


def test_learnable_sink_takes_its_share():
    sink = torch.randn(HEADS)
    old = call()
    names = {
        "actual_seq_lengths": "actual_seq_qlen",
        "actual_seq_lengths_kv": "actual_seq_kvlen",
        "num_heads": "num_query_heads",
        "scale": "softmax_scale",
    }
    arguments = {names.get(name, name): value for name, value in old.items()} | {"learnable_sink": sink}
    output, _ = torch_npu.npu_fused_infer_attention_score_v2(**arguments)
    torch.testing.assert_close(output, by_hand(causal, sink=sink))
    out = torch.empty(5, HEADS, SIZE)
    torch_npu.npu_fused_infer_attention_score_v2.out(**arguments, out=[out, torch.empty(1)])
    assert torch.equal(out, output)


def test_out_variant():
    out = torch.empty(5, HEADS, SIZE)
    torch_npu.npu_fused_infer_attention_score.out(**call(), workspace=torch.empty(1), out=[out, torch.empty(1)])
    assert torch.equal(out, score())


def test_a_padding_row_reads_nothing():
    output = score(actual_seq_lengths_kv=[6, 0], block_table=torch.tensor([[3, 7, 0], [0, 0, 0]], dtype=torch.int32))
    assert torch.equal(output[:2], score()[:2]) and not output[2:].any()


VIOLATIONS = {
    "fewer keys than queries": (dict(actual_seq_lengths_kv=[6, 2]), "reads 2 tokens for 3 query tokens"),
    "a length past the table": (dict(actual_seq_lengths_kv=[13, 3]), "reads 13 tokens of 12"),
    "the null block": (dict(actual_seq_lengths_kv=[9, 3]), r"reads the null block: \[3, 7, 0\]"),
    "a block that is not there": (
        dict(block_table=torch.tensor([[3, 12], [5, 0]], dtype=torch.int32)),
        r"reads blocks \[3, 12\]",
    ),
    "a negative block": (dict(block_table=torch.tensor([[3, -1], [5, 0]], dtype=torch.int32)), "reads blocks"),
    "the last query length": (dict(actual_seq_lengths=[2, 4]), "the last query length is 4, the query has 5"),
    "query lengths that fall": (dict(actual_seq_lengths=[6, 5]), "must be cumulative"),
    "a kv length too many": (dict(actual_seq_lengths_kv=[6, 3, 0]), "3 kv lengths for 2 query lengths"),
    "a kv length too few": (dict(actual_seq_lengths_kv=[6]), "1 kv lengths for 2 query lengths"),
    "a table row too few": (dict(block_table=torch.tensor([[3, 7]], dtype=torch.int32)), "1 table rows"),
    "a table of int64": (dict(block_table=torch.tensor([[3, 7], [5, 0]])), "the block table is torch.int64"),
    "lengths on the device": (dict(actual_seq_lengths_kv=torch.tensor(KV_LENS)), "must be a host list"),
    "causal without a mask": (dict(atten_mask=None), "sparse_mode 3 with mask False"),
    "no mask mode with a mask": (dict(sparse_mode=0), "sparse_mode 0 with mask True"),
    "another mode": (dict(sparse_mode=1), "sparse_mode 1 is not known"),
    "another block size": (dict(block_size=8), "block_size 8 of a cache with blocks of 4"),
    "another layout": (dict(input_layout="BNSD"), "layout BNSD"),
}


@pytest.mark.parametrize(("changes", "message"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_violations_of_the_contract(changes, message):
    with pytest.raises(ContractError, match=message):
        score(**changes)


def test_dummy_batches_may_read_the_null_block():
    with watch.dummy_batches():
        score(actual_seq_lengths_kv=[9, 3])
    with pytest.raises(ContractError, match="null block"):
        score(actual_seq_lengths_kv=[9, 3])


def test_a_graph_replays_on_captured_addresses_after_its_update():
    """Captured lengths, then an update with other lengths: the replay stops for it and computes with it."""
    arguments = call(actual_seq_lengths_kv=[2, 3])
    scaled, out, result = torch.empty(5, HEADS, SIZE), torch.empty(5, HEADS, SIZE), torch.empty(5, HEADS, SIZE)
    graph, event, stream = NPUGraph(), torch.npu.ExternalEvent(), torch.npu.current_stream()
    with torch.npu.graph(graph):
        scaled.copy_(arguments["query"] * 2)
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        captured = arguments | {"query": scaled}
        torch_npu.npu_fused_infer_attention_score.out(**captured, out=[out, torch.empty(1)])
        handle = torch.npu.graph_task_group_end(stream)
        result.copy_(out + 1)
    arguments["query"].copy_(call()["query"] / 2)
    result.zero_()
    graph.replay()
    assert not result.any() and NPUGraph.pending is graph
    torch.npu.graph_task_update_begin(stream, handle)
    captured["actual_seq_lengths_kv"] = list(KV_LENS)
    torch_npu.npu_fused_infer_attention_score.out(**captured, out=[out, torch.empty(1)])
    torch.npu.graph_task_update_end(stream)
    assert not result.any()
    event.record(stream)
    assert NPUGraph.pending is None
    torch.testing.assert_close(result, by_hand(causal) + 1)
