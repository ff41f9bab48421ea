# SPDX-License-Identifier: Apache-2.0
"""`bps tune`: the sizes of partitions and buckets that suit a machine, or the links of a job."""
