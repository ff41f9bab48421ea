// SPDX-License-Identifier: Apache-2.0
// A server that sums in the memory of its ranks is killed at any instant: what each rank has is known to the element.
#include "tensor/redo_log.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "child_process.h"
#include "server/sum.h"

namespace bps::server {
namespace {

constexpr std::size_t kMembers = 3;
constexpr std::size_t kLength = 150'001;  // not a number of whole blocks
constexpr std::uint32_t kPasses = 6;

TraceKey key_of(std::uint32_t partition) {
  return {1, 2, 3, partition};
}

// Shared with a child of this process, which SharedMemory is not.
class Shared {
 public:
  explicit Shared(std::size_t size)
      : bytes_(
            static_cast<std::byte*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)),
            size) {}
  ~Shared() { ::munmap(bytes_.data(), bytes_.size()); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

class RedoLogTest : public ::testing::Test {
 protected:
  RedoLogTest() {
    for (auto& memory : memory_) memory = std::make_unique<Shared>(kPasses * kLength * sizeof(float));
    for (std::size_t i = 0; i < kLength; ++i) {
      for (std::size_t rank = 0; rank < kMembers; ++rank) {
        inputs_[rank].push_back(static_cast<float>(1 + rank + i % 1000));
      }
      results_.push_back(inputs_[0][i] + inputs_[1][i] + inputs_[2][i]);
    }
  }
  float* array(std::size_t rank, std::uint32_t partition) {
    return reinterpret_cast<float*>(memory_[rank]->bytes().data()) + partition * kLength;
  }
  void fill() {
    for (std::size_t rank = 0; rank < kMembers; ++rank) {
      for (std::uint32_t partition = 0; partition < kPasses; ++partition) {
        std::ranges::copy(inputs_[rank], array(rank, partition));
      }
    }
    std::memset(shared_->bytes().data(), 0, shared_->bytes().size());
  }
  void sum_all() {
    tensor::RedoLog log(shared_->bytes());
    Summer summer;
    SumPlan plan;
    WorkerSession* broken = nullptr;
    for (std::uint32_t partition = 0; partition < kPasses; ++partition) {
      plan.sources.clear();
      for (std::size_t rank = 0; rank < kMembers; ++rank) {
        plan.sources.push_back({.bytes = reinterpret_cast<std::byte*>(array(rank, partition))});
      }
      plan.targets = plan.sources;
      plan.log = &log;
      plan.key = key_of(partition);
      (void)summer.sum({Dtype::kFloat32, ReduceOp::kSum, kMembers}, kLength * sizeof(float), plan, broken);
    }
  }
  // How many elements of the result a rank has, once it has copied what the log has for it.
  std::size_t redo(std::size_t rank, std::uint32_t partition) {
    const auto last = tensor::RedoLog(shared_->bytes()).last_of(key_of(partition), kLength * sizeof(float));
    if (!last) return 0;
    std::memcpy(reinterpret_cast<std::byte*>(array(rank, partition)) + last->at, last->block.data(),
                last->block.size());
    return last->end() / sizeof(float);
  }

  std::array<std::vector<float>, kMembers> inputs_;
  std::vector<float> results_;
  std::unique_ptr<Shared> shared_ = std::make_unique<Shared>(tensor::RedoLog::bytes());
  std::array<std::unique_ptr<Shared>, kMembers> memory_;
};

TEST_F(RedoLogTest, OfAServerThatIsKilledEachElementIsAResultOrAnInput) {
  std::mt19937 random(1);
  std::size_t in_the_middle = 0;
  const Deadline deadline = Deadline::after(60);  // on a busy machine, servers may not have begun when they are killed
  for (int trial = 0; trial < 150 || (in_the_middle == 0 && !deadline.passed()); ++trial) {
    fill();
    ChildProcess server([this] { sum_all(); });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 1500));
    server.kill();
    // Partitions that the log no longer tells of are complete, or not begun: before and behind the last one.
    const tensor::RedoLog log(shared_->bytes());
    std::uint32_t last = 0;
    while (last < kPasses && !log.last_of(key_of(last), kLength * sizeof(float))) ++last;
    for (std::uint32_t partition = 0; partition < kPasses; ++partition) {
      for (std::size_t rank = 0; rank < kMembers; ++rank) {
        std::size_t known = last < kPasses && partition < last ? kLength : 0;
        if (partition == last) known = redo(rank, partition);
        if (rank == 0 && known > 0 && known < kLength) ++in_the_middle;
        const float* const all = array(rank, partition);
        ASSERT_TRUE(std::equal(all, all + known, results_.begin()) &&
                    std::equal(all + known, all + kLength, inputs_[rank].begin() + static_cast<std::ptrdiff_t>(known)))
            << "trial " << trial << ", rank " << rank << ", partition " << partition << " of " << last << ", known "
            << known;
      }
    }
  }
  RecordProperty("in_the_middle", static_cast<int>(in_the_middle));
  EXPECT_GT(in_the_middle, 0U) << "no server was killed in the middle of a sum";
}

TEST_F(RedoLogTest, NothingIsThereBeforeTheFirstSumAndOfAnotherPartition) {
  const tensor::RedoLog log(shared_->bytes());
  EXPECT_FALSE(log.last_of({}, 1 << 20));
  fill();
  sum_all();
  EXPECT_FALSE(log.last_of(key_of(0), kLength * sizeof(float)));
  EXPECT_EQ(redo(0, kPasses - 1), kLength);
}

// The writer belongs to the job, and may lie.
TEST_F(RedoLogTest, WhatIsBeyondThePartitionIsNotBelieved) {
  tensor::RedoLog log(shared_->bytes());
  constexpr std::uint64_t kBlock = tensor::RedoLog::kBlock;
  const auto publish = [&](std::uint64_t at, std::uint64_t size) {
    (void)log.begin();
    log.publish(key_of(0), at, size);
    return log.last_of(key_of(0), 2 * kBlock).has_value();
  };
  EXPECT_TRUE(publish(kBlock, kBlock));
  EXPECT_FALSE(publish(kBlock + 4, kBlock));
  EXPECT_FALSE(publish(0, kBlock + 4));
  EXPECT_FALSE(publish(~std::uint64_t{0}, 8));
  EXPECT_FALSE(publish(8, ~std::uint64_t{0}));
}

}  // namespace
}  // namespace bps::server
