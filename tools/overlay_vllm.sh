#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The Python of a vLLM that has no CPU build, over the compiled CPU extensions of one that has:
#   bash tools/overlay_vllm.sh VERSION VENV TREE
#   VLLM_TREE=TREE VENV/bin/python -m pytest tests/e2e/test_overlay.py
# Downloads the wheel of vllm VERSION (about 500 MB) and leaves a folder for PYTHONPATH. VENV: made by tools/test.sh.
set -euo pipefail
version=$1 python=$2/bin/python tree=$3
wheel=$(mktemp -d)
trap 'rm -rf "$wheel"' EXIT
"$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$wheel" "vllm==$version"
rm -rf "$tree/vllm"
mkdir -p "$tree"
"$python" - "$wheel"/vllm-*.whl "$tree" << 'END'
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

wheel, tree = ZipFile(sys.argv[1]), Path(sys.argv[2])
wheel.extractall(tree, [name for name in wheel.namelist() if name.startswith("vllm/") and ".so" not in name])
(installed,) = find_spec("vllm").submodule_search_locations
for extension in Path(installed).rglob("*.so*"):
    target = tree / "vllm" / extension.relative_to(installed)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(extension.resolve())
END
echo "PYTHONPATH=$tree is vLLM $version"
