# SPDX-License-Identifier: Apache-2.0
"""Makes real vLLM run on this CPU before any test imports it. Tests of plain arithmetic also run without vLLM."""

import importlib.metadata
from contextlib import suppress

from tools.cpu_engine import activate

with suppress(importlib.metadata.PackageNotFoundError):
    activate()
