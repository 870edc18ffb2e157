# SPDX-License-Identifier: Apache-2.0
"""Train the demo pair: a byte-level Qwen3 target and drafts that only ever saw short contexts.

Needs torch, transformers and safetensors and no network; about six minutes on one GPU::

    python -m tools.train_demo_pair --out demo-pair

writes ``target/``, ``draft/`` (folders that vLLM loads), ``metrics.json`` and ``README.md``. ``--target-from DIR``
keeps the target and the records of an earlier run and writes what is new: ``--method eagle3 --target-from demo-pair``
adds an EAGLE3 draft to a pair.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

from tools.demo_pair import DRAFT_FOLDERS
from tools.demo_pair.card import model_card
from tools.demo_pair.corpus import load_corpus, standard_library, windows_ending_at
from tools.demo_pair.export import load_target, new_draft, round_to_bfloat16, save_draft, save_target
from tools.demo_pair.modeling import BOS_TOKEN_ID, MASK_TOKEN_ID, Draft, Target, new_target
from tools.demo_pair.simulate import accepted_lengths, nats_per_byte
from tools.demo_pair.training import Budget, train_draft, train_target


def main() -> None:
    """Train, measure, write."""
    args = _parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    corpus = load_corpus(args.corpus or standard_library(), include_tests=not args.no_tests, seed=args.seed)
    text, held_out = (torch.from_numpy(stream).to(device) for stream in (corpus.train, corpus.held_out))
    files = f"{corpus.record['files']} files"
    print(f"corpus: {files}, {text.numel():,} tokens; held out {held_out.numel():,}", flush=True)
    if (longest := max(args.eval_contexts)) > held_out.numel():
        raise SystemExit(f"the held-out text has {held_out.numel()} bytes, the longest context {longest}")
    # What another machine would need to train the same models.
    run = {
        "seed": args.seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "learning_rate": args.learning_rate,
        "corpus": corpus.record,
    }

    torch.manual_seed(args.seed)
    if args.target_from:
        target: Any = load_target(args.target_from / "target")
        metrics = json.loads((args.target_from / "metrics.json").read_text())
    else:
        target = new_target()
        metrics = {"bos_token_id": BOS_TOKEN_ID, "mask_token_id": MASK_TOKEN_ID, "drafts": {}}
    target.to(device)
    if args.compile:
        target.compile()
    if not args.target_from:
        metrics["target"] = _train_target(args, target, text, held_out) | {"run": run}
    target.requires_grad_(False)

    torch.manual_seed(args.seed + 1)
    draft = new_draft(args.method).to(device)
    draft.start_from(target)
    if args.compile:
        draft.compile()
    record = _train_draft(args, draft, target, text) | {"run": run}

    # Every context length continues the same places of the text, so that rows differ by context alone.
    places = torch.linspace(longest, held_out.numel(), args.eval_prompts, device=device, dtype=torch.float64).long()
    sizes = {"num_tokens": args.eval_tokens, "batch": args.eval_batch}
    table = record["mean_accepted_length"] = {}
    for context in args.eval_contexts:
        prompts = windows_ending_at(held_out, places, context)
        row = accepted_lengths(target, draft, prompts, [None, *args.eval_windows], **sizes)
        table[str(context)] = {str(window or "full"): round(value, 4) for window, value in row.items()}
    print("mean accepted length (accepted drafts + bonus token)")
    print(json.dumps(table, indent=2), flush=True)
    metrics["drafts"][args.method] = record
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (args.out / "README.md").write_text(model_card(metrics))
    print(f"wrote {args.out}")


def _train_target(
    args: argparse.Namespace, target: Target, text: torch.Tensor, held_out: torch.Tensor
) -> dict[str, Any]:
    """Train and write the target; returns its record."""
    sizes = {"context": args.target_context, "batch": args.target_batch}
    budget = Budget(args.target_seconds, args.steps)
    outcome = train_target(target, text, **sizes, seed=args.seed, budget=budget, learning_rate=args.learning_rate)
    # A draft must learn the features of the weights that are shipped.
    round_to_bfloat16(target)
    size = save_target(target, args.out / "target")
    nats = nats_per_byte(target, held_out, context=args.target_context, max_windows=args.eval_prompts)
    print("held-out nats/byte: " + ", ".join(f"{where} {value:.4f}" for where, value in nats.items()), flush=True)
    positions = {"max_position_embeddings": target.config.max_position_embeddings, "nats_per_byte": nats}
    return outcome | _size(target, size) | sizes | positions


def _train_draft(args: argparse.Namespace, draft: Draft, target: Target, text: torch.Tensor) -> dict[str, Any]:
    """Train and write a draft; returns its record."""
    sizes = {"context": args.draft_context, "batch": args.draft_batch}
    sizes |= {"anchors": args.anchors, "loss_decay": args.loss_decay}
    budget = Budget(args.draft_seconds, args.steps)
    outcome = train_draft(
        draft, target, text, **sizes, seed=args.seed + 1, budget=budget, learning_rate=args.learning_rate
    )
    round_to_bfloat16(draft)
    # Written before the measurement, so that a failure there does not lose the training.
    size = save_draft(draft, args.out / DRAFT_FOLDERS[args.method])
    proposal = {"num_draft_tokens": draft.num_draft_tokens, "target_layer_ids": [i - 1 for i in draft.features]}
    evaluation = {"prompts": args.eval_prompts, "tokens": args.eval_tokens}
    return outcome | _size(draft, size) | sizes | proposal | {"evaluation": evaluation}


def _size(model: torch.nn.Module, size: int) -> dict[str, int]:
    return {"parameters": sum(p.numel() for p in model.parameters()), "bytes": size}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--target-from", type=Path, help="folder of an earlier run: keep its target, train the draft alone"
    )
    parser.add_argument("--method", choices=DRAFT_FOLDERS, default="dspark", help="kind of draft to train")
    parser.add_argument("--corpus", type=Path, help="tree of *.py files (default: this Python's standard library)")
    parser.add_argument("--no-tests", action="store_true", help="leave test folders out of the corpus")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch decides)")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--target-seconds", type=float, default=150.0)
    parser.add_argument("--draft-seconds", type=float, default=150.0)
    parser.add_argument("--steps", type=int, help="train each model for this many steps instead of by the clock")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--target-context", type=int, default=8192)
    parser.add_argument("--target-batch", type=int, default=12)
    parser.add_argument("--draft-context", type=int, default=512)
    parser.add_argument("--draft-batch", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=64, help="anchors per draft context")
    parser.add_argument("--loss-decay", type=float, default=0.85)
    parser.add_argument("--eval-prompts", type=int, default=96)
    parser.add_argument("--eval-tokens", type=int, default=96, help="anchor positions per prompt")
    parser.add_argument("--eval-batch", type=int, default=12)
    parser.add_argument("--eval-contexts", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8000])
    parser.add_argument("--eval-windows", type=int, nargs="+", default=[256, 512, 1024])
    return parser.parse_args()


if __name__ == "__main__":
    main()
