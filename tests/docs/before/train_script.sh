# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# A script that every rank runs.
cat > train.py <<'END'
import bps_rdma as bps

bps.init()
bps.barrier()
END
