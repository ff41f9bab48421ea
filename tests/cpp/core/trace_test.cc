// SPDX-License-Identifier: Apache-2.0
#include "core/trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/tick_counter.h"
#include "core/trace_format.h"
#include "core/trace_writer.h"
#include "eventually.h"

namespace bps {
namespace {

constexpr auto kQueued = TraceStage::kQueued;

// Everything that a ring holds, which is then free.
std::vector<TraceEvent> take(TraceRing& ring) {
  std::vector<TraceEvent> all;
  for (const auto part : ring.noted()) all.insert(all.end(), part.begin(), part.end());
  ring.free(all.size());
  return all;
}

TEST(TraceRing, NotesTheRoundsThatAreWanted) {
  TraceRing ring({.first = 2, .last = 3});
  for (std::uint32_t round = 0; round < 6; ++round) {
    EXPECT_EQ(ring.wants(round), round == 2 || round == 3);
    ring.record(kQueued, {.tensor = 7, .round = round, .for_host = true}, 1, 8);
    ring.record_at(round, kQueued, {.tensor = 7, .round = round}, 1, 8);
  }
  const auto events = take(ring);
  ASSERT_EQ(events.size(), 4U);
  for (const std::uint32_t i : {0U, 1U, 2U, 3U}) {
    EXPECT_EQ(events[i].key(), (TraceKey{.tensor = 7, .round = 2 + i / 2, .for_host = i % 2 == 0}));
    EXPECT_EQ(events[i].peer, 1U);
    EXPECT_EQ(events[i].value, 8U);
  }
  EXPECT_EQ(events[3].time, 3U);
  EXPECT_TRUE(take(ring).empty());
}

TEST(TraceRing, DropsAndCountsWhatDoesNotFit) {
  TraceRing ring({});
  for (std::size_t i = 0; i < TraceRing::kEvents + 5; ++i) ring.record(kQueued, {}, 0, i);
  EXPECT_EQ(ring.dropped(), 5U);
  const auto events = take(ring);
  ASSERT_EQ(events.size(), TraceRing::kEvents);
  for (std::size_t i = 0; i < TraceRing::kEvents; ++i) ASSERT_EQ(events[i].value, i);
  EXPECT_TRUE(take(ring).empty());
}

TEST(TraceRing, KeepsTheOrderOverItsEnd) {
  TraceRing ring({});
  std::uint64_t next = 0;
  std::uint64_t read = 0;
  for (int turn = 0; turn < 7; ++turn) {
    for (std::size_t i = 0; i < TraceRing::kEvents / 3; ++i) ring.record(kQueued, {}, 0, next++);
    for (const TraceEvent& event : take(ring)) ASSERT_EQ(event.value, read++);
  }
  EXPECT_EQ(read, next);
  EXPECT_EQ(ring.dropped(), 0U);
}

// Little memory lies between the two threads: what is torn or read too early shows.
TEST(TraceRing, IsReadWhileItIsWritten) {
  constexpr std::uint64_t kCount = 1'000'000;
  TraceRing ring({});
  std::atomic<bool> over = false;
  std::thread loop([&] {
    for (std::uint64_t i = 0; i < kCount; ++i) ring.record_at(i, kQueued, {.tensor = 1 + std::uint32_t(i)}, 0, i);
    over = true;
  });
  std::uint64_t read = 0;
  std::uint64_t next = 0;
  for (bool ends = false; !ends;) {
    ends = over;
    for (const TraceEvent& event : take(ring)) {
      EXPECT_EQ(event.time, event.value);
      EXPECT_EQ(event.tensor, 1 + std::uint32_t(event.value));
      EXPECT_GE(event.value, next);
      next = event.value + 1;
      ++read;
    }
    if (testing::Test::HasFailure()) break;
  }
  loop.join();
  EXPECT_EQ(read + ring.dropped(), kCount);
}

TEST(TickTimes, LieBetweenTheLatestTwoSamples) {
  TickTimes times;
  EXPECT_EQ(times.ns(17), 17U);
  times.add({.ticks = 1000, .ns = 500});
  EXPECT_EQ(times.ns(1234), 500U);
  times.add({.ticks = 3000, .ns = 1500});
  EXPECT_EQ(times.ns(1000), 500U);
  EXPECT_EQ(times.ns(2000), 1000U);
  EXPECT_EQ(times.ns(3002), 1501U);
  EXPECT_EQ(times.ns(900), 450U);
  times.add({.ticks = 4000, .ns = 3500});
  EXPECT_EQ(times.ns(3500), 2500U);
  times.add({.ticks = 10, .ns = 4000});  // begun anew
  EXPECT_EQ(times.ns(20), 4000U);
  times.add({.ticks = 110, .ns = 4100});
  EXPECT_EQ(times.ns(20), 4010U);
  // What a broken file may hold.
  constexpr std::uint64_t kLargest = ~std::uint64_t{0};
  times.add({.ticks = kLargest, .ns = kLargest});
  (void)times.ns(0);
  times.add({.ticks = 0, .ns = 0});
  times.add({.ticks = 1, .ns = kLargest});
  (void)times.ns(kLargest);
}

// Whether the counter is trusted on this machine or not: over a short time it runs evenly on all that there are.
TEST(TickTimes, AreThoseOfTheClock) {
  TickTimes times;
  times.add(TickSample::take());
  std::vector<TickSample> between;
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    between.push_back(TickSample::take());
  }
  times.add(TickSample::take());
  for (const TickSample& one : between) {
    EXPECT_NEAR(static_cast<double>(times.ns(one.ticks)), static_cast<double>(one.ns), 100'000.0);
  }
}

class Writer : public testing::Test {
 protected:
  Writer() : folder_(std::filesystem::temp_directory_path() / ("bps-trace-" + std::to_string(::getpid()))) {}
  ~Writer() override { std::filesystem::remove_all(folder_); }

