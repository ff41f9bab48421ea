// SPDX-License-Identifier: Apache-2.0
// Operations on a GPU's memory, on the fake driver: sums, late devices, aborts and losses at any moment, failed
// devices.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "device/fake_device.h"
#include "worker/loop_and_servers.h"

namespace bps::worker::testing {
namespace {

using device::testing::only_device;

constexpr double kPatience_s = 60;

// Memory of the device, with canaries on both sides.
class OnDevice {
 public:
  explicit OnDevice(std::size_t bytes) : bytes_(bytes), all_(allocate(bytes + 2 * kGuard)) {
    fill(0, kCanary, bytes + 2 * kGuard);
  }
  ~OnDevice() { FAKE(fake_free)(all_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  std::byte* data() const { return all_ + kGuard; }
  std::size_t size() const { return bytes_; }
  void fill(int value) { fill(kGuard, value, bytes_); }
  void write(const std::vector<std::byte>& bytes) { FAKE(fake_write)(data(), bytes.data(), bytes.size()); }
  std::vector<std::byte> read() const { return read(kGuard, bytes_); }
  bool is_contained() const {
    const auto are_canaries = [](const std::vector<std::byte>& bytes) {
      return std::ranges::all_of(bytes, [](std::byte one) { return one == std::byte{kCanary}; });
    };
    return are_canaries(read(0, kGuard)) && are_canaries(read(kGuard + bytes_, kGuard));
  }

 private:
  static constexpr std::size_t kGuard = 4096;
  static constexpr int kCanary = 0xca;
  static std::byte* allocate(std::size_t bytes) { return static_cast<std::byte*>(FAKE(fake_allocate)(bytes)); }
  void fill(std::size_t from, int value, std::size_t count) {
    const std::vector<std::byte> bytes(count, static_cast<std::byte>(value));
    FAKE(fake_write)(all_ + from, bytes.data(), count);
  }
  std::vector<std::byte> read(std::size_t from, std::size_t count) const {
    std::vector<std::byte> found(count);
    FAKE(fake_read)(all_ + from, found.data(), count);
    return found;
  }
  const std::size_t bytes_;
  std::byte* const all_;
};

class DeviceRouteTest : public WorkerLoopTest {
 protected:
  DeviceRouteTest() : WorkerLoopTest(0) { FAKE(fake_delay)(200); }

  struct Sent {
    std::unique_ptr<OnDevice> input, output;
    std::shared_ptr<Operation> operation;
  };
  // Pieces on each server. With `gate`, kernels write 5 to the input when it opens.
  Sent send(std::uint32_t pieces, const std::shared_ptr<const van::Group>& of, const std::uint32_t* gate = nullptr) {
    const auto tensor = declare(pieces, of);
    Sent sent{std::make_unique<OnDevice>(tensor->bytes), std::make_unique<OnDevice>(tensor->bytes), nullptr};
    std::vector<std::byte> values(tensor->bytes);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::byte>(i * 7 + i / kPiece);
    sent.input->write(values);
    sent.output->fill(0);
    if (gate != nullptr) FAKE(fake_kernel)(stream, sent.input->data(), 5, tensor->bytes, gate);
    Request request;
    request.input = sent.input->data();
    request.output = sent.output->data();
    sent.operation = std::make_shared<Operation>(tensor, request, 0, sequence++, 1, kServers);
    sent.operation->on_device = std::make_unique<DeviceArrays>(only_device());
    sent.operation->on_device->ready[0] = only_device().record(reinterpret_cast<std::uintptr_t>(stream));
    worker_loop.submit(sent.operation, true);
    return sent;
  }
  void turn() {
    worker_loop.step();
    deliver();
    reactor.loop().turn(Duration::zero());
  }
  template <typename F>
  void turn_until(F is_over) {
    for (const Deadline until = Deadline::after(kPatience_s); !is_over();) {
      turn();
      ASSERT_FALSE(until.passed());
    }
  }
  void await(const Sent& sent) {
    turn_until([&] { return sent.operation->done(); });
  }
  // What a copy that is still under way would change.
  static void expect_quiet(const Sent& sent) {
    const auto before = sent.output->read();
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    EXPECT_EQ(sent.output->read(), before);
    EXPECT_TRUE(sent.output->is_contained());
  }

  void* const stream = FAKE(fake_stream)();
};

TEST_F(DeviceRouteTest, SumsAreThoseOfTheHost) {
  const std::uint64_t before = reactor.counters().device_bytes.get();
  const Sent sent = send(40, group);
  await(sent);
  sent.operation->rethrow();
  EXPECT_EQ(sent.output->read(), sent.input->read());
  EXPECT_TRUE(sent.output->is_contained());
  EXPECT_EQ(reactor.counters().device_bytes.get() - before, 2 * sent.input->size());
  EXPECT_EQ(reactor.counters().copied_bytes.get(), 0U) << "the processor copies nothing";
}

TEST_F(DeviceRouteTest, ALateDeviceHoldsUpNoMemoryOfTheHost) {
  std::uint32_t gate = 0;
  const Sent late = send(4, group, &gate);
  for (int i = 0; i < 50; ++i) turn();
  const auto urgent = submit(4, -1);
  turn_until([&] { return urgent->done(); });
  EXPECT_FALSE(late.operation->done());
  __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
  await(late);
  EXPECT_EQ(late.output->read(), std::vector<std::byte>(late.output->size(), std::byte{5}));
}

TEST_F(DeviceRouteTest, AReportNamesWhatWaitsForTheDevice) {
  std::uint32_t gate = 0;
  const Sent late = send(4, group, &gate);
  for (int i = 0; i < 5; ++i) turn();
  const auto open = worker_loop.list_open(100);
  EXPECT_EQ(open.size(), 8U) << "each once";
  EXPECT_TRUE(std::ranges::none_of(open, &OpenPartition::is_sent));
  __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
  await(late);
}

TEST_F(DeviceRouteTest, ManyAtOnceAndNothingIsMadeForEach) {
  const auto run = [&] {
    std::vector<Sent> all;
    for (std::uint32_t i = 0; i < 20; ++i) all.push_back(send(1 + i % 3, group));
    for (const Sent& one : all) {
      await(one);
      EXPECT_EQ(one.output->read(), one.input->read());
    }
  };
  run();
  const auto made = [] { return std::pair(FAKE(fake_events)(), FAKE(fake_streams)()); };
  const auto before = made();
  for (int i = 0; i < 5; ++i) run();
  EXPECT_EQ(made(), before) << "events, streams";
}

TEST_F(DeviceRouteTest, NothingChangesOnceAnAbortedOperationHasEnded) {
  for (int turns = 0; turns < 60; turns += 3) {
    const Sent sent = send(40, turns % 2 == 0 ? group : with_silent);
    for (int i = 0; i < turns; ++i) turn();
    abort_all();
    await(sent);
    expect_quiet(sent);
    turn_until([&] { return !sent.operation->is_read(); });  // before its memory goes
  }
}

TEST_F(DeviceRouteTest, AnAbortDoesNotWaitForALateDeviceWhichReadsOn) {
  std::uint32_t gate = 0;
  const Sent late = send(2, group, &gate);
  for (int i = 0; i < 20; ++i) turn();
  abort_all();
  await(late);
  EXPECT_THROW(late.operation->rethrow(), Error);
  EXPECT_TRUE(late.operation->is_read()) << "the memory must stay";
  __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
  turn_until([&] { return !late.operation->is_read(); });
  EXPECT_EQ(late.output->read(), std::vector<std::byte>(late.output->size(), std::byte{0}));
  const Sent next = send(40, group);
  await(next);
  next.operation->rethrow();
  EXPECT_EQ(next.output->read(), next.input->read());
}

class DeviceRouteLoss : public DeviceRouteTest, public ::testing::WithParamInterface<int> {};

TEST_P(DeviceRouteLoss, NothingChangesOnceAServerIsLost) {
  const Sent sent = send(40, group);
  for (int i = 0; i < GetParam(); ++i) turn();
  worker_loop.lose_server(servers[0]->node, "gone");
  await(sent);
  expect_quiet(sent);
  turn_until([&] { return !sent.operation->is_read(); });
}
INSTANTIATE_TEST_SUITE_P(AtAnyMoment, DeviceRouteLoss, ::testing::Range(0, 60, 4));

// In a process of its own: a device that has failed stays so.
TEST_F(DeviceRouteTest, ADeviceThatFailsFailsWhatItCopiesFor) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const std::uint32_t gate = 0;
        const Sent sent = send(8, group, &gate);
        for (int i = 0; i < 20; ++i) turn();
        FAKE(fake_break)();
        for (const Deadline until = Deadline::after(kPatience_s); !sent.operation->done() && !until.passed();) turn();
        const auto why = sent.operation->failure();
        std::fprintf(stderr, "%s, %u", why ? why->what() : "nothing", sent.operation->on_device->reads.load());
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(0), "GPU 0 has failed: an illegal memory access .*, 0");
}

}  // namespace
}  // namespace bps::worker::testing
