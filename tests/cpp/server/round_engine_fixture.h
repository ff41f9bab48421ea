// SPDX-License-Identifier: Apache-2.0
// Makes a round engine alone: it has no loop and no peer, and the test takes every step.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "server/fake_transport.h"
#include "server/round_engine.h"

namespace bps::server {

inline constexpr std::uint32_t kWorkers = 3;
inline constexpr std::uint32_t kMostRounds = 100;  // bounds the rounds that one worker may open
inline constexpr std::uint64_t kBytes = 40'000;
inline constexpr std::uint8_t kPush = tensor::kHasPayload | tensor::kIsPush;
inline constexpr std::uint8_t kPull = tensor::kIsPull | tensor::kWantsData;

class RoundEngineTest : public ::testing::Test, public SessionOwner {
 protected:
  RoundEngineTest() {
    engine.add_group(van::Group{0, {0, 1, 2}});
    for (std::uint32_t i = 0; i < kWorkers; ++i) {
      van::Node node;
      node.id = i + 1;
      node.worker_rank = static_cast<std::int32_t>(i);
      sessions.push_back(
          std::make_unique<WorkerSession>(SessionContext{*this, engine, pool, due, counters, 1}, node, 0, transport));
      sessions[i]->accept(std::make_unique<transport::IncomingConnection>(transport::Hello{.node = i + 1}));
      transport::Hello data{.node = i + 1};
      data.plane = transport::Plane::kData;
      sessions[i]->accept(std::make_unique<transport::IncomingConnection>(data));
      memory[i].assign(kBytes / sizeof(float), static_cast<float>(i + 1));
    }
  }

  void on_message(WorkerSession&, std::span<const std::byte>) override {}
  void on_lost(WorkerSession& session, const std::string& why) override {
    session.abandon(false);
    engine.gone().lose(session.client.worker_rank, why);
  }

  FakeControl& control(std::uint32_t worker) { return *transport.control_ends[worker]; }
  FakeData& data(std::uint32_t worker) { return *transport.data_ends[worker]; }
  std::vector<tensor::PushFailed> failures(std::uint32_t worker) { return control(worker).sent<tensor::PushFailed>(); }
  void use_slots(std::uint32_t large) {
    for (std::uint32_t i = 0; i < kWorkers; ++i) use_slots(i, large);
  }
  void use_slots(std::uint32_t worker, std::uint32_t large) {
    sessions[worker]->window().open(kBytes, large, 0);
    collect_credits(worker);
  }
  void collect_credits(std::uint32_t worker) {
    control(worker).messages.clear();
    sessions[worker]->send_credits();
    for (const auto& message : control(worker).sent<tensor::Credits>()) {
      for (const tensor::SlotCredit& slot : message.slots) {
        if (!tensor::is_small_slot(slot.capacity)) slots[worker].push_back(slot.slot);
      }
    }
  }
  void share_memory() {
    for (const auto& endpoint : transport.data_ends) endpoint->put_on_same_host();
  }

  tensor::PushHeader header(std::uint32_t worker, std::uint8_t flags, std::uint32_t round = 0) {
    tensor::PushHeader made{};
    made.version = transport::kProtocolVersion;
    made.dtype = Dtype::kFloat32;
    made.flags = flags;
    made.position = static_cast<std::uint16_t>(worker);
    made.tensor = 11;
    made.round = round;
    made.epoch = 1;
    made.immediate = 100 * (round + 1) + worker + ((flags & tensor::kIsPush) != 0 ? 0 : 50);
    made.length = kBytes;
    made.answer_address = reinterpret_cast<std::uint64_t>(memory[worker].data());
    return made;
  }
  // Lets a push land in the slot that was granted last. Returns the slot's number.
  std::uint32_t land(std::uint32_t worker, const tensor::PushHeader& what) {
    return land(worker, what, sizeof what + ((what.flags & tensor::kHasPayload) != 0 ? what.length : 0));
  }
  // Lets so many bytes of a push land.
  std::uint32_t land(std::uint32_t worker, const tensor::PushHeader& what, std::uint64_t landed) {
    const std::uint32_t number = slots[worker].back();
    slots[worker].pop_back();
    Slot* slot = pool.by_number(number);
    std::memcpy(slot->data, &what, sizeof what);
    std::memcpy(slot->payload(), memory[worker].data(), kBytes);
    sessions[worker]->on_write(data(worker), number, landed);
    return number;
  }
  // Posts a push that stays in the worker's memory.
  void post(std::uint32_t worker, const tensor::PushHeader& what) {
    transport::RemoteSpan span;
    if ((what.flags & tensor::kHasPayload) != 0) {
      span = {.key = 0, .address = reinterpret_cast<std::uint64_t>(memory[worker].data()), .length = kBytes};
    }
    sessions[worker]->on_posting(data(worker), tensor::bytes_of(what), span);
  }
  float sum_in_slot(const transport::WriteOp& answer) {
    float first = 0;
    std::memcpy(&first, answer.source->bytes().data() + answer.source_offset, sizeof first);
    return first;
  }

  Counters counters;
  FakeTransport transport;
  SlotPool pool{{&transport}};
  SendsDue due;
  Sessions sessions;
  van::Hosts hosts;
  RoundEngine engine{{.largest_partition = 16 << 20,
                      .epoch = 1,
                      .here = {.host = 0, .server_rank = 0},
                      .table = {.rounds = kMostRounds, .words = 1 << 20}},
                     hosts,
                     sessions,
                     pool,
                     counters};
  std::vector<float> memory[kWorkers];
  std::vector<std::uint32_t> slots[kWorkers];  // those that the worker may fill
};

}  // namespace bps::server
