// SPDX-License-Identifier: Apache-2.0
#include "worker/operation.h"

#include <gtest/gtest.h>

namespace bps::worker {
namespace {

constexpr std::uint32_t kMembers = 3;
constexpr std::uint64_t kShard = 2 * 4096;  // two partitions

std::shared_ptr<Tensor> make_tensor(std::uint16_t member) {
  auto tensor = std::make_shared<Tensor>(tensor::Partitioning(kMembers * kShard, 1, 4096),
                                         tensor::Partitioning(kMembers * kShard, 1, 4096, kMembers));
  auto group = std::make_shared<van::Group>();
  group->ranks = {0, 1, 2};
  tensor->group = group;
  tensor->name = std::string(1, 't');  // gcc 12 warns of its own operator= otherwise
  tensor->position = member;
  for (Plan* plan : {&tensor->plans.whole, &tensor->plans.sharded}) {
    plan->resize(1);
    for (std::uint32_t i = 0; i < 6; ++i) plan->front().push_back({.partition = i});
  }
  tensor->view_end = std::make_shared<ViewEnd>();
  return tensor;
}

std::vector<std::uint32_t> partitions_of(const std::vector<Begun>& all) {
  std::vector<std::uint32_t> partitions;
  for (const Begun& one : all) partitions.push_back(one.partition);
  return partitions;
}

// What a member reports when the view ends, of an operation of which no partition has been committed.
std::vector<std::uint32_t> missing(tensor::OperationKind kind, std::uint16_t member) {
  Request request;
  request.kind = kind;
  request.survives_servers = true;
  Operation operation(make_tensor(member), request, 0, 0, 1, 1);
  operation.fail(ErrorCode::kRoundAborted, "a server was lost", "");
  // In whatever order connections give them up.
  for (const std::uint32_t partition : {5U, 0U, 3U, 1U, 4U, 2U}) {
    EXPECT_TRUE(operation.portions.front().suspend(partition, {}, false));
  }
  return partitions_of(operation.suspension().missing());
}

TEST(Operation, WhatIsMissingIsInOrder) {
  EXPECT_EQ(missing(tensor::OperationKind::kPushPull, 1), (std::vector<std::uint32_t>{0, 1, 2, 3, 4, 5}));
}

// Each member of a reduce_scatter wants its own shard. Of the others' it hears only that they are over, perhaps never:
// whether they must be summed again is not its to say, since their owner may have returned with them.
TEST(Operation, APartitionThatIsNotWantedIsNotMissing) {
  EXPECT_EQ(missing(tensor::OperationKind::kReduceScatter, 0), (std::vector<std::uint32_t>{0, 1}));
  EXPECT_EQ(missing(tensor::OperationKind::kReduceScatter, 2), (std::vector<std::uint32_t>{4, 5}));
  EXPECT_EQ(missing(tensor::OperationKind::kAllGather, 1), (std::vector<std::uint32_t>{0, 1, 4, 5}));
}

// An operation whose deadline has passed, of which one partition ends as `failed` says, and the others unknown.
struct Late {
  explicit Late(bool failed) {
    Request request;
    request.survives_servers = true;
    operation = std::make_shared<Operation>(tensor, request, 0, 0, 1, 1);
    operation->fail(ErrorCode::kTimeout, "not complete within 1 s", "");
    for (std::uint32_t i = 0; i < 6; ++i) {
      const bool is_failed = failed && i == 2;
      EXPECT_EQ(operation->portions.front().suspend(i, {}, is_failed), !is_failed);
    }
    operation->completion.mark_incomplete();
    operation->end(counters);
  }
  Counters counters;
  std::shared_ptr<Tensor> tensor = make_tensor(1);
  std::shared_ptr<Operation> operation;
};

TEST(Operation, ADeadlineIsLeftToTheNextViewWhereNoServerHasSaidWhatBecameOfIt) {
  const Late late(false);
  EXPECT_FALSE(late.operation->is_suspended()) << "the job ends, and no view follows";
  late.tensor->view_end->note("worker 1 is lost");
  EXPECT_TRUE(late.operation->is_suspended());
  EXPECT_EQ(late.operation->suspension().missing().size(), 6);
}

TEST(Operation, ADeadlineThatAServerHasToldToAllIsAFailure) {
  const Late late(true);
  late.tensor->view_end->note("worker 1 is lost");
  EXPECT_FALSE(late.operation->is_suspended());
  EXPECT_THROW(late.operation->rethrow(), Error);
}

}  // namespace
}  // namespace bps::worker
