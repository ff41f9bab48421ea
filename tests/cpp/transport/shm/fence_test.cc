// SPDX-License-Identifier: Apache-2.0
// When a peer on the same host can write to our memory no more.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <thread>

#include "child_process.h"
#include "eventually.h"
#include "transport/two_sides.h"

namespace bps::transport::shm {
namespace {

using transport::testing::Side;

const transport::testing::Way kShm{"shm", false};

std::array<int, 2> open_pipe() {
  std::array<int, 2> ends{};
  EXPECT_EQ(::pipe(ends.data()), 0);
  return ends;
}

// A process that accepts connections until it is ended.
struct Callee {
  explicit Callee(const Credentials& credentials) : Callee(credentials, open_pipe()) {}

  ChildProcess process;
  Bytes address;

 private:
  Callee(const Credentials& credentials, std::array<int, 2> ends)
      : process([&] {
          Side side(kShm, credentials);
          const Bytes opened = side.open();
          (void)!::write(ends[1], opened.data(), opened.size());
          ::close(ends[1]);
          stay();
        }) {
    ::close(ends[1]);
    std::array<std::byte, 256> text{};
    const ssize_t size = ::read(ends[0], text.data(), text.size());
    ::close(ends[0]);
    address.assign(text.begin(), text.begin() + std::max<ssize_t>(0, size));
  }
};

TEST(ShmFence, APeerThatWeHaveGivenUpIsFencedWhenItHasSeenThat) {
  const Credentials credentials = Credentials::from("job", "secret");
  Callee callee(credentials);
  Side caller(kShm, credentials);
  DataEndpoint* data = caller.connect_data(callee.address);
  const auto is_fenced = [&] { return caller.call([&] { return data->direct()->is_fenced(); }); };
  EXPECT_FALSE(is_fenced());
  callee.process.stop();
  caller.call([&] { data->abandon(); });
  EXPECT_FALSE(is_fenced()) << "it is stopped, and may be in the middle of a copy";
  callee.process.signal(SIGCONT);
  EXPECT_TRUE(eventually(is_fenced)) << "it lives, and has closed its end";
}

TEST(ShmFence, APeerThatHasEndedIsFenced) {
  const Credentials credentials = Credentials::from("job", "secret");
  Callee callee(credentials);
  Side caller(kShm, credentials);
  DataEndpoint* data = caller.connect_data(callee.address);
  callee.process.stop();
  caller.call([&] {
    data->abandon();
    data->direct()->fence();
  });
  EXPECT_TRUE(eventually([&] { return caller.call([&] { return data->direct()->is_fenced(); }); }));
}

}  // namespace
}  // namespace bps::transport::shm