  std::string file() const { return folder_ / "a" / "comm.json"; }
  std::string events() const { return folder_ / "a" / "comm.events"; }
  std::string text() const { return text(file()); }
  // Of all files in the trace's folder.
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "a"))
      found.push_back(entry.path().filename());
    std::ranges::sort(found);
    return found;
  }
  static std::string text(const std::string& file) {
    std::ifstream in(file, std::ios::binary);
    std::ostringstream all;
    all << in.rdbuf();
    return all.str();
  }
  static std::size_t count(const std::string& text, const std::string& what) {
    std::size_t found = 0;
    for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
    return found;
  }

  static std::string clock_of(const std::string& trace) {
    const std::string field = R"("clock":")";
    const std::size_t at = trace.find(field) + field.size();
    return trace.substr(at, trace.find('"', at) - at);
  }
  static constexpr std::size_t kAllKinds = 10;  // begin in the trace below
  // A trace of everything that there is, and what its writer has appended until then.
  std::string write_all_kinds(bool by_counter = false) const {
    TraceWriter writer({}, by_counter);
    TraceRing& ring = writer.add_ring();
    TraceRing& other = writer.add_ring();
    writer.start({.file = file(), .name = "worker 0", .host = "h", .worker_rank = 0, .nodes = {{3, "server 0"}}});
    writer.name_tensor(7, "x \"y\"");
    for (const auto stage : {kQueued, TraceStage::kStalled, TraceStage::kSent, TraceStage::kLanded}) {
      ring.record(stage, {.tensor = 7, .round = 5}, 3, 8);
    }
    ring.record(TraceStage::kOperation, {.tensor = 7, .round = 5}, 0, 100);
    for (const auto stage : {TraceStage::kPushed, TraceStage::kSummed, TraceStage::kReplied}) {
      other.record(stage, {.tensor = 8, .round = 5, .for_host = true}, 1, 8);
    }
    writer.record_span("forward", 4, 1000, 2000);
    writer.record_span(std::string(5000, 'x'), 4, 1000, 2000);  // dropped, for its name
    std::string appended;
    EXPECT_TRUE(eventually([&] {
      appended = text(events());
      return count(format(appended).value_or(""), R"("ph":"b")") == kAllKinds;
    }));
    return appended;
  }
  // Of these events; nothing where they are refused.
  std::optional<std::string> format(const std::string& appended) const {
    const std::string from = folder_ / "copy.events";
    const std::string to = folder_ / "copy.json";
    std::ofstream(from, std::ios::binary | std::ios::trunc) << appended;
    try {
      format_trace(from, to);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(from), std::string::npos) << error.what();
      EXPECT_FALSE(std::filesystem::exists(to));
      return std::nullopt;
    }
    std::string made = text(to);
    std::filesystem::remove(to);
    return made;
  }

  const std::filesystem::path folder_;
};

