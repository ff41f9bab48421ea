// SPDX-License-Identifier: Apache-2.0
// Calls of a reactor by other threads while it ends.
#include "transport/reactor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "core/error.h"

namespace bps::transport::testing {
namespace {

// Holds the loop within a step, so that what is posted meanwhile comes after its last turn.
class Held final : public Actor {
 public:
  bool step() override {
    is_held = true;
    released.wait(false);
    return true;  // so it looks whether to stop before it looks at what was posted
  }
  std::atomic<bool> is_held{false};
  std::atomic<bool> released{false};
};

bool ends_with_error(const std::function<void()>& what) {
  try {
    what();
    return false;
  } catch (const Error& error) {
    return error.code() == ErrorCode::kNotInitialized;
  }
}

TEST(Reactor, ACallEndsWithItsLoop) {
  Held held;
  Reactor reactor("test", Spin{});
  reactor.add(&held);
  reactor.start();
  while (!held.is_held) std::this_thread::yield();
  std::atomic<bool> ran{false};
  std::thread stops([&] { reactor.stop(); });
  std::thread calls([&] { EXPECT_TRUE(ends_with_error([&] { reactor.call([&] { ran = true; }); })); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // likely in the call by now; also right if it is not
  held.released = true;
  held.released.notify_all();
  stops.join();
  calls.join();
  EXPECT_FALSE(ran);
  EXPECT_TRUE(ends_with_error([&] { reactor.call([&] { ran = true; }); })) << "it has ended long ago";
  EXPECT_FALSE(ran);
  EXPECT_FALSE(reactor.loop().post([] {}));
}

TEST(Reactor, WhatIsCalledBeforeItStartsRunsAtOnce) {
  Reactor reactor("test", Spin{});
  EXPECT_EQ(reactor.call([] { return 7; }), 7);
}

}  // namespace
}  // namespace bps::transport::testing
