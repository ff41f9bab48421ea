# SPDX-License-Identifier: Apache-2.0
"""How long tests wait."""

from __future__ import annotations

import os

# On a machine that is busy with other things everything takes longer; a sanitizer build is slow by itself.
PATIENCE = float(os.environ.get("BPS_TEST_PATIENCE", "1"))
