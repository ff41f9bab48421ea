// SPDX-License-Identifier: Apache-2.0
#include "node/loop_count.h"

#include <gtest/gtest.h>

namespace bps::node {
namespace {

TEST(LoopCount, IsTwoWhereTcpMayBeFasterThanOneLoop) {
  EXPECT_EQ(default_worker_loops({.interfaces = {25'000}}), 2U);
  EXPECT_EQ(default_worker_loops({.interfaces = {10'000, 10'000}}), 2U);
  EXPECT_EQ(default_worker_loops({.interfaces = {0}}), 2U) << "loopback, and most virtual interfaces";
  EXPECT_EQ(default_worker_loops({.interfaces = {1'000, 0}}), 2U);
}

TEST(LoopCount, IsOneElsewhere) {
  EXPECT_EQ(default_worker_loops({.interfaces = {10'000}}), 1U);
  EXPECT_EQ(default_worker_loops({.interfaces = {1'000, 1'000}}), 1U);
  EXPECT_EQ(default_worker_loops({.has_rdma = true, .interfaces = {100'000}}), 1U);
  EXPECT_EQ(default_worker_loops({.shares_memory = true, .interfaces = {0}}), 1U);
}

}  // namespace
}  // namespace bps::node
