// A server loop alone, with workers that say what they like: right sums, and no harm from wrong pushes.
#include "server/server_loop.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "transport/local/self_transport.h"

namespace bps::server {
namespace {

// A worker made of two endpoints and a record of what it was told.
struct FakeWorker final : transport::ControlSink, transport::DataSink {
  void on_write(transport::DataEndpoint&, std::uint32_t immediate) override { ++answers[immediate]; }
  void on_descriptor(transport::DataEndpoint&, std::span<const std::byte>, const transport::RemoteSpan&) override {}
  void on_written(transport::DataEndpoint&, std::uint64_t) override {}
  void on_message(transport::ControlEndpoint&, std::span<const std::byte> bytes) override {
    const auto message = tensor::decode(bytes);
    ASSERT_TRUE(message.has_value());
    if (const auto* failed = std::get_if<tensor::PushFailed>(&*message)) failures.push_back(*failed);
    if (const auto* missing = std::get_if<tensor::Missing>(&*message)) missing_ranks = missing->ranks;
    if (const auto* credits = std::get_if<tensor::Credits>(&*message)) {
      slots.insert(slots.end(), credits->slots.begin(), credits->slots.end());
    }
  }
  void on_lost(transport::Endpoint&, const std::string&) override {}

  transport::ControlEndpoint* control = nullptr;
  transport::DataEndpoint* data = nullptr;
  std::map<std::uint32_t, int> answers;
  std::vector<tensor::PushFailed> failures;
  std::vector<std::uint32_t> missing_ranks;
  std::vector<tensor::SlotCredit> slots;
  std::vector<float> tensor = std::vector<float>(1000);
  transport::RegionPtr region;
};

class ServerLoopTest : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kWorkers = 3;
  static constexpr std::uint32_t kWindow = 3000;  // slots granted in one turn do not fit into one message
  static constexpr std::uint32_t kSmallSlots = 128;

  ServerLoopTest() {
    van::Membership members;
    members.workers = kWorkers;
    for (std::uint32_t i = 0; i < kWorkers; ++i) {
      van::Node node;
      node.id = i + 1;
      node.worker_rank = static_cast<std::int32_t>(i);
      members.nodes.push_back(node);
    }
    server_loop = std::make_unique<ServerLoop>(ServerLoopOptions{.window = kWindow, .largest_partition = 1 << 20},
                                               members, std::vector<transport::Transport*>{&transport}, counters);
    server_loop->add_group(van::Group{0, {0, 1, 2}});
    server_loop->add_group(van::Group{5, {0, 2}});
    for (std::uint32_t i = 0; i < kWorkers; ++i) {
      FakeWorker& w = workers[i];
      connect_control(*server_loop, i + 1, w);
      w.data = transport.attach(transport.connect_data(request(i + 1)), w);
      server_loop->accept(transport.incoming(), &transport);
      w.region = transport.register_memory(std::as_writable_bytes(std::span(w.tensor)));
      for (float& x : w.tensor) x = static_cast<float>(i + 1);
    }
  }

  static transport::ConnectRequest request(std::uint32_t node) {
    return {.address = {}, .hello = {.node = node}, .deadline = Deadline::after(10), .whom = "server"};
  }
  void connect_control(ServerLoop& to, std::uint32_t node, FakeWorker& worker) {
    worker.control = transport.attach(transport.connect_control(request(node)), worker);
    to.accept(transport.incoming(), &transport);
  }

