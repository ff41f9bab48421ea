// SPDX-License-Identifier: Apache-2.0
// Many endpoints, and many one after the other, on real verbs. What the kernel holds for the device is as before.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "eventually.h"
#include "transport/two_sides.h"

namespace bps::transport::testing {
namespace {

class RdmaScale : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!test_rdma().usable()) GTEST_SKIP() << test_rdma().why_not;
    {
      const Side warm_up(Way{"rdma", false}, credentials);
    }  // librdmacm keeps a device from its first use on
    before = kernel_objects();
    no_connection = queue_pairs();
    callee = std::make_unique<Side>(Way{"rdma", false}, credentials);
    caller = std::make_unique<Side>(Way{"rdma", false}, credentials);
    address = callee->open();
  }

  void TearDown() override {
    if (caller == nullptr) return;
    caller.reset();
    callee.reset();
    EXPECT_EQ(kernel_objects(), before);
  }

  // "link rxe0 pd 3 cq 5 qp 4 ...", by the rdma tool.
  static std::string kernel_objects() {
    std::string text;
    std::FILE* tool = ::popen("rdma resource show 2>&1", "r");
    std::array<char, 256> line{};
    while (tool != nullptr && std::fgets(line.data(), line.size(), tool) != nullptr) text += line.data();
    if (tool == nullptr || ::pclose(tool) != 0) return "no rdma tool";
    return text;
  }
  // "qp 4" of it.
  static std::string queue_pairs() {
    const std::string text = kernel_objects();
    const std::size_t at = text.find(" qp ");
    return at == std::string::npos ? text : text.substr(at, text.find(' ', at + 4) - at);
  }
  static std::size_t open_files() {
    const std::filesystem::directory_iterator files("/proc/self/fd");
    return static_cast<std::size_t>(std::distance(begin(files), end(files)));
  }

  const Credentials credentials = Credentials::from("job", "secret");
  std::string before;
  std::string no_connection;
  std::unique_ptr<Side> callee;
  std::unique_ptr<Side> caller;
  Bytes address;
};

TEST_F(RdmaScale, SixtyFourPeersOfOneServer) {
  constexpr std::size_t kPeers = 64;
  constexpr std::size_t kWrites = 300;  // of each; all together several times what the shared receive queue holds
  constexpr std::size_t kSize = 512;
  std::vector<std::byte> source(kPeers * kSize);
  std::vector<std::byte> target(kPeers * kWrites * kSize);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i / kSize * 37 + i % 251);
  RegionPtr from = caller->call([&] { return caller->transport->register_memory(source); });
  RegionPtr to = callee->call([&] { return callee->transport->register_memory(target); });
  std::vector<DataEndpoint*> data;
  std::vector<ControlEndpoint*> control;
  for (std::size_t i = 0; i < kPeers; ++i) {
    control.push_back(caller->connect_control(address));
    data.push_back(caller->connect_data(address));
  }

  std::vector<std::size_t> posted(data.size());
  const auto post_up_to = [&](std::size_t peer, std::size_t goal) {
    const auto all_posted = [&] {
      const std::size_t number = peer * kWrites + posted[peer];
      const WriteOp op{.source = from.get(),
                       .source_offset = peer * kSize,
                       .length = kSize,
                       .target = to->remote(number * kSize, kSize),
                       .immediate = static_cast<std::uint32_t>(number)};
      posted[peer] += caller->call([&] { return data[peer]->write({&op, 1}); });
      return posted[peer] >= goal;
    };
    ASSERT_TRUE(eventually(all_posted, 60, kAtOnce));
  };
  for (std::size_t goal = 50; goal <= kWrites / 2; goal += 50) {  // in turns, so that all are at it
    for (std::size_t peer = 0; peer < kPeers; ++peer) post_up_to(peer, goal);
  }
  ASSERT_TRUE(callee->sink.wait([](const Recorder& sink) { return sink.write_count() == kPeers * kWrites / 2; }));

  // Half of them go. The others do not notice.
  for (std::size_t peer = 0; peer < kPeers; peer += 2) {
    caller->call([&] {
      caller->transport->close(data[peer]);
      caller->transport->close(control[peer]);
    });
  }
  ASSERT_TRUE(callee->sink.wait([](const Recorder& sink) { return sink.lost == kPeers; }));
  const Bytes word(10);
  for (std::size_t peer = 1; peer < kPeers; peer += 2) {
    post_up_to(peer, kWrites);
    caller->call([&] { EXPECT_EQ(control[peer]->send(word), Status::kOk); });
  }
  const std::size_t all = kPeers * kWrites / 2 + kPeers / 2 * kWrites / 2;
  ASSERT_TRUE(callee->sink.wait(
      [&](const Recorder& sink) { return sink.write_count() == all && sink.messages.size() == kPeers / 2; }));
  EXPECT_EQ(callee->sink.writes.size(), all) << "each immediate once";
  for (const auto& [number, times] : callee->sink.writes) {
    const std::size_t peer = number / kWrites;
    ASSERT_EQ(std::memcmp(target.data() + number * kSize, source.data() + peer * kSize, kSize), 0) << number;
  }
  EXPECT_EQ(caller->sink.lost, 0);
  caller->call([&] { from.reset(); });
  callee->call([&] { to.reset(); });
}