TEST_F(Writer, LeavesOneFileWithWhatItsThreadHadAppended) {
  const std::string appended = write_all_kinds();
  EXPECT_EQ(names(), std::vector<std::string>{"comm.json"});
  EXPECT_EQ(format(appended), text());
  for (const char* one :
       {R"("cat":"partition","name":"x \"y\" [0]")", R"("name":"credit wait")", R"("server":"server 0")",
        R"("cat":"operation","name":"x \"y\"")", R"("cat":"round","name":"tensor 8 [0]")",
        R"("cat":"program","name":"forward")", R"("dropped":1})"}) {
    EXPECT_GE(count(text(), one), 1U) << one << text();
  }
}

TEST_F(Writer, SaysTheSameTimesByTheCounter) {
  const std::uint64_t begin = now_ns();
  (void)write_all_kinds(true);
  const std::uint64_t end = now_ns();
  const std::string made = text();
  const std::string field = R"("cat":"operation","name":"x \"y\"","id":)";
  EXPECT_EQ(count(made, R"("cat":"operation")"), 2U) << made << field;
  std::size_t times = 0;
  for (auto at = made.find(R"("ts":)"); at != std::string::npos; at = made.find(R"("ts":)", at + 1)) {
    const double us = std::stod(made.substr(at + 5));
    if (us < 10) continue;  // of the span, whose times are made up
    ++times;
    EXPECT_GT(us * 1e3, static_cast<double>(begin) - 1e6) << made.substr(at, 80);
    EXPECT_LT(us * 1e3, static_cast<double>(end) + 1e6) << made.substr(at, 80);
  }
  EXPECT_GE(times, 2 * (kAllKinds - 1)) << made;
}

TEST_F(Writer, IsReadWhereverItsFileEnds) {
  const std::string appended = write_all_kinds();
  const std::size_t first =
      sizeof(TraceFrameHeader) +
      codec::encode(TraceProcess{.version = BPS_VERSION, .name = "worker 0", .host = "h", .clock = clock_of(text())})
          .size();
  std::size_t before = 0;
  for (std::size_t size = 0; size <= appended.size(); ++size) {
    const auto made = format(appended.substr(0, size));
    ASSERT_EQ(made.has_value(), size >= first) << size;
    if (!made) continue;
    ASSERT_TRUE(made->ends_with("}}\n")) << *made;
    const std::size_t begun = count(*made, R"("ph":"b")");
    ASSERT_EQ(begun, count(*made, R"("ph":"e")")) << *made;
    ASSERT_GE(begun, before);
    before = begun;
  }
  EXPECT_EQ(before, kAllKinds);
}

// The format has no sum over its bytes, so that some of these are other traces; the others are refused, and nothing
// else happens. (The sanitizers look on.)
TEST_F(Writer, IsReadOrRefusedWhateverTheFileHolds) {
  const std::string appended = write_all_kinds();
  int refused = 0;
  for (std::size_t at = 0; at < appended.size(); ++at) {
    std::string changed = appended;
    changed[at] = static_cast<char>(changed[at] ^ std::array{'\x01', '\x80', '\xff'}[at % 3]);
    if (!format(changed)) ++refused;
  }
  EXPECT_GT(refused, 100);
  EXPECT_FALSE(format(appended + std::string(sizeof(TraceFrameHeader), '\0')));
  EXPECT_FALSE(format(appended + appended)) << "a second process";
}