  tensor::PushHeader header(std::uint32_t worker, std::uint32_t round = 0) {
    tensor::PushHeader h{};
    h.version = transport::kProtocolVersion;
    h.dtype = Dtype::kFloat32;
    h.op = ReduceOp::kSum;
    h.flags = tensor::kHasPayload | tensor::kIsPush | tensor::kIsPull | tensor::kWantsData;
    h.member = static_cast<std::uint16_t>(worker);
    h.group = 0;
    h.tensor = 11;
    h.round = round;
    h.immediate = 100 + worker;
    h.length = 4000;
    const transport::RemoteSpan answer = workers[worker].region->remote(0, 4000);
    h.answer_key = answer.key;
    h.answer_address = answer.address;
    return h;
  }
  void push(std::uint32_t worker, const tensor::PushHeader& h, std::uint64_t length = 4000) {
    const transport::Descriptor post{
        .header = tensor::bytes_of(h), .source = workers[worker].region.get(), .length = length};
    ASSERT_EQ(workers[worker].data->direct()->post({&post, 1}), 1U);
    settle();
  }
  void attach(std::uint32_t worker, std::uint64_t largest_payload) {
    ASSERT_EQ(workers[worker].control->send(encode(tensor::Attach{largest_payload, true})), Status::kOk);
    settle();
  }
  void push_into_slot(std::uint32_t worker, const tensor::PushHeader& h) {
    FakeWorker& w = workers[worker];
    const tensor::SlotCredit slot = w.slots.back();
    w.slots.pop_back();
    std::memcpy(reinterpret_cast<std::byte*>(slot.address), &h, sizeof h);  // SelfTransport: addresses are pointers
    const transport::WriteOp op{.immediate = slot.slot};
    ASSERT_EQ(w.data->write({&op, 1}), 1U);
    settle();
  }
  void settle() {
    for (int i = 0; i < 6; ++i) {
      transport.poll();
      server_loop->step();
    }
  }
  void expect_sum(float sum) {
    for (const FakeWorker& w : workers) {
      for (const float x : w.tensor) ASSERT_EQ(x, sum);
    }
  }

