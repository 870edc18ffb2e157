# SPDX-License-Identifier: Apache-2.0
"""Private modules of ``tools/bench_gpu.py``."""