TEST_F(Writer, KeepsTheEventsWhereTheTraceCannotBeWritten) {
  std::filesystem::create_directories(file() + "/x");
  const std::string appended = write_all_kinds();
  EXPECT_EQ(names(), (std::vector<std::string>{"comm.events", "comm.json"}));
  EXPECT_TRUE(text(events()).starts_with(appended));
  EXPECT_TRUE(format(text(events())));
}

TEST_F(Writer, TakesThePlaceOfTheTraceOfAnEarlierJob) {
  std::filesystem::create_directories(folder_ / "a");
  std::ofstream(file()) << "old";
  std::ofstream(events()) << "old";
  TraceWriter writer({});
  writer.start({.file = file(), .name = "worker 0", .host = "h"});
  EXPECT_FALSE(std::filesystem::exists(file()));
  EXPECT_TRUE(format(text(events())));
}

// A GPU copies the first partition, and RDMA devices read the second one themselves.
TEST_F(Writer, TellsTheStagesOfAGpu) {
  {
    TraceWriter writer({}, false);
    TraceRing& ring = writer.add_ring();
    writer.start({.file = file(), .name = "worker 0", .host = "h"});
    std::uint64_t time = 1000;
    for (const auto stage : {kQueued, TraceStage::kOnDevice, TraceStage::kReached, TraceStage::kFetched,
                             TraceStage::kStalled, TraceStage::kSent, TraceStage::kAnswered, TraceStage::kLanded}) {
      ring.record_at(time += 1000, stage, {.tensor = 7, .partition = 0}, 1, 8);
    }
    for (const auto stage : {TraceStage::kOnDevice, kQueued, TraceStage::kSent, TraceStage::kLanded}) {
      ring.record_at(time += 1000, stage, {.tensor = 7, .partition = 1}, 1, 8);
    }
  }
  const std::string made = text();
  const auto at = [&](const std::string& name, const std::string& phase) {
    const std::size_t found = made.find(R"({"ph":")" + phase + R"(","cat":"partition","name":")" + name + '"');
    return found == std::string::npos ? -1 : std::stod(made.substr(made.find(R"("ts":)", found) + 5));
  };
  double begins = 2;
  for (const char* stage :
       {"queued", "waits for GPU", "copy from GPU", "copied", "credit wait", "sent", "copy to GPU"}) {
    EXPECT_EQ(at(stage, "b"), begins) << stage << made;
    EXPECT_EQ(at(stage, "e"), ++begins) << stage << made;
  }
  EXPECT_EQ(at("tensor 7 [0]", "b"), 2);
  EXPECT_EQ(at("tensor 7 [0]", "e"), 9);
  EXPECT_EQ(at("tensor 7 [1]", "b"), 10);
  EXPECT_EQ(count(made, R"("ph":"b","cat":"partition","name":"waits for GPU")"), 2U) << made;
  EXPECT_EQ(count(made, R"("ph":"b","cat":"partition","name":"queued")"), 2U) << made;
  EXPECT_EQ(count(made, R"("ph":"b","cat":"partition","name":"copy)"), 2U) << made;
}

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

TEST_F(Writer, KeepsTheEventsWhereTheWaitForTheTraceIsInterrupted) {
  struct Interrupted {};
  TraceWriter writer({});
  TraceRing& ring = writer.add_ring();
  for (std::size_t n = 0; n < TraceRing::kEvents; ++n) ring.record(TraceStage::kOperation, {}, 0, n);
  writer.start({.file = file(), .name = "worker 0", .host = "h"});
  const InterruptScope scope([] { throw Interrupted(); });
  EXPECT_THROW(writer.finish(), Interrupted);
  EXPECT_EQ(names(), std::vector<std::string>{"comm.events"});
  EXPECT_TRUE(format(text(events())));
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