// The device refuses it: both ends of that connection hear so, and nobody else of anything.
TEST_F(RdmaScale, AWriteWhereItMayNotEndsItsOwnConnectionOnly) {
  std::vector<std::byte> source(4096, std::byte{0xaa});
  std::vector<std::byte> target(3 * 4096);
  RegionPtr from = caller->call([&] { return caller->transport->register_memory(source); });
  RegionPtr to =
      callee->call([&] { return callee->transport->register_memory(std::span(target).subspan(4096, 4096)); });
  const RemoteSpan whole = to->remote(0, 4096);
  const RemoteSpan wrong[] = {{whole.key ^ 0x5a00, whole.address, 4096},  // no such memory
                              {whole.key, whole.address - 1, 4096},       // from before it
                              {whole.key, whole.address + 64, 4096}};     // to behind it
  DataEndpoint* good = caller->connect_data(address);
  int lost = 0;
  for (const RemoteSpan& where : wrong) {
    DataEndpoint* bad = caller->connect_data(address);
    const WriteOp op{.source = from.get(), .length = 4096, .target = where, .immediate = 666};
    caller->call([&] { EXPECT_EQ(bad->write({&op, 1}), 1U); });
    ++lost;
    ASSERT_TRUE(caller->sink.wait([&](const Recorder& sink) { return sink.lost == lost; }));
    ASSERT_TRUE(callee->sink.wait([&](const Recorder& sink) { return sink.lost == lost; }));
    EXPECT_EQ(target, std::vector<std::byte>(target.size()));
  }
  const WriteOp op{.source = from.get(), .length = 4096, .target = whole, .immediate = 7};
  caller->call([&] { EXPECT_EQ(good->write({&op, 1}), 1U); });
  ASSERT_TRUE(callee->sink.wait([](const Recorder& sink) { return sink.writes.contains(7); }));
  EXPECT_FALSE(callee->sink.writes.contains(666));
  EXPECT_EQ(std::memcmp(target.data() + 4096, source.data(), 4096), 0);
  caller->call([&] { from.reset(); });
  callee->call([&] { to.reset(); });
}

// Two thousand; ten in the long form.
TEST_F(RdmaScale, ThousandsOfConnectionsLeaveNothing) {
  const char* all = std::getenv("BPS_TEST_ALL");
  const std::size_t cycles = all != nullptr && *all != '\0' ? 5000 : 1000;  // of two connections each
  std::vector<std::byte> target(64);
  RegionPtr to = callee->call([&] { return callee->transport->register_memory(target); });
  std::string settled;
  std::size_t files = 0;
  for (std::size_t cycle = 1; cycle <= cycles; ++cycle) {
    ControlEndpoint* control = caller->connect_control(address);
    DataEndpoint* data = caller->connect_data(address);
    ASSERT_TRUE(callee->sink.wait([&](const Recorder&) { return callee->data && callee->control; }));
    const WriteOp op{.target = to->remote(0, 0), .immediate = 5};
    caller->call([&] { EXPECT_EQ(data->write({&op, 1}), 1U); });
    ASSERT_TRUE(callee->sink.wait([&](const Recorder& sink) { return sink.write_count() == cycle; })) << cycle;
    caller->call([&] {
      caller->transport->close(control);
      caller->transport->close(data);
    });
    ASSERT_TRUE(callee->sink.wait([&](const Recorder& sink) { return sink.lost == static_cast<int>(2 * cycle); }))
        << cycle;
    callee->call([&] {
      callee->transport->close(callee->control);
      callee->transport->close(callee->data);
      callee->control = nullptr;
      callee->data = nullptr;
    });
    if (cycle == 10) {
      // A thread gives queue pairs back to the kernel after their connections are closed.
      ASSERT_TRUE(eventually([&] { return queue_pairs() == no_connection; })) << kernel_objects();
      settled = kernel_objects();
      files = open_files();
    }
  }
  EXPECT_TRUE(eventually([&] { return kernel_objects() == settled; })) << kernel_objects() << "is not " << settled;
  EXPECT_EQ(open_files(), files);
  callee->call([&] { to.reset(); });
}

}  // namespace
}  // namespace bps::transport::testing
