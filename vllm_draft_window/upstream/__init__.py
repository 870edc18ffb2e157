# SPDX-License-Identifier: Apache-2.0
"""``draft-window upstream-pr``: the draft window as commits on a vLLM-Ascend checkout."""
