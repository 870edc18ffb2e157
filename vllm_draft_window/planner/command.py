# SPDX-License-Identifier: Apache-2.0
"""Plans a draft window from two checkpoints' configs: what the draft sees, what it costs, what it saves.

Loads no weights and needs no accelerator and no vLLM.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
METHODS = ("dspark", "dflash", "eagle3", "eagle", "draft_model")


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target's checkpoint (its config.json is read).")],
    draft: Annotated[Path, typer.Option(help="Folder of the draft's checkpoint.")],
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", min=1, help="K, tokens per proposal.")
    ],
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            "-w",
            help="draft_window_size (auto: in --additional-config); left out, the suggested one is planned.",
        ),
    ] = None,
    sink: Annotated[int | None, typer.Option(help="draft_window_sink_size.")] = None,
    min_context: Annotated[int | None, typer.Option(help="draft_window_min_context.")] = None,
    reclaim: Annotated[bool | None, typer.Option("--reclaim", help="draft_window_reclaim.")] = None,
    additional_config: Annotated[
        str | None, typer.Option(help="JSON as given to vLLM, instead of the four options before.")
    ] = None,
    max_model_len: Annotated[
        str, typer.Option(help="As given to vLLM: 32768, 32k, 1M; auto is the target's max_position_embeddings.")
    ] = "auto",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="As given to vLLM: rows of the block table.")] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="As given to vLLM: longest prefill chunk, which an autoregressive draft follows.")
    ] = 8192,
    block_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens per KV cache block; once per KV cache group of the draft. Default 16."),
    ] = None,
    method: Annotated[str | None, typer.Option(help=f"{', '.join(METHODS)}; by default from the draft.")] = None,
    dtype: Annotated[str, typer.Option(help="As given to vLLM; auto is the target's own.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As given to vLLM; auto is --dtype.")] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks; figures are those of one.")] = 1,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Context length to give reads for; repeat for more.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests in a step, all of the same context.")] = 1,
    with_weights: Annotated[bool, typer.Option("--with-weights", help="Count the weight files as read too.")] = False,
    trained_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the draft was trained on, if you know it.")
    ] = None,
    kv_cache_gib: Annotated[
        float | None, typer.Option("--kv-cache-gib", min=0, help="One rank's memory for the KV cache, as vLLM logs it.")
    ] = None,
    async_scheduling: Annotated[
        bool, typer.Option(help="As given to vLLM: it then reserves cache for two steps in flight.")
    ] = True,
    mask: Annotated[
        bool,
        typer.Option(help="The attention backend masks rows: FlashAttention, Triton and the CPU's; not vLLM-Ascend's."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    r"""Plan the draft window of a target and its draft, from their configs alone.

    For example, the pair that comes with this repository:

        draft-window plan --target checkpoints/demo-pair/target \
          --draft checkpoints/demo-pair/draft \
          -k 7 --window 512 --max-model-len 8192

    Exit status: 0, also where the window would be off (the output says why); 2 for bad input.
    """
    from vllm_draft_window.parameters import json_object

    from .checkpoints import Checkpoint
    from .deployment import Deployment, parse_length
    from .plan import make_plan
    from .report import show

    try:
        pair = Checkpoint.read(target), Checkpoint.read(draft)
        if method is not None and method not in METHODS:
            raise ValueError(f"--method {method} is none of {', '.join(METHODS)}: only these have a draft checkpoint")
        length = parse_length(max_model_len) or getattr(pair[0].config, "max_position_embeddings", None)
        if length is None:
            raise ValueError(f"{target / 'config.json'} has no max_position_embeddings; give --max-model-len")
        deployment = Deployment(
            target=pair[0],
            draft=pair[1],
            method=method or pair[1].method,
            num_speculative_tokens=num_speculative_tokens,
            max_model_len=length,
            max_num_seqs=max_num_seqs,
            block_sizes=tuple(block_size or (16,)),
            element_bytes=_element_bytes(kv_cache_dtype, dtype, pair[0].dtype),
            max_num_batched_tokens=max_num_batched_tokens,
            tensor_parallel_size=tensor_parallel_size,
            batch=batch,
            with_weights=with_weights,
            trained_length=trained_length,
            kv_cache_bytes=None if kv_cache_gib is None else int(kv_cache_gib * (1 << 30)),
            batches_in_flight=2 if async_scheduling else 1,
            can_mask=mask,
        )
        single = {"size": window, "sink_size": sink, "min_context": min_context, "reclaim": reclaim}
        options = json_object("--additional-config", additional_config)
        options |= {f"draft_window_{name}": value for name, value in single.items() if value is not None}
        # By default powers of four from 1k on, and the longest.
        contexts = context or [*(4**n for n in range(5, 11) if 4**n < length), length]
        plan = make_plan(deployment, options, contexts)
    except ValueError as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps({"deployment": deployment.arguments(), **asdict(plan)}, indent=2))
    else:
        show(plan, deployment, Console())


def _element_bytes(kv_cache_dtype: str, dtype: str, config_dtype: str) -> int:
    name = next(name for name in (kv_cache_dtype, dtype, config_dtype) if name != "auto")
    if kv_cache_dtype == dtype == "auto" and config_dtype == "float32":
        name = "float16"  # what vLLM makes of it
    if name not in ELEMENT_BYTES:
        raise ValueError(f"the KV cache type {name!r} is none of {', '.join(ELEMENT_BYTES)}; give --kv-cache-dtype")
    return ELEMENT_BYTES[name]
