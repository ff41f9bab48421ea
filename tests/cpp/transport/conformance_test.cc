// SPDX-License-Identifier: Apache-2.0
// What every transport promises, plain and behind the fault decorator.
#include <random>

#include "eventually.h"
#include "transport/shm/shared_memory.h"
#include "transport/two_sides.h"

namespace bps::transport::testing {
namespace {

class Conformance : public TwoSides {
 protected:
  static void fill(std::span<std::byte> bytes, unsigned seed) {
    std::mt19937 random(seed);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  }
  RegionPtr registered(Side& side, std::span<std::byte> bytes) {
    return side.call([&] { return side.transport->register_memory(bytes); });
  }
  // Tells the caller's process of a callee region as the protocol does: by its remote name, used in a write.
  void drop(Side& side, RegionPtr& region) {
    side.call([&] { region.reset(); });
  }
};

TEST_P(Conformance, PlanesAreKeptApart) {
  EXPECT_TRUE(data->is_data_plane);
  EXPECT_FALSE(control->is_data_plane);
  EXPECT_TRUE(callee->data->is_data_plane);
  EXPECT_FALSE(callee->control->is_data_plane);
  EXPECT_EQ(callee->data->hello.node, 7U);
  EXPECT_EQ(callee->data->hello.client_loop, 1U);
  EXPECT_EQ(callee->control->hello.server_loop, 2U);
}

TEST_P(Conformance, MessagesArriveWholeAndInOrder) {
  for (std::size_t i = 0; i < 500; ++i) {
    Bytes message(i * 131 % 60000);
    fill(message, static_cast<unsigned>(i));
    caller->call([&] { EXPECT_EQ(control->send(message), Status::kOk); });
  }
  ASSERT_TRUE(callee->sink.wait([](const Recorder& sink) { return sink.messages.size() == 500; }));
  for (std::size_t i = 0; i < 500; ++i) {
    Bytes message(i * 131 % 60000);
    fill(message, static_cast<unsigned>(i));
    EXPECT_EQ(callee->sink.messages[i], message) << i;
  }
  EXPECT_EQ(caller->counters().data_bytes.get(), 0U);
}

TEST_P(Conformance, APeerThatSendsWithoutEndLeavesTheLoopItsOtherWork) {
  constexpr std::size_t kCount = 2000;
  callee->call([&] { callee->sink.message_takes = std::chrono::microseconds(100); });
  const Bytes message(1000, std::byte{7});
  caller->call([&] {
    for (std::size_t i = 0; i < kCount; ++i) EXPECT_EQ(control->send(message), Status::kOk);
  });
  ASSERT_TRUE(callee->sink.wait([](const Recorder& sink) { return sink.messages.size() == kCount; }));
  callee->sink.look([&](const Recorder& sink) {
    for (const auto& [turn, messages] : sink.messages_by_turn) EXPECT_LE(messages, 2 * TurnBudget::kMessages) << turn;
    for (const Bytes& one : sink.messages) EXPECT_EQ(one, message);
    return 0;
  });
}

TEST_P(Conformance, WriteLandsHeaderAndPayloadTogether) {
  if (GetParam().transport == "shm-copy")
    GTEST_SKIP() << "plain memory is out of reach here; staging has its own tests";
  for (const std::size_t size : {0UL, 1UL, 63UL, 64UL, 65UL, 4096UL, 1UL << 20, (9UL << 20) + 3}) {
    Bytes source(size + 5), target(size + 200, std::byte{0xee}), header(64);
    fill(source, 1);
    fill(header, 2);
    auto from = registered(*caller, source);
    auto to = registered(*callee, target);
    // The region of a peer that only the peer has announced: let it announce itself by a posting, as workers do.
    introduce(*callee, callee->data, *to);
    const WriteOp op{.header = header,
                     .source = from.get(),
                     .source_offset = 5,
                     .length = size,
                     .target = to->remote(100, size + 64),
                     .immediate = 4000000000U};
    post_all(*caller, data, {op});
    const Bytes before(100, std::byte{0xee}), after(target.size() - 164 - size, std::byte{0xee});
    EXPECT_TRUE(std::equal(before.begin(), before.end(), target.begin()));
    EXPECT_TRUE(std::equal(header.begin(), header.end(), target.begin() + 100));
    EXPECT_TRUE(std::equal(source.begin() + 5, source.end(), target.begin() + 164)) << size;
    EXPECT_TRUE(std::equal(after.begin(), after.end(), target.end() - static_cast<std::ptrdiff_t>(after.size())));
    const auto is_whole = [&](const Recorder& sink) { return sink.whole.at(4000000000U); };
    EXPECT_TRUE(callee->sink.look(is_whole)(size + 64));
    EXPECT_FALSE(callee->sink.look(is_whole)(size + 65)) << "whoever expects more is told of less";
    EXPECT_FALSE(callee->sink.look(is_whole)(64 + 1000 + size)) << size;
    EXPECT_EQ(callee->sink.look(is_whole)(64), size == 0);
    drop(*caller, from);
    drop(*callee, to);
  }
  EXPECT_EQ(callee->sink.writes[4000000000U], 8U);
  EXPECT_EQ(caller->counters().data_writes.get(), 8U);
}

// What the peer was not granted goes nowhere, and the connection goes on. (Over RDMA the device knows only regions; on
// one host the server fetches what it wants itself.)
TEST_P(Conformance, WritesThatWereNotGrantedLandNowhere) {
  if (GetParam().transport != "tcp") GTEST_SKIP() << "writes do not pass through the process";
  Bytes source(1000, std::byte{0x11}), target(1000, std::byte{0xee});
  auto from = registered(*caller, source);
  auto to = registered(*callee, target);
  const WriteOp forbidden{
      .source = from.get(), .length = 600, .target = to->remote(0, 600), .immediate = Recorder::kForbidden};
  const WriteOp allowed{.source = from.get(), .length = 100, .target = to->remote(900, 100), .immediate = 5};
  ASSERT_TRUE(eventually([&] { return caller->call([&] { return data->write({&forbidden, 1}); }) > 0; }));
  post_all(*caller, data, {allowed});
  ASSERT_TRUE(eventually([&] { return callee->counters().stale.get() > 0; }));
  EXPECT_EQ(callee->sink.writes[5], 1U);
  EXPECT_EQ(callee->sink.writes[Recorder::kForbidden], 0U);
  EXPECT_EQ(callee->counters().stale.get(), 1U);
  EXPECT_EQ(Bytes(target.begin(), target.begin() + 900), Bytes(900, std::byte{0xee}));
  drop(*caller, from);
  drop(*callee, to);
}

TEST_P(Conformance, AnImmediateAloneIsNoWriteOfAnyLength) {
  post_all(*caller, data, {{.immediate = 6}});
  const auto whole = callee->sink.look([](const Recorder& sink) { return sink.whole.at(6); });
  EXPECT_TRUE(whole(0));
  EXPECT_FALSE(whole(4));
  EXPECT_FALSE(whole(64));
}

// By this the scheduler finds links that have become slow.
TEST_P(Conformance, WhatHasGoneOutIsToldOnceWithTheTimeThatItTook) {
  if (GetParam().transport != "tcp") GTEST_SKIP() << "only links that tcp uses are watched";
  Bytes source(1 << 20), target(1 << 20);
  auto from = registered(*caller, source);
  auto to = registered(*callee, target);
  const auto taken = [&] { return caller->call([&] { return data->take_carried(); }); };
  Carried so_far = taken();
  const std::uint64_t before = so_far.bytes;
  const auto all_are_told = [&](std::uint64_t bytes) {
    const Carried more = taken();
    so_far.bytes += more.bytes;
    so_far.busy_us += more.busy_us;
    return so_far.bytes - before >= bytes;
  };
  std::uint64_t writes = 0;
  const auto write_one = [&] {
    ++writes;
    post_all(*caller, data,
             {{.source = from.get(), .length = source.size(), .target = to->remote(0, target.size()), .immediate = 5}});
    EXPECT_TRUE(eventually([&] { return all_are_told(writes * source.size()); }));
  };
  for (int i = 0; i < 3; ++i) write_one();
  // The kernel counts this time in ticks of several milliseconds, and all writes so far may lie in one.
  EXPECT_TRUE(eventually([&] {
    if (so_far.busy_us == 0) write_one();
    return so_far.busy_us > 0;
  }));
  EXPECT_LT(so_far.bytes - before, (0.1 + static_cast<double>(writes)) * static_cast<double>(source.size()))
      << "nothing is counted twice";
  EXPECT_TRUE(eventually([&] {
    const Carried rest = taken();
    return rest.bytes == 0 && rest.busy_us == 0;
  })) << "nothing is on its way";
  drop(*caller, from);
  drop(*callee, to);
}

// Of a peer that has granted less room than it should have, nothing is overwritten.
TEST_P(Conformance, AWriteThatIsLongerThanItsRoomIsNotSent) {
  if (GetParam().transport == "shm-copy") GTEST_SKIP() << "plain memory is out of reach here";
  Bytes source(1000, std::byte{0x22}), target(1000, std::byte{0x11}), header(64);
  auto from = registered(*caller, source);
  auto to = registered(*callee, target);
  introduce(*callee, callee->data, *to);
  const WriteOp fits{
      .header = header, .source = from.get(), .length = 36, .target = to->remote(0, 100), .immediate = 1};
  WriteOp longer = fits;
  longer.length = 37;
  longer.immediate = 2;
  post_all(*caller, data, {fits});
  const auto is_told = [&] {
    (void)caller->call([&] { return data->write({&longer, 1}); });
    return caller->sink.look([](const Recorder& sink) { return sink.lost > 0; });
  };
  EXPECT_TRUE(eventually(is_told)) << "it was sent, or nobody was told";
  EXPECT_EQ(callee->sink.look([](const Recorder& sink) { return sink.writes.count(2); }), 0U);
  EXPECT_EQ(Bytes(target.begin() + 100, target.end()), Bytes(900, std::byte{0x11}));
  caller->call([&] { caller->transport->close(data); });
  drop(*caller, from);
  drop(*callee, to);
}

TEST_P(Conformance, ManyWritesArriveOnceEachInAnyOrder) {
  if (GetParam().transport == "shm-copy") GTEST_SKIP() << "plain memory is out of reach here";
  constexpr std::size_t kCount = 3000, kRoom = 5000;
  Bytes source(1 << 16), target(kCount * kRoom);
  fill(source, 3);
  auto from = registered(*caller, source);
  auto to = registered(*callee, target);
  introduce(*callee, callee->data, *to);
  std::mt19937 random(4);
  std::vector<WriteOp> ops;
  for (std::uint32_t i = 0; i < kCount; ++i) {
    const std::uint64_t length = random() % kRoom;
    ops.push_back({.source = from.get(),
                   .source_offset = random() % ((1 << 16) - kRoom),
                   .length = length,
                   .target = to->remote(i * kRoom, kRoom),
                   .immediate = i,
                   .token = i});
  }
  post_all(*caller, data, ops);
  for (std::uint32_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(callee->sink.writes[i], 1U) << i;
    EXPECT_EQ(std::memcmp(target.data() + i * kRoom, source.data() + ops[i].source_offset, ops[i].length), 0) << i;
  }
  ASSERT_TRUE(caller->sink.wait([](const Recorder& sink) { return sink.written.size() == kCount; }));
  for (const auto& [token, times] : caller->sink.written) EXPECT_EQ(times, 1U) << token;
  drop(*caller, from);
  drop(*callee, to);
}

TEST_P(Conformance, AFullWindowRefusesAndNeverBlocks) {
  if (GetParam().transport == "shm-copy") GTEST_SKIP() << "plain memory is out of reach here";
  Bytes source(1 << 20), target(1 << 20);
  auto from = registered(*caller, source);
  auto to = registered(*callee, target);
  introduce(*callee, callee->data, *to);
  const WriteOp op{.source = from.get(), .length = 1 << 20, .target = to->remote(0, 1 << 20), .immediate = 9};
  std::size_t accepted = 0;
  bool refused = false;
  callee->call([&] {  // the callee's thread stands still meanwhile
    for (int i = 0; i < 5000 && !refused; ++i) {
      const std::size_t took = caller->call([&] { return data->write({&op, 1}); });
      accepted += took;
      refused = took == 0;
    }
  });
  EXPECT_TRUE(refused);
  ASSERT_TRUE(callee->sink.wait([&](const Recorder& sink) { return sink.write_count() == accepted; }));
  post_all(*caller, data, {op});  // and it goes on
  drop(*caller, from);
  drop(*callee, to);
}

TEST_P(Conformance, WritesOutsideARegionHarmNothing) {
  Bytes source(4096), target(8192, std::byte{0x11});
  fill(source, 6);
  auto from = registered(*caller, source);
  auto to = registered(*callee, std::span(target).first(4096));
  introduce(*callee, callee->data, *to);
  const RemoteSpan good = to->remote(0, 4096);
  const WriteOp outside[] = {
      {.source = from.get(), .length = 4096, .target = {good.key, good.address + 1, 4096}, .immediate = 1},
      {.source = from.get(), .length = 4096, .target = {good.key, ~std::uint64_t{0} - 100, 4096}, .immediate = 2},
      {.source = from.get(), .length = 4096, .target = {good.key + 12345, good.address, 4096}, .immediate = 3}};
  for (const WriteOp& op : outside) {
    for (int tries = 0; tries < 20; ++tries) {
      if (caller->call([&] { return data->write({&op, 1}); }) == 1) break;
    }
  }
  // One of the sides notices and gives the connection up; the immediates are never delivered.
  const auto lost = [](const Recorder& sink) { return sink.lost > 0; };
  const auto is_noticed = [&] { return caller->sink.look(lost) || callee->sink.look(lost); };
  EXPECT_TRUE(eventually(is_noticed)) << "nobody noticed the write";
  EXPECT_EQ(callee->sink.look([](const Recorder& sink) { return sink.writes.size(); }), 0U);
  for (const std::byte b : target) ASSERT_EQ(b, std::byte{0x11});
  caller->call([&] { caller->transport->close(data); });  // until then what it accepted may still be read
  drop(*caller, from);
  drop(*callee, to);
}

// Whoever posted a write waits for its token before the source is used again.
TEST_P(Conformance, TokensOfALostConnectionComeBack) {
  if (GetParam().transport == "shm-copy") GTEST_SKIP() << "plain memory is out of reach here";
  Bytes source(1 << 20), target(1 << 20);
  auto from = registered(*caller, source);
  auto to = registered(*callee, target);
  introduce(*callee, callee->data, *to);
  WriteOp op{.source = from.get(), .length = 1 << 20, .target = to->remote(0, 1 << 20), .immediate = 9};
  std::size_t accepted = 0;
  callee->call([&] {  // the callee's thread stands still meanwhile, so that some of them wait
    for (int refused = 0; refused < 5 && accepted < 2000;) {
      op.token = accepted;
      const std::size_t took = caller->call([&] { return data->write({&op, 1}); });
      accepted += took;
      refused = took == 0 ? refused + 1 : 0;
    }
    caller->call([&] { data->abandon(); });
  });
  EXPECT_TRUE(caller->sink.wait([&](const Recorder& sink) { return sink.written.size() == accepted; }))
      << caller->sink.look([](const Recorder& sink) { return sink.written.size(); }) << " of " << accepted;
  callee->call([&] { callee->transport->close(callee->data); });  // until then what is on its way may still arrive
  drop(*caller, from);
  drop(*callee, to);
}

TEST_P(Conformance, AClosedPeerIsReportedOnce) {
  callee.reset();
  ASSERT_TRUE(caller->sink.wait([](const Recorder& sink) { return sink.lost == 2; }));
  const WriteOp op{.immediate = 1};
  EXPECT_EQ(caller->call([&] { return data->write({&op, 1}); }), 0U);
  EXPECT_NE(caller->call([&] { return control->send(Bytes(4)); }), Status::kOk);
  EXPECT_EQ(caller->sink.lost, 2);  // one per endpoint
}

TEST_P(Conformance, PostingsAreReadAndWrittenInPlace) {
  if (data->direct() == nullptr) GTEST_SKIP() << GetParam().transport << " has no direct access";
  auto piece = shm::SharedMemory::create(1 << 16);
  Bytes plain(1 << 16);
  fill(piece->bytes(), 7);
  fill(plain, 8);
  const Bytes was(piece->bytes().begin(), piece->bytes().end());
  auto mapped = registered(*caller, piece->bytes());
  auto copied = registered(*caller, plain);
  EXPECT_TRUE(data->direct()->peer_reaches(*mapped));
  EXPECT_TRUE(data->direct()->peer_maps(*mapped));
  EXPECT_EQ(data->direct()->peer_reaches(*copied), GetParam().transport == "shm");

  Bytes header(64);
  fill(header, 9);
  post(*caller, data, {.header = header, .source = mapped.get(), .source_offset = 100, .length = 1000});
  ASSERT_TRUE(callee->sink.wait([](const Recorder& sink) { return sink.postings.size() == 1; }));
  const auto posted = callee->sink.postings[0];
  EXPECT_EQ(posted.header, header);
  callee->call([&] {
    DirectAccess& direct = *callee->data->direct();
    std::byte* there = direct.map(posted.span);
    ASSERT_NE(there, nullptr);
    EXPECT_EQ(std::memcmp(there, was.data() + 100, 1000), 0);
    std::memset(there, 0x55, 1000);
    EXPECT_EQ(direct.map({posted.span.key, (1 << 16) - 10, 11}), nullptr);
    EXPECT_EQ(direct.map({posted.span.key + 99, 0, 1}), nullptr);
  });
  EXPECT_EQ(piece->bytes()[100], std::byte{0x55});
  EXPECT_EQ(piece->bytes()[1100], was[1100]);

  if (GetParam().transport == "shm") {
    post(*caller, data, {.header = header, .source = copied.get(), .source_offset = 0, .length = 1 << 16});
    ASSERT_TRUE(callee->sink.wait([](const Recorder& sink) { return sink.postings.size() == 2; }));
    const RemoteSpan span = callee->sink.postings[1].span;
    callee->call([&] {
      DirectAccess& direct = *callee->data->direct();
      EXPECT_EQ(direct.map(span), nullptr);
      Bytes got(1 << 16);
      EXPECT_EQ(direct.get(span, got.data()), Status::kOk);
      EXPECT_EQ(got, plain);
      EXPECT_EQ(direct.put({span.key, 5, 3}, got.data() + 100), Status::kOk);
      EXPECT_EQ(direct.get({span.key, 1 << 16, 1}, got.data()), Status::kProtocol);
      EXPECT_EQ(direct.put({span.key, ~std::uint64_t{0}, 2}, got.data()), Status::kProtocol);
    });
    EXPECT_EQ(plain[6], plain[101]);
  }

  const std::uint64_t key = mapped->key();
  drop(*caller, mapped);  // withdrawn: the callee must not touch it any more
  for (int i = 0; i < 100 && callee->call([&] { return callee->data->direct()->map({key, 0, 1}); }); ++i) {
  }
  EXPECT_EQ(callee->call([&] { return callee->data->direct()->map({key, 0, 1}); }), nullptr);
  drop(*caller, copied);
}

// A server finds where the payload lies, and then where the result goes: what it hears of the peer in between must not
// take the first from under it.
TEST_P(Conformance, AMappingOutlivesItsWithdrawalUntilTheCallEnds) {
  if (data->direct() == nullptr) GTEST_SKIP() << GetParam().transport << " has no direct access";
  auto first_piece = shm::SharedMemory::create(1 << 16);
  auto second_piece = shm::SharedMemory::create(1 << 16);
  std::memset(first_piece->bytes().data(), 0x33, 1 << 16);
  auto first = registered(*caller, first_piece->bytes());
  auto second = registered(*caller, second_piece->bytes());
  introduce(*caller, data, *first);
  const RemoteSpan where = first->remote(0, 1 << 16);
  const RemoteSpan other = second->remote(0, 1 << 16);
  callee->call([&] {
    DirectAccess& direct = *callee->data->direct();
    const std::byte* there = direct.map(where);
    ASSERT_NE(there, nullptr);
    drop(*caller, first);
    // By a posting that the peer announces it with, perhaps after some tries of a faulty connection.
    ASSERT_TRUE(eventually([&] {
      caller->call([&] { (void)data->direct()->share(*second); });
      return direct.map(other) != nullptr;
    }));
    EXPECT_EQ(direct.map(where), nullptr) << "it is withdrawn";
    for (std::size_t i = 0; i < (1 << 16); i += 4096) EXPECT_EQ(there[i], std::byte{0x33});
  });
  drop(*caller, second);
}

INSTANTIATE_TEST_SUITE_P(Every, Conformance,
                         ::testing::Values(Way{"shm", false}, Way{"shm", true}, Way{"shm-copy", false},
                                           Way{"tcp", false}, Way{"tcp", true}, Way{"rdma", false}, Way{"rdma", true},
                                           Way{"rdma-rails", false}),
                         name_of);

}  // namespace
}  // namespace bps::transport::testing
