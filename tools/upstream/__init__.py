# SPDX-License-Identifier: Apache-2.0
"""Parts of ``tools/upstream_pr.py``: the draft window as commits on a vLLM-Ascend checkout."""