  Counters counters;
  transport::local::SelfTransport transport{counters};
  FakeWorker workers[kWorkers];
  std::unique_ptr<ServerLoop> server_loop;
};

TEST_F(ServerLoopTest, SumsWhenTheLastOneHasPushed) {
  push(2, header(2));
  push(0, header(0));
  EXPECT_TRUE(workers[0].answers.empty());
  EXPECT_EQ(server_loop->open_rounds(), 1U);
  push(1, header(1));
  expect_sum(6);
  for (std::uint32_t i = 0; i < kWorkers; ++i) EXPECT_EQ(workers[i].answers[100 + i], 1);
  EXPECT_EQ(server_loop->open_rounds(), 0U);
  EXPECT_EQ(counters.copies.get(), 0U);
}

TEST_F(ServerLoopTest, NobodyTakesThePlaceOfAWorkerThatIsThere) {
  attach(0, 4000);
  FakeWorker impostor;
  connect_control(*server_loop, 1, impostor);
  EXPECT_EQ(impostor.control->send(Bytes(1)), Status::kPeerLost) << "rejected";
  impostor.data = transport.attach(transport.connect_data(request(1)), impostor);
  server_loop->accept(transport.incoming(), &transport);
  const transport::WriteOp op{.immediate = 1};
  EXPECT_EQ(impostor.data->write({&op, 1}), 0U) << "rejected";
  transport.close(impostor.control);
  transport.close(impostor.data);
  for (std::uint32_t i = 0; i < kWorkers; ++i) push(i, header(i));
  expect_sum(6);
}

TEST_F(ServerLoopTest, ManyWorkersShareTheMemoryForSlots) {
  const std::uint64_t payload = 100'000;
  const auto granted = [&](std::uint64_t memory) {
    van::Membership members;
    members.workers = kWorkers;
    van::Node node;
    node.id = 1;
    node.worker_rank = 0;
    members.nodes.push_back(node);
    ServerLoop one(ServerLoopOptions{.window = 8, .slot_memory = memory, .largest_partition = 1 << 20}, members,
                   {&transport}, counters);
    FakeWorker worker;
    connect_control(one, 1, worker);
    EXPECT_EQ(worker.control->send(encode(tensor::Attach{payload, true})), Status::kOk);
    for (int i = 0; i < 6; ++i) {
      transport.poll();
      one.step();
    }
    const auto small =
        std::ranges::count_if(worker.slots, [](const auto& s) { return tensor::is_small_slot(s.capacity); });
    const auto large = static_cast<std::ptrdiff_t>(worker.slots.size()) - small;
    transport.close(worker.control);  // the other end goes with the transport and hears nothing more
    return std::pair(large, small);
  };
  EXPECT_EQ(granted(0), std::pair(std::ptrdiff_t{8}, std::ptrdiff_t{128}));
  EXPECT_EQ(granted(1 << 30), std::pair(std::ptrdiff_t{8}, std::ptrdiff_t{128}));
  EXPECT_EQ(granted(kWorkers * 400'000), std::pair(std::ptrdiff_t{3}, std::ptrdiff_t{8}));
  EXPECT_EQ(granted(1), std::pair(std::ptrdiff_t{1}, std::ptrdiff_t{8})) << "nobody is left without";
}

TEST_F(ServerLoopTest, EverySlotIsAnnouncedHoweverMany) {
  attach(0, 4000);
  std::set<std::uint32_t> numbers;
  for (const tensor::SlotCredit& slot : workers[0].slots) numbers.insert(slot.slot);
  EXPECT_EQ(numbers.size(), kWindow + kSmallSlots);
  EXPECT_EQ(workers[0].slots.size(), kWindow + kSmallSlots);
}

TEST_F(ServerLoopTest, AWorkerWithFreeSlotsGetsNoMoreOfThem) {
  for (std::uint32_t i = 0; i < 2; ++i) attach(i, 4000);  // pieces so short that all their slots are small ones
  for (std::uint32_t round = 0; round < 20; ++round) push_into_slot(0, header(0, round));
  EXPECT_EQ(counters.overflow_slots.get(), 0U);
  EXPECT_EQ(workers[1].slots.size(), kWindow + kSmallSlots);
}

TEST_F(ServerLoopTest, WhoIsWaitedForWithoutAnySlotGetsOneMore) {
  for (std::uint32_t i = 0; i < kWorkers; ++i) attach(i, 4000);
  // Rank 1 fills all it has with rounds of its own; then the others come with a round that they have not seen of it.
  for (std::uint32_t round = 100; !workers[1].slots.empty(); ++round) push_into_slot(1, header(1, round));
  EXPECT_EQ(counters.overflow_slots.get(), 0U);
  push_into_slot(0, header(0, 7));
  EXPECT_EQ(workers[1].slots.size(), 0U) << "rank 2 is missing too, and can push";
  push_into_slot(2, header(2, 7));
  ASSERT_EQ(workers[1].slots.size(), 1U);
  push_into_slot(1, header(1, 7));
  EXPECT_EQ(server_loop->open_rounds(), kWindow + kSmallSlots);
}

TEST_F(ServerLoopTest, WrongPushesAreRefusedAndHarmNothing) {
  std::vector<tensor::PushHeader> wrong(12, header(0));
  wrong[0].version = 99;
  wrong[1].dtype = static_cast<Dtype>(77);
  wrong[2].op = static_cast<ReduceOp>(9);
  wrong[3].flags = 0;
  wrong[4].flags = tensor::kHasPayload | tensor::kIsPull;
  wrong[5].member = 1;  // somebody else's place
  wrong[6].member = 60000;
  wrong[7].group = 1234;
  wrong[8].length = 0;
  wrong[9].length = 4001;  // no whole elements
  wrong[10].length = ~std::uint64_t{0} - 3;
  wrong[11].length = 8000;  // longer than what is posted
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    push(0, wrong[i]);
    EXPECT_EQ(workers[0].failures.size(), i + 1) << i;
  }
  EXPECT_EQ(server_loop->open_rounds(), 0U);
  EXPECT_EQ(counters.stale.get(), wrong.size());
  const tensor::PushHeader whole = header(0);
  const transport::Descriptor garbage{.header = tensor::bytes_of(whole).first(63), .source = nullptr, .length = 0};
  workers[0].data->direct()->post({&garbage, 1});
  settle();
  for (std::uint32_t i = 0; i < kWorkers; ++i) push(i, header(i));
  expect_sum(6);
}

TEST_F(ServerLoopTest, DuplicatesAndStalePushesAreRefused) {
  push(0, header(0));
  push(0, header(0));
  EXPECT_EQ(workers[0].failures.size(), 1U);
  push(1, header(1));
  push(2, header(2));
  expect_sum(6);
  push(1, header(1));  // the round is over
  EXPECT_EQ(workers[1].failures.size(), 1U);
  expect_sum(6);
  push(1, header(1, 100'000));  // far in the future
  EXPECT_EQ(workers[1].failures.size(), 2U);
}

TEST_F(ServerLoopTest, TwoRoundsNeverMix) {
  push(0, header(0, 0));
  tensor::PushHeader next = header(0, 1);
  next.immediate = 900;
  push(0, next);
  push(1, header(1, 0));
  push(2, header(2, 0));
  EXPECT_EQ(workers[0].answers[100], 1);
  EXPECT_EQ(workers[0].answers.count(900), 0U);
  EXPECT_EQ(server_loop->open_rounds(), 1U);
}

TEST_F(ServerLoopTest, DisagreementReachesEveryoneAndTheNextRoundWorks) {
  push(0, header(0));
  tensor::PushHeader other = header(1);
  other.op = ReduceOp::kMax;
  push(1, other);
  push(2, header(2));
  for (const FakeWorker& w : workers) {
    ASSERT_EQ(w.failures.size(), 1U);
    EXPECT_EQ(w.failures[0].code, ErrorCode::kMismatch);
    EXPECT_NE(w.failures[0].what.find("rank 0"), std::string::npos);
  }
  EXPECT_EQ(server_loop->open_rounds(), 0U);
  for (std::uint32_t i = 0; i < kWorkers; ++i) push(i, header(i, 1));
  expect_sum(6);
}

TEST_F(ServerLoopTest, AGroupAveragesOverItsOwnSize) {
  for (const std::uint32_t i : {0U, 2U}) {
    tensor::PushHeader h = header(i);
    h.group = 5;
    h.member = i == 0 ? 0 : 1;
    h.op = ReduceOp::kAverage;
    push(i, h);
  }
  EXPECT_EQ(workers[0].tensor[999], 2);
  EXPECT_EQ(workers[2].tensor[0], 2);
  EXPECT_EQ(workers[1].tensor[0], 2);  // its own, untouched
  EXPECT_TRUE(workers[1].answers.empty());
}

TEST_F(ServerLoopTest, PushAndPullApart) {
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    tensor::PushHeader h = header(i);
    h.flags = tensor::kHasPayload | tensor::kIsPush;
    push(i, h);
    EXPECT_EQ(workers[i].answers[100 + i], 1);  // the memory is free again
    for (float& x : workers[i].tensor) x = -1;  // and is reused
  }
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    tensor::PushHeader h = header(i);
    h.flags = tensor::kIsPull | tensor::kWantsData;
    push(i, h, 0);
    EXPECT_EQ(workers[i].answers[100 + i], 2);
  }
  expect_sum(6);
  EXPECT_EQ(server_loop->open_rounds(), 0U);
}

TEST_F(ServerLoopTest, SaysWhoIsMissing) {
  push(1, header(1));
  (void)workers[1].control->send(encode(tensor::WhoIsMissing{1, 11, 0, 0}));
  settle();
  EXPECT_EQ(workers[1].missing_ranks, (std::vector<std::uint32_t>{0, 2}));
}

TEST_F(ServerLoopTest, ALostWorkerFreesItsRounds) {
  push(0, header(0));
  push(1, header(1));
  server_loop->lose_node(3);
  settle();
  EXPECT_EQ(server_loop->open_rounds(), 0U);
  tensor::PushHeader h = header(0, 1);
  push(0, h);
  EXPECT_EQ(server_loop->open_rounds(), 0U);  // a group without its third member opens nothing
}

}  // namespace
}  // namespace bps::server
