# SPDX-License-Identifier: Apache-2.0
"""Activates the CPU engine in every Python process that finds this directory on ``PYTHONPATH``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from cpu_engine import activate  # noqa: E402

sys.path.pop(0)
activate(single_process=False)
