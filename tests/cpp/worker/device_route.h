// SPDX-License-Identifier: Apache-2.0
// Operations on a GPU's memory, on the fake driver, by a worker loop and two servers in one thread.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "device/fake_device.h"
#include "worker/loop_and_servers.h"

namespace bps::worker::testing {

inline constexpr double kPatience_s = 60;

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

  static constexpr int kPieces = 40;  // on each server
  static constexpr int kCopies = 2 * 2 * kPieces;

  struct Sent {
    std::unique_ptr<OnDevice> input, output;
    std::shared_ptr<Operation> operation;
  };
  // Pieces on each server. With `gate`, kernels write 5 to the input when it opens.
  Sent send(std::uint32_t pieces, const std::shared_ptr<const van::Group>& of, const std::uint32_t* gate = nullptr) {
    const auto tensor = declare(pieces, of);
    return send(tensor, values_of(*tensor), 0, gate);
  }
  static std::vector<std::byte> values_of(const Tensor& tensor) {
    std::vector<std::byte> values(tensor.bytes);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::byte>(i * 7 + i / kPiece);
    return values;
  }
  Sent send(const std::shared_ptr<Tensor>& tensor, const std::vector<std::byte>& values, std::uint32_t round = 0,
            const std::uint32_t* gate = nullptr) {
    Sent sent{std::make_unique<OnDevice>(tensor->bytes), std::make_unique<OnDevice>(tensor->bytes), nullptr};
    sent.input->write(values);
    sent.output->fill(0);
    if (gate != nullptr) FAKE(fake_kernel)(stream.get(), sent.input->data(), 5, tensor->bytes, gate);
    Request request;
    request.input = sent.input->data();
    request.output = sent.output->data();
    sent.operation = std::make_shared<Operation>(tensor, request, round, sequence++, 1, kServers);
    sent.operation->on_device = std::make_unique<DeviceArrays>(device::testing::only_device());
    sent.operation->on_device->ready[0] = device::testing::only_device().record(stream.number());
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
    turn_until([&] { return sent.operation->is_done(); });
  }
  // Sends a sum, and goes on until so many of its copies of pieces, out or back, have begun.
  Sent begin(int copies, const std::shared_ptr<Tensor>& tensor, const std::vector<std::byte>& values) {
    const auto device_bytes = [this] { return reactor.counters().device_bytes.get(); };
    const std::uint64_t wanted = device_bytes() + static_cast<std::uint64_t>(copies) * kPiece;
    Sent sent = send(tensor, values);
    turn_until([&] { return device_bytes() >= wanted; });
    return sent;
  }
  void lose_all() {
    for (const ServerConnection* server : servers) worker_loop.lose_server(server->node, "gone");
  }
  // Lets `end` end an operation while the device rests, so that no copy under way can be over before the operation
  // is. Expects that nothing is written to its result once it has ended.
  template <typename F>
  void expect_quiet_end(const Sent& sent, F end) {
    FAKE(fake_hang)(1);
    end();
    for (int i = 0; i < 100; ++i) turn();
    if (!sent.operation->is_done()) {
      FAKE(fake_hang)(0);
      await(sent);
    }
    expect_quiet(sent);
    turn_until([&] { return !sent.operation->is_copied(); });  // before its memory goes
  }
  // Expects that no copy which is still under way changes the result.
  void expect_quiet(const Sent& sent) {
    const auto before = sent.output->read();
    FAKE(fake_hang)(0);
    turn_until([] { return FAKE(fake_busy)() == 0; });
    EXPECT_EQ(sent.output->read(), before);
    EXPECT_TRUE(sent.output->is_contained());
  }

  const device::testing::CallersStream stream;
};

}  // namespace bps::worker::testing
