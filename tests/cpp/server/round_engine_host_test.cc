// SPDX-License-Identifier: Apache-2.0
// Rounds of a host, at its relay: ranks 0 and 1 are here, rank 2 is on another host. And rounds to which hosts
// contribute, at a server.
#include <limits>

#include "server/round_engine_fixture.h"
#include "tensor/key_map.h"

namespace bps::server {
namespace {

constexpr std::uint32_t kGroup = 5;
constexpr std::uint32_t kPlace = 3;

class RoundEngineHostTest : public RoundEngineTest, public tensor::ContributionSender {
 protected:
  struct Contributed {
    std::uint32_t number;
    tensor::PushHeader header;
    std::int32_t priority;
    std::uint32_t place;
  };

  RoundEngineHostTest() {
    van::Membership members;
    members.workers = kWorkers;
    members.servers = 1;
    for (std::uint32_t i = 0; i <= kWorkers; ++i) {
      van::Node node;
      node.id = i + 1;
      node.worker_rank = i < kWorkers ? static_cast<std::int32_t>(i) : van::kNoRank;
      node.server_rank = i < kWorkers ? van::kNoRank : 0;
      node.host_key = i < 2 ? "here" : i == 2 ? "there" : "server";
      node.sums_on_host = i < kWorkers;
      members.nodes.push_back(node);
    }
    hosts = van::Hosts(members);
    engine.add_group({kGroup, {0, 1, 2}});
    source = &engine.relay_by(this);
    share_memory();
  }

  std::uint64_t largest() const override { return 1 << 20; }
  void contribute(std::uint32_t number, const tensor::PushHeader& header, std::int32_t priority,
                  std::uint32_t place) override {
    contributed.push_back({number, header, priority, place});
  }
  void note_landed(std::uint32_t number) override { landed.push_back(number); }
  void cancel(std::uint32_t number, const Error& why) override { cancelled.emplace_back(number, why.what()); }
  void refuse(const tensor::PushHeader& header, std::uint32_t place, const Error& why) override {
    EXPECT_EQ(header.tensor, 11U);
    refused.emplace_back(place, why.what());
  }

  tensor::PushHeader for_host(std::uint32_t worker, std::uint8_t flags, std::uint32_t round = 0) {
    tensor::PushHeader made = header(worker, flags | tensor::kForHost, round);
    made.group = kGroup;
    made.place = kPlace;
    made.priority = static_cast<std::int32_t>(worker);
    return made;
  }
  tensor::PushHeader of_network(std::uint32_t worker, std::uint8_t flags, std::uint32_t round = 0) {
    tensor::PushHeader made = header(worker, flags, round);
    made.group = kGroup;
    return made;
  }
  tensor::Cancel gives_up(std::uint32_t worker, bool for_host) {
    return {kGroup, 11, 0, ErrorCode::kTimeout, "gave up", "", {{100 + worker, 0, kPlace}}, for_host};
  }
  // What the contribution sends, summed as late as that.
  float sum_sent() {
    std::vector<float> buffer(kBytes / sizeof(float));
    auto* const into = reinterpret_cast<std::byte*>(buffer.data());
    EXPECT_EQ(source->sum(contributed.at(0).number, Dtype::kFloat32, into), Status::kOk);
    return buffer.back();
  }
  void answer_with(float value) {
    const std::vector<float> result(kBytes / sizeof(float), value);
    source->deliver(contributed.at(0).number, reinterpret_cast<const std::byte*>(result.data()));
  }

