// SPDX-License-Identifier: Apache-2.0
#include "server/worker_paths.h"

#include <gtest/gtest.h>

#include "server/fake_transport.h"

namespace bps::server {
namespace {

transport::Hello hello(std::uint16_t path, transport::Plane plane) {
  return {.node = 1, .plane = plane, .path = path};
}

// Three paths, of which the first one is about to be lost.
class WorkerPathsTest : public ::testing::Test {
 protected:
  WorkerPathsTest() {
    for (FakeControl& one : controls) paths.add(&one);
    for (FakeData& one : data) paths.add(&one);
  }

  FakeControl controls[3]{FakeControl(hello(1, transport::Plane::kControl)),
                          FakeControl(hello(2, transport::Plane::kControl)),
                          FakeControl(hello(3, transport::Plane::kControl))};
  FakeData data[3]{FakeData(hello(1, transport::Plane::kData)), FakeData(hello(2, transport::Plane::kData)),
                   FakeData(hello(3, transport::Plane::kData))};
  WorkerPaths paths;
};

TEST_F(WorkerPathsTest, AnswersGoToTheSameMemoryByItsKeyOnTheOtherRail) {
  WorkerPath& lost = *paths.find(1);
  lost.keys = {{1, 2, {{10, 20}, {11, 21}}}, {1, 2, {{12, 22}}}, {1, 3, {{10, 30}, {11, 31}, {12, 32}}}};
  paths.close(lost);
  for (int i = 0; i < 6; ++i) {
    transport::DataEndpoint* by = &data[0];
    std::uint64_t key = 10 + static_cast<std::uint64_t>(i % 3);
    const std::uint64_t before = key;
    paths.lead(lost, by, key);
    ASSERT_NE(by, &data[0]);
    EXPECT_EQ(key, before + (by == &data[1] ? 10U : 20U));
  }
}

TEST_F(WorkerPathsTest, OnlyAPathThatTheWorkerHasOfferedIsTaken) {
  WorkerPath& lost = *paths.find(1);
  lost.keys = {{1, 3, {{10, 30}}}};
  paths.close(lost);
  for (int i = 0; i < 4; ++i) {
    transport::DataEndpoint* by = &data[0];
    std::uint64_t key = 10;
    paths.lead(lost, by, key);
    EXPECT_EQ(by, &data[2]);
    EXPECT_EQ(key, 30U);
  }
}

TEST_F(WorkerPathsTest, NothingIsLeftOnAClosedConnectionWhileAnotherLives) {
  WorkerPath& lost = *paths.find(1);
  lost.keys = {{1, 2, {{10, 20}}}};
  paths.close(lost);
  paths.close(*paths.find(2));  // the only one offered is lost here
  transport::DataEndpoint* by = &data[0];
  std::uint64_t key = 10;
  paths.lead(lost, by, key);
  EXPECT_EQ(by, &data[2]);
}

}  // namespace
}  // namespace bps::server
