# SPDX-License-Identifier: Apache-2.0
"""What a script of one's own has: options, which do not say Ray here, and a result."""

import argparse

options = argparse.Namespace(mode="torchrun")
config: dict[str, object] = {}
final_loss = 0.5
