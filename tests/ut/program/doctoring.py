# SPDX-License-Identifier: Apache-2.0
"""The doctor on the demo pair, as a command within this process: vLLM makes its own configuration of the arguments."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from vllm_draft_window.cli import app

ROOT = Path(__file__).parents[3]
TARGET, DRAFT = ROOT / "checkpoints/demo-pair/target", ROOT / "checkpoints/demo-pair/draft"
DSPARK = {"method": "dspark", "model": str(DRAFT), "num_speculative_tokens": 7}
EAGLE3 = DSPARK | {"method": "eagle3", "model": str(ROOT / "checkpoints/demo-pair/eagle3")}


def arguments(
    speculative: Mapping[str, Any] | str | None = DSPARK,
    additional: Mapping[str, Any] | str | None = None,
    *,
    model: Path | str = TARGET,
    length: int | str = 8192,
) -> list[str]:
    given = ["--model", str(model), "--max-model-len", str(length)]
    for option, value in (("--speculative-config", speculative), ("--additional-config", additional)):
        if value is not None:
            given += [option, value if isinstance(value, str) else json.dumps(value)]
    return given


def examine(*given: str, status: int, **environment: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The verdict and the findings by name."""
    result = CliRunner().invoke(app, ["doctor", *given, "--json"], env=environment)
    assert result.exit_code == status, result.output
    report = json.loads(result.stdout)
    assert report["exit_code"] == status
    return report["verdict"], {finding["check"]: finding for finding in report["findings"]}


def changed(folder: Path, **keys: Any) -> dict[str, str]:
    """``speculative_config`` of the demo's DSpark draft with other keys in its config; no weights come with it."""
    config = json.loads((DRAFT / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    return DSPARK | {"model": str(folder)}


def medusa(folder: Path) -> dict[str, Any]:
    """``speculative_config`` of heads without attention."""
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": 256,
        "vocab_size": 260,
        "num_heads": 3,
        "num_hidden_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return {"method": "medusa", "model": str(folder), "num_speculative_tokens": 3}
