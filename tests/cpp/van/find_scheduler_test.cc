// SPDX-License-Identifier: Apache-2.0
#include "van/find_scheduler.h"

#include "transport/listener.h"
#include "van/van_fixture.h"

namespace bps::van {
namespace {

using namespace test;

Thrown search(const std::vector<std::uint16_t>& ports, const transport::Credentials& credentials, double seconds) {
  return thrown_by([&] { find_scheduler("127.0.0.1", ports, credentials, Deadline::after(seconds)); });
}

std::uint16_t closed_port() {
  const Fd listener = transport::Listener::listen_tcp("127.0.0.1", 0);
  return transport::Listener::port_of(listener.get());
}

TEST(FindScheduler, LooksOnWhereOthersListen) {
  const auto other = make_scheduler(1, 0, {}, transport::Credentials::from("other job", "secret"));
  const Fd silent = transport::Listener::listen_tcp("127.0.0.1", 0);
  const auto ours = make_scheduler(1, 0);
  const auto found =
      find_scheduler("127.0.0.1", {closed_port(), other->port(), ours->port()}, kJob, Deadline::after(5));
  EXPECT_EQ(found.where, "127.0.0.1:" + std::to_string(ours->port()));
}

TEST(FindScheduler, AWrongSecretIsSaidAtOnceIfThereIsOnePort) {
  const auto scheduler = make_scheduler(1, 0);
  const auto start = now_ns();
  const Thrown thrown = search({scheduler->port()}, transport::Credentials::from("job", "wrong"), 30);
  EXPECT_EQ(thrown.code, ErrorCode::kAuthentication);
  EXPECT_EQ(thrown.what, "the scheduler at 127.0.0.1:" + std::to_string(scheduler->port()) + " has another secret");
  EXPECT_EQ(thrown.hint, "set the same BPS_SECRET or BPS_SECRET_FILE on every node");
  EXPECT_LT(now_ns() - start, 10'000'000'000U);
}

TEST(FindScheduler, TheMostTellingErrorWins) {
  const auto ours = make_scheduler(1, 0);
  const auto other = make_scheduler(1, 0, {}, transport::Credentials::from("other job", "secret"));
  const std::uint16_t nobody = closed_port();
  EXPECT_EQ(search({ours->port(), other->port(), nobody}, transport::Credentials::from("job", "wrong"), 0.2).hint,
            "set the same BPS_SECRET or BPS_SECRET_FILE on every node");
  const Thrown only_others = search({other->port(), nobody}, kJob, 0.2);
  EXPECT_EQ(only_others.code, ErrorCode::kAuthentication);
  EXPECT_NE(only_others.what.find("another job"), std::string::npos);
}

TEST(FindScheduler, Ipv6) {
  std::unique_ptr<Scheduler> scheduler;
  try {
    scheduler = make_scheduler(1, 0, [](auto& options) { options.address = "::1"; });
  } catch (const Error&) {
    GTEST_SKIP() << "no IPv6 here";
  }
  EXPECT_EQ(find_scheduler("::1", {scheduler->port()}, kJob, Deadline::after(5)).where,
            "[::1]:" + std::to_string(scheduler->port()));
}

TEST(FindScheduler, NobodyThereIsUnreachable) {
  const std::uint16_t port = closed_port();
  const Thrown thrown = search({port}, kJob, 0.2);
  EXPECT_EQ(thrown.code, ErrorCode::kUnreachable);
  EXPECT_NE(thrown.what.find("no scheduler answers at 127.0.0.1:" + std::to_string(port)), std::string::npos);
  EXPECT_EQ(thrown.hint, "start the scheduler first, or check BPS_ROOT_URI and BPS_ROOT_PORT");
  EXPECT_EQ(search({}, kJob, 1).code, ErrorCode::kInvalidArgument);
}

TEST(FindScheduler, ASilentListenerDoesNotHideTheNextPort) {
  const Fd silent = transport::Listener::listen_tcp("127.0.0.1", 0);
  const auto ours = make_scheduler(1, 0);
  const auto found = find_scheduler("127.0.0.1", {transport::Listener::port_of(silent.get()), ours->port()}, kJob,
                                    Deadline::after(20));
  EXPECT_EQ(found.where, "127.0.0.1:" + std::to_string(ours->port()));
}

}  // namespace
}  // namespace bps::van
