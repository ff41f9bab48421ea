# SPDX-License-Identifier: Apache-2.0
"""How soon a loss is noticed in tests, and how late at most."""

from __future__ import annotations

import harness

FAST = {"BPS_HEARTBEAT_TIMEOUT": str(3 * harness.PATIENCE), "BPS_SHUTDOWN_TIMEOUT": str(2 * harness.PATIENCE)}
SOON_S = 20 * harness.PATIENCE  # 2 s on a quiet machine; operations fail by their deadline after 100 s