  tensor::ContributionSource* source = nullptr;
  std::vector<Contributed> contributed;
  std::vector<std::pair<std::uint32_t, std::string>> cancelled, refused;
  std::vector<std::uint32_t> landed;
};

TEST_F(RoundEngineHostTest, OneContributionForAllRanksAndTheAnswerForEach) {
  post(1, for_host(1, kPush | kPull));
  EXPECT_TRUE(contributed.empty());
  post(0, for_host(0, kPush | kPull));
  ASSERT_EQ(contributed.size(), 1U);
  const Contributed& sent = contributed[0];
  EXPECT_EQ(sent.place, kPlace);
  EXPECT_EQ(sent.priority, 1) << "the highest of the ranks";
  EXPECT_EQ(sent.header.position, 0) << "the lowest rank of the host";
  EXPECT_EQ(sent.header.flags, kPush | kPull) << "to the server it is a push like any other";
  EXPECT_EQ(sent.header.place, 0U);
  EXPECT_EQ(sum_sent(), 3);
  EXPECT_TRUE(data(0).writes.empty()) << "nobody is answered before the server has";
  answer_with(42);
  for (std::uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(memory[i].back(), 42);
    EXPECT_EQ(data(i).immediates(), std::vector<std::uint32_t>{100 + i});
  }
  EXPECT_EQ(engine.open_rounds(), 0U);
  EXPECT_EQ(counters.host_sums.get(), 1U);
}

// A view that ends now leaves the result with every rank of the host, or nothing is said of it.
TEST_F(RoundEngineHostTest, InTwoPhasesTheServerHearsOfAResultThatAllRanksHave) {
  constexpr std::uint8_t kBoth = kPush | kPull | tensor::kTwoPhase;
  for (std::uint32_t i = 0; i < 2; ++i) post(i, for_host(i, kBoth));
  ASSERT_EQ(contributed.size(), 1U);
  EXPECT_EQ(contributed[0].header.flags, kBoth);
  const std::vector<float> result(kBytes / sizeof(float), 42.0F);
  source->propose(contributed[0].number, reinterpret_cast<const std::byte*>(result.data()));
  for (std::uint32_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(landed.empty());
    EXPECT_EQ(memory[i].back(), 42);
    EXPECT_EQ(data(i).immediates(), std::vector<std::uint32_t>{100 + i});
    const std::uint32_t immediate = 100 + i;
    engine.on_landed(*sessions[i], {&immediate, 1});
  }
  EXPECT_EQ(landed, std::vector<std::uint32_t>{contributed[0].number});
  EXPECT_FALSE(due.commits) << "another host may lack it";
  source->deliver(contributed[0].number, reinterpret_cast<const std::byte*>(result.data()));
  EXPECT_TRUE(due.commits);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineHostTest, InTwoPhasesTheEndOfTheViewIsNoFailureOfACancelledRound) {
  constexpr std::uint8_t kBoth = kPush | kPull | tensor::kTwoPhase;
  for (std::uint32_t i = 0; i < 2; ++i) post(i, for_host(i, kBoth));
  const tensor::Cancelled reply = engine.cancel(*sessions[0], gives_up(0, true));
  EXPECT_EQ(reply.pending, std::vector<std::uint32_t>{100});
  source->fail(contributed.at(0).number, Error(ErrorCode::kRoundAborted, "the view has ended", ""), {});
  for (std::uint32_t i = 0; i < 2; ++i) {
    const auto failed = control(i).sent<tensor::PushFailed>();
    ASSERT_EQ(failed.size(), 1U);
    EXPECT_EQ(failed[0].code, ErrorCode::kRoundAborted);
  }
}

TEST_F(RoundEngineHostTest, APullThatComesWhileTheServerSumsIsNoSecondContribution) {
  for (std::uint32_t i = 0; i < 2; ++i) {
    post(i, for_host(i, kPush));
    engine.resume();  // copies the payload and acknowledges the push
  }
  ASSERT_EQ(contributed.size(), 1U);
  post(0, for_host(0, kPull));
  EXPECT_EQ(contributed.size(), 1U);
  answer_with(42);
  EXPECT_EQ(memory[0].back(), 42);
  EXPECT_EQ(engine.open_rounds(), 1U) << "rank 1 has not pulled";
  post(1, for_host(1, kPull));
  EXPECT_EQ(memory[1].back(), 42);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineHostTest, OfABroadcastOnlyTheOtherHostsWantData) {
  auto root = for_host(0, kPush | tensor::kIsPull);
  auto other = for_host(1, tensor::kIsPush | kPull);
  root.kind = other.kind = tensor::OperationKind::kBroadcast;
  post(0, root);
  post(1, other);
  ASSERT_EQ(contributed.size(), 1U);
  EXPECT_EQ(contributed[0].header.flags, kPush | tensor::kIsPull);
  EXPECT_EQ(sum_sent(), 1);
}

TEST_F(RoundEngineHostTest, ADeadlineBeforeTheHostHasContributedIsToldToTheServerAndToTheRanks) {
  post(0, for_host(0, kPush | kPull));
  const tensor::Cancelled reply = engine.cancel(*sessions[0], gives_up(0, true));
  EXPECT_EQ(reply.aborted, std::vector<std::uint32_t>{100});
  EXPECT_EQ(reply.missing, std::vector<std::uint32_t>{1});
  ASSERT_EQ(refused.size(), 1U);
  EXPECT_EQ(refused[0].first, kPlace);
  post(1, for_host(1, kPush | kPull));
  ASSERT_EQ(failures(1).size(), 1U);
  EXPECT_EQ(failures(1)[0].code, ErrorCode::kTimeout);
  EXPECT_TRUE(contributed.empty());
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineHostTest, AfterThatTheServerDecides) {
  for (std::uint32_t i = 0; i < 2; ++i) post(i, for_host(i, kPush | kPull));
  EXPECT_EQ(engine.cancel(*sessions[0], gives_up(0, true)).pending, std::vector<std::uint32_t>{100});
  ASSERT_EQ(cancelled.size(), 1U);
  EXPECT_EQ(cancelled[0].first, contributed.at(0).number);
  EXPECT_TRUE(failures(1).empty());
  source->fail(contributed[0].number, Error(ErrorCode::kTimeout, "rank 0 gave up", ""), std::vector<std::uint32_t>{2});
  const auto outcome = control(0).sent<tensor::Cancelled>();
  ASSERT_EQ(outcome.size(), 1U) << "it waits for this, and not for an error";
  EXPECT_EQ(outcome[0].aborted, std::vector<std::uint32_t>{100});
  EXPECT_EQ(outcome[0].missing, std::vector<std::uint32_t>{2});
  EXPECT_EQ(failures(1).size(), 1U);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

// Its worker has not given it up, and would take the outcome of a Cancel for an end without an error.
TEST_F(RoundEngineHostTest, APushThatWaitsBesideACancelledPullFailsLikeThoseOfTheOthers) {
  post(0, for_host(0, kPush));  // there is no slot for its payload
  post(1, for_host(1, kPush | kPull));
  post(0, for_host(0, kPull));
  ASSERT_EQ(contributed.size(), 1U);
  tensor::Cancel pull = gives_up(0, true);
  pull.partitions[0].immediate = 150;
  EXPECT_EQ(engine.cancel(*sessions[0], pull).pending, std::vector<std::uint32_t>{150});
  source->fail(contributed[0].number, Error(ErrorCode::kTimeout, "rank 0 gave up", ""), std::vector<std::uint32_t>{2});
  const auto outcome = control(0).sent<tensor::Cancelled>();
  ASSERT_EQ(outcome.size(), 1U);
  EXPECT_EQ(outcome[0].aborted, std::vector<std::uint32_t>{150});
  ASSERT_EQ(failures(0).size(), 1U);
  EXPECT_EQ(failures(0)[0].immediate, 100U);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineHostTest, WithoutMemoryAPushIsAcknowledgedWithTheAnswer) {
  transport.out_of_memory = true;
  post(0, for_host(0, kPush));
  post(1, for_host(1, kPush | kPull));
  ASSERT_EQ(contributed.size(), 1U);
  EXPECT_TRUE(engine.resume());
  EXPECT_TRUE(failures(0).empty()) << "the servers decide by now";
  post(0, for_host(0, kPull));
  answer_with(42);
  EXPECT_EQ(data(0).immediates(), (std::vector<std::uint32_t>{100, 150}));
  EXPECT_EQ(memory[0].back(), 42);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineHostTest, OrTheSumWasCompleteAndEverybodyGetsIt) {
  for (std::uint32_t i = 0; i < 2; ++i) post(i, for_host(i, kPush | kPull));
  EXPECT_EQ(engine.cancel(*sessions[0], gives_up(0, true)).pending.size(), 1U);
  answer_with(42);
  EXPECT_EQ(memory[0].back(), 42);
  EXPECT_EQ(memory[1].back(), 42);
  EXPECT_TRUE(failures(1).empty());
}

TEST_F(RoundEngineHostTest, ALostRankIsNotWrittenTo) {
  for (std::uint32_t i = 0; i < 2; ++i) post(i, for_host(i, kPush | kPull));
  engine.gone().lose(1, "worker 1 is lost");
  engine.fail_lost();
  ASSERT_EQ(cancelled.size(), 1U) << "its payload may be gone";
  answer_with(42);  // which had been sent already
  EXPECT_EQ(memory[0].back(), 42);
  EXPECT_EQ(memory[1].back(), 2);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineHostTest, ARoundThatFailedElsewhereDoesNotWaitForTheOthersOfTheHost) {
  post(0, for_host(0, kPush | kPull));
  source->fail_round(kGroup, 11, 0, 0, Error(ErrorCode::kMismatch, "ranks disagree", ""));
  ASSERT_EQ(failures(0).size(), 1U);
  ASSERT_EQ(refused.size(), 1U) << "the server keeps the round until every host has come or given up";
  EXPECT_EQ(refused[0].first, kPlace);
  post(1, for_host(1, kPush | kPull));
  EXPECT_EQ(failures(1).size(), 1U);
  EXPECT_TRUE(contributed.empty());
}

TEST_F(RoundEngineHostTest, OnlyRanksOfThisHostThatAreReachedDirectlyMayAskForThat) {
  post(2, for_host(2, kPush | kPull));
  EXPECT_EQ(failures(2).size(), 1U) << "another host's rank";
  use_slots(1);
  land(0, for_host(0, kPush | kPull));
  EXPECT_EQ(failures(0).size(), 1U) << "over the network";
  auto someone_else = for_host(0, kPush | kPull);
  someone_else.position = 1;
  post(0, someone_else);
  EXPECT_EQ(failures(0).size(), 2U);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineHostTest, AServerWaitsForEachHostOnce) {
  use_slots(1);
  land(0, of_network(0, kPush | kPull));  // for ranks 0 and 1
  land(2, of_network(2, kPush | kPull));
  ASSERT_EQ(data(2).writes.size() + data(0).writes.size(), 2U);
  EXPECT_EQ(data(1).writes.size(), 0U);
}

TEST_F(RoundEngineHostTest, AHostContributesInTheNameOfItsLowestRankAndNobodyElseDoes) {
  post(1, of_network(1, kPush | kPull));
  EXPECT_EQ(failures(1).size(), 1U) << "rank 1 is not the lowest";
  auto in_its_name = of_network(2, kPush | kPull);
  in_its_name.position = 0;
  post(2, in_its_name);
  EXPECT_EQ(failures(2).size(), 1U) << "from another host";
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineHostTest, ARelayIsToldOfARoundThatFailedWithoutIt) {
  post(2, of_network(2, kPush | kPull));
  const tensor::Cancelled reply = engine.cancel(*sessions[2], gives_up(2, false));
  EXPECT_EQ(reply.missing, (std::vector<std::uint32_t>{0, 1}));
  std::size_t told = 0;
  for (const std::uint32_t relay : {0U, 1U}) told += control(relay).sent<tensor::RoundFailed>().size();
  EXPECT_EQ(told, 1U) << "the one that speaks for the host about this partition";
  EXPECT_EQ(engine.open_rounds(), 1U) << "the host may still come";
  EXPECT_EQ(engine.cancel(*sessions[1], gives_up(0, false)).aborted.size(), 1U);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

// It has waited for what it contributed to, but for a push on its own: the relay's contribution would be here.
TEST_F(RoundEngineHostTest, ARankThatLeavesHasNotContributedAtItsRelay) {
  post(2, of_network(2, kPush | kPull));
  engine.gone().leave(1, "worker 1 has left");
  engine.fail_lost();
  EXPECT_EQ(failures(2).size(), 1U);
}

// When nobody of that host is left the relay is asked, whose contribution may be on its way.
TEST_F(RoundEngineHostTest, ARankThatLeavesMayHavePushedAtItsRelay) {
  for (const bool is_on_its_way : {true, false}) {
    const std::uint32_t round = is_on_its_way ? 0 : 1;
    auto push = of_network(2, kPush | kPull, round);
    push.kind = tensor::OperationKind::kSplit;
    const std::uint32_t relay = hosts.relay(0, 0, tensor::relay_hash(tensor::spread_of(push.tensor, push.partition)));
    if (is_on_its_way) {
      post(2, push);
      engine.gone().leave(1, "worker 1 has left");
      engine.fail_lost();
      EXPECT_TRUE(control(relay).sent<tensor::HostHasLeft>().empty());
      engine.gone().leave(0, "worker 0 has left");
      engine.fail_lost();
      engine.fail_lost();
      auto contribution = of_network(0, kPush | kPull);
      contribution.kind = tensor::OperationKind::kSplit;
      ASSERT_EQ(control(relay).sent<tensor::HostHasLeft>().size(), 1U);
      post(relay, contribution);
      EXPECT_TRUE(failures(2).empty());
    } else {
      post(2, push);  // a push may come later
      const auto asked = control(relay).sent<tensor::HostHasLeft>();
      ASSERT_EQ(asked.size(), 2U);
      EXPECT_EQ(asked[1].round, round);
      EXPECT_TRUE(failures(2).empty());
      tensor::Cancel none = gives_up(0, false);
      none.round = round;
      none.what = asked[1].what;
      engine.cancel(*sessions[relay], none);
      ASSERT_EQ(failures(2).size(), 1U);
      EXPECT_EQ(failures(2)[0].what, "worker 0 has left");
    }
    EXPECT_EQ(engine.open_rounds(), 0U);
  }
}

TEST_F(RoundEngineHostTest, AHostWhoseRelayIsGoneCannotBeAsked) {
  for (const std::uint32_t rank : {0U, 1U}) {
    engine.gone().leave(rank, "worker " + std::to_string(rank) + " has left");
    sessions[rank]->abandon(false);
  }
  auto push = of_network(2, kPush | kPull);
  push.kind = tensor::OperationKind::kSplit;
  post(2, push);
  EXPECT_EQ(failures(2).size(), 1U);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

// The server says that they have left, and has nothing of the host.
TEST_F(RoundEngineHostTest, ARelayWhoseRanksHaveLeftGivesUpWhatTheyHaveNotPushed) {
  const Error left(ErrorCode::kPeerLost, "worker 0 has left", "");
  source->end_round(kGroup, 11, 0, 7, kPlace, left);
  ASSERT_EQ(refused.size(), 1U) << "nobody has pushed";
  EXPECT_EQ(refused[0], std::pair(kPlace, std::string("worker 0 has left")));
  post(0, for_host(0, kPush | kPull));
  source->end_round(kGroup, 11, 0, 0, kPlace, left);
  EXPECT_EQ(refused.size(), 2U) << "one has pushed";
  EXPECT_EQ(failures(0).size(), 1U);
  for (std::uint32_t i = 0; i < 2; ++i) post(i, for_host(i, kPush | kPull, 1));
  source->end_round(kGroup, 11, 0, 1, kPlace, left);
  EXPECT_EQ(refused.size(), 2U) << "the contribution is on its way";
  answer_with(42);
  EXPECT_EQ(memory[1].back(), 42);
}

// It goes on for the others of its host while it can be reached.
TEST_F(RoundEngineHostTest, ARelayThatHasLeftAndClosedItsConnectionsSpeaksForNobody) {
  auto push = of_network(2, kPush | kPull);
  push.kind = tensor::OperationKind::kSplit;
  post(2, push);
  const std::uint32_t relay = hosts.relay(0, 0, tensor::relay_hash(tensor::spread_of(push.tensor, push.partition)));
  engine.gone().leave(relay, "the relay has left");
  engine.fail_lost();
  EXPECT_TRUE(failures(2).empty()) << "it sends what the other one pushes";
  on_lost(*sessions[relay], "the relay is lost");
  engine.fail_lost();
  ASSERT_EQ(failures(2).size(), 1U);
  EXPECT_EQ(failures(2)[0].what, "the relay has left");
  EXPECT_EQ(engine.open_rounds(), 0U);
}

// A relay on the server's host posts a head that promises more than any host can have summed, and a span as long.
TEST_F(RoundEngineHostTest, AnExactSumThatIsLongerThanAnyIsRefusedBeforeMemoryIsTakenForIt) {
  constexpr std::uint64_t kElements = kBytes / sizeof(float);
  const std::uint64_t most = tensor::most_unrounded_bytes(Dtype::kFloat32, kElements);
  for (const std::uint64_t claimed : {std::uint64_t{1} << 60, most + 1}) {
    std::vector<std::uint64_t> head(most / sizeof(std::uint64_t) + 1);
    head[0] = claimed;
    auto push = of_network(0, kPush | kPull | tensor::kUnrounded);
    push.op = ReduceOp::kExactSum;
    sessions[0]->on_posting(data(0), tensor::bytes_of(push),
                            {0, reinterpret_cast<std::uint64_t>(head.data()), claimed});
    ASSERT_EQ(failures(0).size(), 1U) << claimed;
    EXPECT_NE(failures(0)[0].what.find("refused a push"), std::string::npos);
    control(0).messages.clear();
  }
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineHostTest, AnExactSumOfAHostMayBeAsLongAsOneCanBe) {
  constexpr std::uint64_t kElements = kBytes / sizeof(float);
  std::vector<std::byte> sum(tensor::most_unrounded_bytes(Dtype::kFloat32, kElements));
  tensor::UnroundedWriter writer(sum.data(), kElements);
  const std::vector<double> terms(tensor::most_terms(Dtype::kFloat32), 1.0);
  for (std::uint32_t i = 0; i < kElements; ++i) writer.add(i, terms);
  writer.finish();
  auto push = of_network(0, kPush | kPull | tensor::kUnrounded);
  auto other = of_network(2, kPush | kPull);
  push.op = other.op = ReduceOp::kExactSum;
  // What a float64 does not hold is read from the entries only where that is NaN.
  for (std::uint32_t i = 0; i < kElements; ++i) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    std::memcpy(writer.sums() + i * sizeof nan, &nan, sizeof nan);
  }
  sessions[0]->on_posting(data(0), tensor::bytes_of(push),
                          {0, reinterpret_cast<std::uint64_t>(sum.data()), sum.size()});
  post(2, other);
  EXPECT_EQ(memory[2].front(), 6 + 3);
  EXPECT_EQ(memory[2].back(), 6 + 3);
}

}  // namespace
}  // namespace bps::server
