# SPDX-License-Identifier: Apache-2.0
"""The published tokenizer files: what the module writes, and bytes in, bytes out."""

import json
from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers")

from tools.demo_pair.tokenizer import save_tokenizer  # noqa: E402

TARGET = Path(__file__).resolve().parents[3] / "checkpoints" / "demo-pair" / "target"
TEXT = "def f(x):\n\treturn 'ä€😀'  # x\r\n\x00   "


def test_published_files_are_what_the_module_writes(tmp_path):
    save_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((TARGET / name).read_text())


def test_ids_are_the_bytes():
    tokenizer = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    assert ids == list(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode("").ids == []


def test_special_tokens_are_the_models():
    config = json.loads((TARGET / "config.json").read_text())
    draft = json.loads((TARGET.parent / "draft" / "config.json").read_text())
    names = json.loads((TARGET / "tokenizer_config.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    assert tokenizer.token_to_id(names["bos_token"]) == config["bos_token_id"]
    assert tokenizer.token_to_id(names["eos_token"]) == config["eos_token_id"]
    assert tokenizer.token_to_id(names["mask_token"]) == draft["mask_token_id"]
    assert tokenizer.decode([config["eos_token_id"]]) == ""
