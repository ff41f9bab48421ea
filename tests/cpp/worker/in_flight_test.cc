// SPDX-License-Identifier: Apache-2.0
// Immediates name exactly one partition, and only while it is on its way.
#include "worker/in_flight.h"

#include <gtest/gtest.h>

#include "transport/local/self_transport.h"
#include "worker/server_connection.h"
#include "worker/worker_loop.h"

namespace bps::worker {
namespace {

TEST(SilencesUntil, ARelayHasJudgedItsServerBeforeItIsJudged) {
  using Owed = InFlight::Owed;
  for (const Owed what : {Owed::kReply, Owed::kAnswer}) {  // both come from the one that is asked
    EXPECT_EQ(silences_until(what, true), 1);
    EXPECT_EQ(silences_until(what, false), 1);
  }
  // It waits for the outcome itself, which the server owes it, and then for the scheduler.
  EXPECT_GT(silences_until(Owed::kOutcome, true), silences_until(Owed::kOutcome, false) + 1);
}

class InFlightTest : public ::testing::Test {
 protected:
  InFlight& send(std::uint32_t& index) {
    index = table.allocate();
    InFlight& entry = table[index];
    entry.transfer = &portion;
    entry.server = &server;
    return entry;
  }

  transport::Reactor reactor{"test", transport::Spin{}};  // never started
  transport::local::SelfTransport transport{reactor.counters()};
  WorkerLoop loop{WorkerLoopOptions{.places = 2, .largest_partition = 1024}, reactor};
  ServerConnection& server = loop.add_server(0, 0, "server", transport);
  ServerConnection& other = loop.add_server(1, 1, "other", transport);
  Portion portion;
  InFlightTable table;
};

TEST_F(InFlightTest, AnAnswerFindsItsPartitionOnce) {
  std::uint32_t index = 0;
  send(index).part.partition = 7;
  const std::uint32_t immediate = table.immediate_of(index);
  ASSERT_NE(table.find(immediate, server), nullptr);
  EXPECT_EQ(table.find(immediate, server)->part.partition, 7U);
  EXPECT_EQ(table.find(immediate, other), nullptr) << "an answer of another server";
  table.free(index);
  EXPECT_EQ(table.find(immediate, server), nullptr) << "an answer that came twice";
}

TEST_F(InFlightTest, AnEntryThatIsUsedAgainHasAnotherImmediate) {
  std::uint32_t index = 0;
  send(index);
  const std::uint32_t before = table.immediate_of(index);
  table.free(index);
  std::uint32_t again = 0;
  send(again);
  EXPECT_EQ(again, index);
  EXPECT_NE(table.immediate_of(again), before);
  EXPECT_EQ(table.find(before, server), nullptr) << "a late answer";
}

TEST_F(InFlightTest, WhatWasNotSentKeepsItsImmediate) {
  std::uint32_t index = 0;
  send(index);
  const std::uint32_t before = table.immediate_of(index);
  table.free_unsent(index);
  EXPECT_EQ(table.find(before, server), nullptr);
  std::uint32_t again = 0;
  send(again);
  EXPECT_EQ(table.immediate_of(again), before);
}

TEST_F(InFlightTest, ImmediatesOutOfRangeNameNothing) {
  EXPECT_EQ(table.find(0, server), nullptr);
  std::uint32_t index = 0;
  send(index);
  EXPECT_EQ(table.find(0xffffffff, server), nullptr);
  EXPECT_EQ(table.find(index + 1, server), nullptr);
}

}  // namespace
}  // namespace bps::worker
