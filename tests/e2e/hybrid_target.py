# SPDX-License-Identifier: Apache-2.0
"""A tiny hybrid target with an MTP head (Qwen3-Next's layout): linear attention beside one layer of full attention.

vLLM gives the layers' states blocks of equal bytes, so the attention's hold hundreds of tokens: as few here as the
smallest linear attention allows, since interpreted kernels cost by the block. Random weights are enough to look at what
a draft reads; its sizes are those of the demo target, so that the demo drafts fit.
"""

import json
from pathlib import Path

CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_nextn_predict_layers": 1,
    "vocab_size": 260,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ENGINE = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_batched_tokens": 1152,
    "mamba_ssm_cache_dtype": "float32",
    "max_num_seqs": 4,
    "block_size": None,
}


def write(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
