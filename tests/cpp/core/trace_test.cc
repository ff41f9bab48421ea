// SPDX-License-Identifier: Apache-2.0
#include "core/trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/trace_writer.h"

namespace bps {
namespace {

constexpr auto kQueued = TraceStage::kQueued;

TEST(TraceRing, NotesTheRoundsThatAreWanted) {
  TraceRing ring({.first = 2, .last = 3});
  for (std::uint32_t round = 0; round < 6; ++round) ring.record(kQueued, {.tensor = 7, .round = round}, 1, 8);
  TraceEvent event;
  for (const std::uint32_t round : {2U, 3U}) {
    ASSERT_TRUE(ring.pop(event));
    EXPECT_EQ(event.key, (TraceKey{.tensor = 7, .round = round}));
    EXPECT_EQ(event.peer, 1U);
    EXPECT_EQ(event.value, 8U);
  }
  EXPECT_FALSE(ring.pop(event));
}

TEST(TraceRing, DropsAndCountsWhatDoesNotFit) {
  TraceRing ring({});
  for (std::size_t i = 0; i < TraceRing::kEvents + 5; ++i) ring.record(kQueued, {}, 0, i);
  EXPECT_EQ(ring.dropped(), 5U);
  TraceEvent event;
  for (std::size_t i = 0; i < TraceRing::kEvents; ++i) {
    ASSERT_TRUE(ring.pop(event));
    ASSERT_EQ(event.value, i);
  }
  EXPECT_FALSE(ring.pop(event));
}

class Writer : public testing::Test {
 protected:
  Writer() : folder_(std::filesystem::temp_directory_path() / ("bps-trace-" + std::to_string(::getpid()))) {}
  ~Writer() override { std::filesystem::remove_all(folder_); }

  std::string file() const { return folder_ / "a" / "comm.json"; }
  std::string text() const {
    std::ifstream in(file());
    std::ostringstream all;
    all << in.rdbuf();
    return all.str();
  }
  static std::size_t count(const std::string& text, const std::string& what) {
    std::size_t found = 0;
    for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
    return found;
  }

  const std::filesystem::path folder_;
};

TEST_F(Writer, LeavesOutWhatHasNoBeginningOrNoEnd) {
  {
    TraceWriter writer({});
    TraceRing& ring = writer.add_ring();
    writer.name_tensor(7, "x");
    writer.start({.file = file(), .name = "worker 0", .host = "h"});
    ring.record(TraceStage::kLanded, {.tensor = 7, .round = 1}, 1, 8);  // its beginning was dropped
    ring.record(kQueued, {.tensor = 7, .round = 2}, 1, 8);              // it has not ended
    ring.record(kQueued, {.tensor = 7, .round = 3}, 1, 8);
    ring.record(TraceStage::kAborted, {.tensor = 7, .round = 3}, 1, 8);
    ring.record(TraceStage::kSummed, {.tensor = 7, .round = 4}, 1, 8);
    ring.record(TraceStage::kReplied, {.tensor = 7, .round = 4}, 1, 8);
    for (const auto stage : {kQueued, TraceStage::kSent, TraceStage::kLanded}) {
      ring.record(stage, {.tensor = 7, .round = 5}, 1, 8);
    }
  }
  EXPECT_EQ(count(text(), R"("ph":"b","cat":"partition","name":"x [0]")"), 1U) << text();
  EXPECT_EQ(count(text(), R"("ph":"b")"), 3U) << text();  // with two stages
  EXPECT_EQ(count(text(), R"("ph":"e")"), 3U) << text();
  EXPECT_EQ(count(text(), R"("round":5)"), 1U) << text();
}

TEST_F(Writer, TellsHowMuchWasDropped) {
  {
    TraceWriter writer({});
    TraceRing& ring = writer.add_ring();
    for (std::size_t i = 0; i < TraceRing::kEvents + 3; ++i) ring.record(kQueued, {}, 0, i);
    writer.start({.file = file(), .name = "worker 0", .host = "h"});
  }
  EXPECT_EQ(count(text(), R"("dropped":3})"), 1U) << text();
}

}  // namespace
}  // namespace bps
