// SPDX-License-Identifier: Apache-2.0
// A peer whose process has ended, and whose number another process has by now: that one is neither read nor written.
#include <gtest/gtest.h>
#include <linux/sched.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "child_process.h"
#include "eventually.h"
#include "transport/two_sides.h"

namespace bps::transport::shm {
namespace {

using transport::testing::Side;

const transport::testing::Way kWayThere{"shm", false};
constexpr int kCannotTell = 77;
constexpr std::byte kPeers{1};
constexpr std::byte kStrangers{2};

// At one address in every process that is forked from this one.
alignas(64) std::array<std::byte, 4096> g_memory;

// Forks a process with this number, which no other one may have; -1 where this process may not choose. It has nothing
// but its memory.
pid_t fork_with_number(pid_t number) {
  clone_args how{};
  how.exit_signal = SIGCHLD;
  how.set_tid = reinterpret_cast<std::uint64_t>(&number);
  how.set_tid_size = 1;
  const auto made = static_cast<pid_t>(::syscall(SYS_clone3, &how, sizeof how));
  if (made != 0) return made;
  g_memory.fill(kStrangers);
  stay();
}

bool is_all(pid_t process, std::byte value) {
  std::array<std::byte, sizeof g_memory> found{};
  iovec here{found.data(), found.size()};
  iovec there{g_memory.data(), g_memory.size()};
  return ::process_vm_readv(process, &here, 1, &there, 1, 0) == static_cast<ssize_t>(found.size()) &&
         std::ranges::all_of(found, [&](std::byte one) { return one == value; });
}

// Connects to an address that comes by the pipe, and shows its memory, which is plain: no mapping of it is shared.
void be_the_peer(int address_pipe, const Credentials& credentials) {
  std::array<std::byte, 256> address{};
  const ssize_t size = ::read(address_pipe, address.data(), address.size());
  g_memory.fill(kPeers);
  Side side(kWayThere, credentials);
  DataEndpoint* data = side.connect_data(Bytes(address.begin(), address.begin() + size));
  const RegionPtr region = side.call([&] { return side.transport->register_memory(g_memory); });
  const std::array<std::byte, 8> header{};
  const Posting what{.header = header, .source = region.get(), .source_offset = 0, .length = sizeof g_memory};
  while (side.call([&] { return data->direct()->post({&what, 1}); }) == 0) continue;
  stay();
}

#define REQUIRE(condition) \
  if (!(condition)) return std::fprintf(stderr, "not so: %s\n", #condition), 1

// In a namespace of numbers of its own, as its first process.
int run_in_namespace() {
  const Credentials credentials = Credentials::from("job", "secret");
  std::array<int, 2> pipe{};
  REQUIRE(::pipe(pipe.data()) == 0);
  ChildProcess peer([&] { be_the_peer(pipe[0], credentials); });
  Side side(kWayThere, credentials);
  const Bytes address = side.open();
  REQUIRE(::write(pipe[1], address.data(), address.size()) == static_cast<ssize_t>(address.size()));
  REQUIRE(side.sink.wait([](const auto& sink) { return !sink.postings.empty(); }));
  const auto posted = side.sink.look([](const auto& sink) { return sink.postings.front(); });
  const RemoteSpan span = posted.span;
  std::array<std::byte, sizeof g_memory> mine{};
  DirectAccess& direct = *posted.from->direct();
  REQUIRE(side.call([&] { return direct.map(span) == nullptr; }));
  if (side.call([&] { return direct.get(span, mine.data()); }) != Status::kOk) return kCannotTell;  // not allowed here
  REQUIRE(mine.front() == kPeers && mine.back() == kPeers);
  REQUIRE(side.call([&] { return direct.put(span, mine.data()); }) == Status::kOk);

  // Within one turn of the loop, which has not heard meanwhile that the connection is closed.
  return side.call([&] {
    const pid_t number = peer.pid();
    peer.kill();
    const pid_t stranger = fork_with_number(number);
    if (stranger < 0) return kCannotTell;
    REQUIRE(stranger == number);
    REQUIRE(eventually([&] { return is_all(stranger, kStrangers); }));  // so the number leads there
    mine.fill(kPeers);
    const Status read = direct.get(span, mine.data());
    mine.fill(kPeers);
    const Status written = direct.put(span, mine.data());
    const bool is_unchanged = is_all(stranger, kStrangers);
    ::kill(stranger, SIGKILL);
    REQUIRE(read == Status::kPeerLost);
    REQUIRE(written == Status::kPeerLost);
    REQUIRE(is_unchanged);
    return 0;
  });
}

TEST(ShmNumbers, AProcessThatHasTheNumberOfAPeerThatHasEndedIsNeitherReadNorWritten) {
  ChildProcess outside([] {
    // Whoever may not make one has one of users of its own first.
    if (::unshare(CLONE_NEWPID) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) return kCannotTell;
    return ChildProcess(run_in_namespace).status();
  });
  const int status = outside.status();
  if (status == kCannotTell) GTEST_SKIP() << "this system lets nobody choose the number of a process";
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace bps::transport::shm
