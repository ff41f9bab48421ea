// SPDX-License-Identifier: Apache-2.0
// Makes a worker loop with one server, which sends for the ranks of its host, too.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/fake_transport.h"
#include "worker/worker_loop.h"

namespace bps::worker {

inline constexpr std::uint64_t kBytes = 1 << 20;  // is so large that it travels from and to the caller's memory

struct Ones final : tensor::ContributionSource {
  Status sum(std::uint32_t, Dtype, std::byte* into) override {
    std::memset(into, 1, kBytes);
    return Status::kOk;
  }
  void propose(std::uint32_t, const std::byte*) override { events.emplace_back("landed"); }
  void deliver(std::uint32_t, const std::byte*) override { events.emplace_back("delivered"); }
  void fail(std::uint32_t, const Error& why, std::span<const std::uint32_t>) override {
    events.emplace_back(why.what());
  }
  void fail_round(std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, const Error&) override {}
  void end_round(std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, const Error&) override {}
  std::vector<std::string> events;
};

class RelayingLoop : public ::testing::Test {
 protected:
  // Gives a server only to the first of the places.
  explicit RelayingLoop(std::size_t number_of_places = 1) : places(number_of_places) {
    data.put_on_same_host();
    data.takes_postings = true;
    data.fenced = false;
    worker_loop.emplace(
        WorkerLoopOptions{.index = 0, .places = places, .largest_partition = kBytes, .staging_bytes = 4 * kBytes},
        reactor);
    ServerConnection& server = worker_loop->add_server(0, 1, "server", transport);
    control.sink = &server;
    data.sink = &server;
    worker_loop->open(server, &control, {&data});
    worker_loop->relay_for(&sum);
    header.version = transport::kProtocolVersion;
    header.dtype = Dtype::kFloat32;
    header.flags = tensor::kIsPush | tensor::kIsPull | tensor::kHasPayload | tensor::kWantsData;
    header.length = kBytes;
  }
  std::shared_ptr<Operation> submit() {
    auto tensor =
        std::make_shared<Tensor>(tensor::Partitioning(kBytes, 4, kBytes), tensor::Partitioning(kBytes, 4, kBytes));
    tensor->name = "tensor";
    tensor->group = std::make_shared<const van::Group>(van::Group{0, {0}});
    tensor->dtype = Dtype::kFloat32;
    tensor->bytes = kBytes;
    tensor->plans.whole = {{{0}}};
    tensor->plans.whole.resize(places);
    Request request;
    request.input = request.output = memory.data();
    request.input_allocation = request.output_allocation = {memory, 1};
    auto operation = std::make_shared<Operation>(tensor, request, 0, 0, 1, places);
    worker_loop->submit(operation, true);
    worker_loop->step();
    return operation;
  }

  const std::size_t places;
  server::FakeTransport transport;
  server::FakeControl control{transport::Hello{}};
  server::FakeData data{transport::Hello{}};
  transport::Reactor reactor{"test", transport::Spin{}};
  Ones sum;
  tensor::PushHeader header{};
  std::vector<std::byte> memory = std::vector<std::byte>(kBytes);
  std::optional<WorkerLoop> worker_loop;
};

}  // namespace bps::worker
