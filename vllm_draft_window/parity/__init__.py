# SPDX-License-Identifier: Apache-2.0
"""``draft-window parity``: what the two model runners agree on."""
