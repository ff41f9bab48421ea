// SPDX-License-Identifier: Apache-2.0
// Fakes a transport without a peer: it records what is sent, and the test decides what its endpoints accept and reach.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensor/control_messages.h"
#include "transport/transport.h"

namespace bps::server {

class FakeControl final : public transport::ControlEndpoint {
 public:
  explicit FakeControl(const transport::Hello& opened_by) : ControlEndpoint(opened_by) {}
  Status send(std::span<const std::byte> message) override {
    messages.push_back(tensor::decode(message, 1).value());
    return Status::kOk;
  }
  template <typename Message>
  std::vector<Message> sent() const {
    std::vector<Message> found;
    for (const auto& message : messages) {
      if (const auto* one = std::get_if<Message>(&message)) found.push_back(*one);
    }
    return found;
  }
  std::vector<tensor::ControlMessage> messages;

 private:
  void sever() override {}
};

// Takes addresses of the peer's memory as pointers.
class FakeData final : public transport::DataEndpoint, public transport::DirectAccess {
 public:
  explicit FakeData(const transport::Hello& opened_by) : DataEndpoint(opened_by) {}
  std::size_t write(std::span<const transport::WriteOp> ops) override {
    std::size_t accepted = 0;
    for (; accepted < ops.size() && room > 0 && !is_lost(); ++accepted, --room) {
      writes.push_back(ops[accepted]);
      headers.emplace_back(ops[accepted].header.begin(), ops[accepted].header.end());
    }
    return accepted;
  }
  void put_on_same_host() { direct_ = this; }
  bool peer_reaches(const transport::Region&) const override { return true; }
  bool peer_maps(const transport::Region&) const override { return true; }
  std::size_t post(std::span<const transport::Posting> postings) override {
    if (!takes_postings) return 0;
    posted += postings.size();
    for (const auto& one : postings) headers.emplace_back(one.header.begin(), one.header.end());
    return postings.size();
  }
  std::byte* map(const transport::RemoteSpan&) override { return nullptr; }
  Status get(const transport::RemoteSpan& span, std::byte* into) override {
    if (!reachable) return Status::kPeerLost;
    std::memcpy(into, reinterpret_cast<const std::byte*>(span.address), span.length);
    return Status::kOk;
  }
  Status put(const transport::RemoteSpan& span, const std::byte* from) override {
    if (!reachable) return Status::kPeerLost;
    std::memcpy(reinterpret_cast<std::byte*>(span.address), from, span.length);
    return Status::kOk;
  }
  void take_rest() override {
    for (const auto& [immediate, landed] : std::exchange(rest, {})) sink->on_write(*this, immediate, landed);
  }
  bool is_fenced() override { return fenced; }
  bool can_fence() const override { return true; }
  void fence() override {
    fenced = true;
    ++fences;
  }
  std::vector<std::uint32_t> immediates() const {
    std::vector<std::uint32_t> found;
    for (const transport::WriteOp& op : writes) found.push_back(op.immediate);
    return found;
  }

  std::size_t room = 1000;  // writes that it still accepts
  bool reachable = true;
  bool takes_postings = false;
  std::size_t posted = 0;
  bool fenced = true;
  int fences = 0;
  std::vector<transport::WriteOp> writes;
  std::vector<Bytes> headers;                                 // copies: those of writes and postings need not stay
  std::vector<std::pair<std::uint32_t, std::uint64_t>> rest;  // immediates and bytes of what the peer has posted

 private:
  void sever() override {}
};

// Has the key r on rail r.
class FakeRegion final : public transport::Region {
 public:
  FakeRegion(std::span<std::byte> bytes, std::size_t rails, bool by_address) : Region(bytes) {
    if (by_address) origin_ = reinterpret_cast<std::uint64_t>(bytes.data());
    for (std::size_t rail = 1; rail < rails; ++rail) other_keys_.push_back(rail);
  }
};

class FakeTransport final : public transport::Transport {
 public:
  transport::Kind kind() const override { return transport::Kind::kTcp; }
  bool lands_in_order() const override { return in_order; }
  transport::RegionPtr register_memory(std::span<std::byte> bytes) override {
    if (out_of_memory) throw Error(ErrorCode::kTransport, "no memory", "add some");
    return std::make_shared<FakeRegion>(bytes, rails, by_address);
  }
  bool takes_foreign() const override { return takes_foreign_memory; }
  transport::RegionPtr register_foreign(const transport::ForeignMemory& memory) override {
    return std::make_shared<FakeRegion>(memory.bytes, rails, by_address);
  }
  std::unique_ptr<transport::ControlEndpoint> connect_control(const transport::ConnectRequest&) override {
    return nullptr;
  }
  std::unique_ptr<transport::DataEndpoint> connect_data(const transport::ConnectRequest&) override { return nullptr; }
  transport::ControlEndpoint* attach(std::unique_ptr<transport::ControlEndpoint>, transport::ControlSink&) override {
    return nullptr;
  }
  transport::DataEndpoint* attach(std::unique_ptr<transport::DataEndpoint>, transport::DataSink&) override {
    return nullptr;
  }
  transport::ControlEndpoint* accept_control(std::unique_ptr<transport::IncomingConnection> incoming,
                                             transport::ControlSink& sink) override {
    control_ends.push_back(std::make_unique<FakeControl>(incoming->hello));
    control_ends.back()->sink = &sink;
    return control_ends.back().get();
  }
  transport::DataEndpoint* accept_data(std::unique_ptr<transport::IncomingConnection> incoming,
                                       transport::DataSink& sink) override {
    data_ends.push_back(std::make_unique<FakeData>(incoming->hello));
    data_ends.back()->sink = &sink;
    return data_ends.back().get();
  }
  void close(transport::Endpoint*) override {}
  int poll() override { return 0; }
  bool arm() override { return true; }
  void disarm() override {}

  std::size_t rails = 1;
  bool by_address = false;  // remote addresses are pointers, as over RDMA
  bool in_order = false;
  bool out_of_memory = false;
  bool takes_foreign_memory = false;
  std::vector<std::unique_ptr<FakeControl>> control_ends;  // in the order in which they were accepted
  std::vector<std::unique_ptr<FakeData>> data_ends;
};

}  // namespace bps::server
