# SPDX-License-Identifier: Apache-2.0
"""The programs around the library, one module or folder each. `import bps_rdma` loads none of them.

bench        pushpull_bench and allreduce_bench
compare      ddp_bench
doctor       bps doctor
inspection   bps why, bps top and bps dump
scale_model  predicts how long a round takes on a given cluster
trace        bps trace
tune         bps tune
"""
