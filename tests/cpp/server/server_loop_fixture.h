// SPDX-License-Identifier: Apache-2.0
// Makes a server loop alone, with workers in the same thread that send what they like.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <vector>

#include "server/server_loop.h"
#include "transport/local/self_transport.h"
#include "van/members.h"

namespace bps::server {

// Stands for a worker made of two endpoints, which records what it is told.
struct FakeWorker final : transport::ControlSink, transport::DataSink {
  void on_write(transport::DataEndpoint&, std::uint32_t immediate, std::uint64_t) override { ++answers[immediate]; }
  void on_posting(transport::DataEndpoint&, std::span<const std::byte>, const transport::RemoteSpan&) override {}
  void on_written(transport::DataEndpoint&, std::uint64_t) override {}
  void on_message(transport::ControlEndpoint&, std::span<const std::byte> bytes) override {
    const auto message = tensor::decode(bytes, 1);
    ASSERT_TRUE(message.has_value());
    if (const auto* failed = std::get_if<tensor::PushFailed>(&*message)) failures.push_back(*failed);
    if (const auto* credits = std::get_if<tensor::Credits>(&*message)) {
      slots.insert(slots.end(), credits->slots.begin(), credits->slots.end());
    }
  }
  void on_lost(transport::Endpoint&, const std::string&) override {}

  transport::ControlEndpoint* control = nullptr;
  transport::DataEndpoint* data = nullptr;
  std::map<std::uint32_t, int> answers;
  std::vector<tensor::PushFailed> failures;
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
    server_loop = std::make_unique<ServerLoop>(ServerLoopOptions{.window = kWindow, .largest_partition = 1 << 20},
                                               van::members_with_one_loop(kWorkers),
                                               std::vector<transport::Transport*>{&transport}, counters);
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
    h.position = static_cast<std::uint16_t>(worker);
    h.group = 0;
    h.tensor = 11;
    h.round = round;
    h.epoch = 1;
    h.immediate = 100 + worker;
    h.length = 4000;
    const transport::RemoteSpan answer = workers[worker].region->remote(0, 4000);
    h.answer_key = answer.key;
    h.answer_address = answer.address;
    return h;
  }
  void push(std::uint32_t worker, const tensor::PushHeader& h, std::uint64_t length = 4000) {
    const transport::Posting post{
        .header = tensor::bytes_of(h), .source = workers[worker].region.get(), .length = length};
    ASSERT_EQ(workers[worker].data->direct()->post({&post, 1}), 1U);
    settle();
  }
  void attach(std::uint32_t worker, std::uint64_t largest_payload) {
    ASSERT_EQ(workers[worker].control->send(encode(tensor::Attach{largest_payload, true}, 1)), Status::kOk);
    settle();
  }
  void push_into_slot(std::uint32_t worker, const tensor::PushHeader& h) {
    FakeWorker& w = workers[worker];
    const tensor::SlotCredit slot = w.slots.back();
    w.slots.pop_back();
    const bool has_payload = (h.flags & tensor::kHasPayload) != 0;
    const transport::WriteOp op{.header = tensor::bytes_of(h),
                                .source = w.region.get(),
                                .length = has_payload ? h.length : 0,
                                .target = {slot.key, slot.address, slot.capacity},
                                .immediate = slot.slot};
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

}  // namespace bps::server
