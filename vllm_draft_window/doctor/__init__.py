# SPDX-License-Identifier: Apache-2.0
"""What the doctor looks at: the environment, then what an engine would make of the given arguments."""
