# SPDX-License-Identifier: Apache-2.0
"""The same tokens from every method, graph mode and window, while requests come and go."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from tools.demo_pair import DEMO_PAIR, DEMO_SPECULATION, DRAFT_FOLDERS, demo_prompts
from tools.demo_pair.judge import logits_of_last
from vllm_draft_window import reporting

from .plan import full_graphs
from .session import EngineSpec
from .summary import engine_failures, first_differences

DRAFT_TOKENS = {"dspark": 7, "dflash": 7, "eagle3": 3}
"""Methods that can be asked for, and the tokens that their drafts propose."""
MAX_MODEL_LEN = 512
# A difference of logits that bfloat16 cannot be held to: its unit is 2^-8 of a value, and errors of layers add up.
_TIE = 2.0**-5
# Of 1 to 8 requests, graphs of 1, 2, 4, 7 and 8 for a target that verifies 8 tokens per request; other batches are
# padded. A draft of 7 queries per request gets 2, 3, 5 and 8.
_CAPTURE_SIZES = [8, 16, 32, 56, 64]


def churn(count: int) -> dict[str, Any]:
    """Requests of different lengths whose batch fills up, empties to one, and fills up again.

    They stay below :data:`MAX_MODEL_LEN`, where attention does not split the context even when free to.
    """
    rng = random.Random(0)
    sizes = [(rng.randint(20, 380), rng.randint(16, 96)) for _ in range(count)]
    prompts = [text[-length:] for text, (length, _) in zip(demo_prompts(count, MAX_MODEL_LEN), sizes, strict=True)]
    # The second half arrives when the first is nearly done.
    arrivals = [2 * i + (60 if i >= count // 2 else 0) for i in range(count)]
    return {"prompts": prompts, "max_tokens": [n for _, n in sizes], "arrivals": arrivals}


def engine_args(method: str, mode: str, window: int | None, work: Path, device: str) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``; a draft that is not in the checkpoint is made from one that is."""
    draft = _dflash_from_dspark(work / "draft-dflash") if method == "dflash" else DEMO_PAIR / DRAFT_FOLDERS[method]
    arguments: dict[str, Any] = {
        "model": str(DEMO_PAIR / "target"),
        "speculative_config": {"method": method, "model": str(draft), "num_speculative_tokens": DRAFT_TOKENS[method]},
        "additional_config": {} if window is None else {"draft_window_size": window},
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 << 20,
    }
    if device == "cpu":
        return arguments
    # Several engines share the GPU. One split, so that graphs round as eager execution does.
    arguments |= full_graphs() | {"gpu_memory_utilization": 0.1, "enforce_eager": mode == "eager"}
    arguments["attention_config"] = {"flash_attn_max_num_splits_for_cuda_graph": 1}
    # Piecewise graphs need the model split; an eager backend splits it and keeps the kernels.
    split = {"mode": 3, "backend": "eager", "cudagraph_mode": "PIECEWISE"} if mode == "piecewise" else {}
    arguments["compilation_config"] |= {"cudagraph_capture_sizes": _CAPTURE_SIZES} | split
    return arguments


def _dflash_from_dspark(folder: Path) -> Path:
    """DFlash shares DSpark's layers; trained for other positions, it proposes badly, which is a case of its own."""
    from safetensors.torch import load_file, save_file

    source = Path(DEMO_SPECULATION["model"])
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["DFlashDraftModel"]}
    del config["mask_token_id"], config["target_layer_ids"]
    weights = load_file(source / "model.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("markov_head")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engines(methods: Sequence[str], modes: Sequence[str], window: int, work: Path, device: str) -> list[EngineSpec]:
    """Every method in every mode, off and on."""
    return [
        EngineSpec(
            name=f"{method} {mode} {'off' if size is None else f'W={size}'}",
            engine_args=engine_args(method, mode, size, work, device),
        )
        for method, mode, size in product(methods, modes, (None, window))
    ]


def compare(results: Sequence[dict[str, Any]], prompts: Sequence[list[int]], device: str) -> None:
    """Add to each result what was served, its tokens equal to the first one's, and the logits behind differences."""
    for result in results:
        result |= result.pop("serve")[0]
    reference = results[0]["tokens"]
    for result in results:
        result["equal_tokens"], found = first_differences(reference, result["tokens"])
        result["differences"] = []
        for i, at in found.items():
            context = [*prompts[i], *reference[i][:at]]
            gap = logit_gap(context, reference[i][at], result["tokens"][i][at], device)
            result["differences"].append({"request": i, "token": at, "relative_gap": gap, "tie": gap <= _TIE})


def logit_gap(context: list[int], expected: int, got: int, device: str) -> float:
    """How far apart the target itself, in float32, sees two next tokens; relative to the larger logit."""
    a, b = logits_of_last([*context, got], 1, device)[0, [expected, got]].tolist()
    return abs(a - b) / max(abs(a), abs(b), 1.0)


def failures(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line per broken promise. Differences that the target sees as ties are none."""
    lines = []
    for result in results:
        found = [str(difference) for difference in result["differences"] if not difference["tie"]]
        sizes = result["batch_sizes"]
        if max(sizes) < 3 or list(sizes) == sorted(sizes):
            found.append(f"the batch did not grow and shrink: {sizes}")
        addresses = result["addresses"][0]
        # Without graphs, builds from which nothing is cut read the originals.
        if addresses["builds_on_window"] == 0 < addresses["builds"] or addresses["distinct_pairs"] > 2:
            found.append(f"{addresses['distinct_pairs']} address pairs, {addresses}")
        lines += [f"{result['config']}: {line}" for line in found + engine_failures(result)]
    return lines


def table(results: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for result in results:
        ties = sum(d["tie"] for d in result["differences"])
        (addresses, *_), sync, sizes = result["addresses"], result["sync"], result["batch_sizes"]
        on_window = addresses["builds_on_window"]
        rows.append(
            [
                result["config"],
                f"{result['accepted_length']:.2f}",
                str(result["equal_tokens"]),
                f"{ties}, {len(result['differences']) - ties}",
                f"{min(sizes)}-{max(sizes)}, {len(sizes) - 1} changes",
                "-" if on_window is None else f"{on_window} of {addresses['builds']}",
                str(addresses["replays"]),
                "-" if sync is None else str(sum(sync["synchronizations"].values())),
            ]
        )
    total = sum(map(len, results[0]["tokens"]))
    title = f"Tokens against {results[0]['config']}, {total} in all; requests come and go"
    headings = ["run", "accepted", "equal", "ties, differ", "batch", "builds on window", "replays", "syncs"]
    return reporting.table(headings, rows, title=title, first="left")
