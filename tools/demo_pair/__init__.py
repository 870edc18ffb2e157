# SPDX-License-Identifier: Apache-2.0
"""Parts of the demo pair: corpus, models, acceptance simulation and checkpoint export."""
