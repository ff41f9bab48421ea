// SPDX-License-Identifier: Apache-2.0
// The two ends of a simulated connection. What is under way between them holds a Wire, which outlives both.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sim_transport.h"

namespace bps::sim {

// What the ends of one connection share.
template <typename End>
struct Wire {
  struct Side {
    Machine machine = 0;
    End* end = nullptr;    // null before it is accepted, and when it is gone
    bool severed = false;  // nothing goes in or out any more
    Time last_arrival{};   // of messages, which keep their order
  };
  std::array<Side, 2> sides;
};

// What both planes do.
template <typename Self, typename Base>
class SimEndpoint : public Base {
 public:
  using WirePtr = std::shared_ptr<Wire<Self>>;
  SimEndpoint(const transport::Hello& opened_by, Network& network, WirePtr wire, std::size_t side)
      : Base(opened_by), network_(network), wire_(std::move(wire)), side_(side) {
    here().end = static_cast<Self*>(this);
  }
  ~SimEndpoint() override {
    sever();
    here().end = nullptr;
  }

  void break_off(const std::string& why) {
    this->lose(why);
    network_.wake(here().machine);
  }
  // After the rest of what has come.
  bool tell() {
    if (!this->is_loss_untold()) return false;
    this->tell_loss();
    return true;
  }
  bool is_broken() const { return this->is_lost(); }

 protected:
  typename Wire<Self>::Side& here() { return wire_->sides[side_]; }
  typename Wire<Self>::Side& there() { return wire_->sides[1 - side_]; }
  void sever() override {
    if (std::exchange(here().severed, true)) return;
    on_severed();
    // The other end learns of it, at any time after what it was sent.
    if (!network_.is_alive(here().machine)) return;
    send_in_order([](Self& end) { end.break_off("connection closed"); });
  }
  virtual void on_severed() {}

  // Calls `take` at the other end, after everything that was sent in order before.
  template <typename F>
  void send_in_order(F take, std::uint64_t bytes = 64) {
    there().last_arrival = std::max(there().last_arrival, network_.arrival(here().machine, bytes));
    network_.deliver(
        here().machine, there().machine, there().last_arrival,
        [wire = wire_, to = 1 - side_, take] {
          auto& side = wire->sides[to];
          if (side.end != nullptr && !side.severed) take(*side.end);
        },
        [wire = wire_, from = side_] { give_up(*wire, from); });
  }
  static void give_up(Wire<Self>& wire, std::size_t from) {
    if (wire.sides[from].end != nullptr && !wire.sides[from].severed)
      wire.sides[from].end->break_off("nothing is acknowledged");
  }

  Network& network_;
  WirePtr wire_;
  const std::size_t side_;
};

class SimControl final : public SimEndpoint<SimControl, transport::ControlEndpoint> {
 public:
  using SimEndpoint::SimEndpoint;

  Status send(std::span<const std::byte> message) override {
    if (is_lost()) return Status::kPeerLost;
    if (message.size() > transport::kMaxMessage) return Status::kProtocol;
    if (network_.tap != nullptr) {
      network_.tap->on_message(Tap::Moment::kSent, here().machine, there().machine, message);
    }
    send_in_order([copy = Bytes(message.begin(), message.end())](SimControl& end) { end.receive(copy); },
                  message.size());
    return Status::kOk;
  }
  int poll() {
    int found = 0;
    while (!inbox_.empty() && !is_loss_told()) {
      const Bytes message = std::move(inbox_.front());
      inbox_.pop_front();
      if (network_.tap != nullptr) {
        network_.tap->on_message(Tap::Moment::kTaken, there().machine, here().machine, message);
      }
      sink->on_message(*this, message);
      ++found;
    }
    return found + (tell() ? 1 : 0);
  }

 private:
  void receive(const Bytes& message) {
    inbox_.push_back(message);
    network_.wake(here().machine);
  }
  std::deque<Bytes> inbox_;
};

class SimData final : public SimEndpoint<SimData, transport::DataEndpoint>, public transport::DirectAccess {
 public:
  using SimEndpoint::SimEndpoint;

  std::size_t write(std::span<const transport::WriteOp> ops) override;
  int poll();
  std::uint64_t stop_landing(std::uint32_t immediate) override;

  // Both ends are on one host: sim_direct.cc.
  void share_memory() { direct_ = this; }
  bool peer_reaches(const transport::Region&) const override { return true; }
  bool peer_maps(const transport::Region& region) const override;
  std::size_t post(std::span<const transport::Posting> postings) override;
  std::byte* map(const transport::RemoteSpan& span) override;
  Status get(const transport::RemoteSpan& span, std::byte* into) override;
  Status put(const transport::RemoteSpan& span, const std::byte* from) override;
  bool share(const transport::Region&) override { return !is_lost(); }
  std::shared_ptr<transport::shm::SharedMemory> hold(const transport::RemoteSpan& span) override;
  bool is_fenced() override;
  void take_rest() override;
  bool can_fence() const override;
  void fence() override;

 private:
  struct Posted {
    Bytes header;
    transport::RemoteSpan span;
  };
  std::byte* find(const transport::RemoteSpan& span, bool only_mapped);
  // One write on its way. `bytes` fill up while the source is read.
  struct Write {
    transport::WriteOp op;
    std::array<std::byte, transport::kMaxHeader> header;
    Bytes bytes;
    std::size_t landed = 0;
    Time seen{};  // in memory that both share: when the one for whom it is looks at it
    std::size_t unit = 1;
    bool is_over = false;  // its token has come back
    bool is_refused = false;
  };
  using WritePtr = std::shared_ptr<Write>;
  static constexpr std::size_t kPieces = 2;  // in which a source is read, and a target written

  void post(const WritePtr& write);
  void fill_ring();
  void depart(const WritePtr& write, std::size_t piece);
  void land(const WritePtr& write, std::size_t piece);
  bool may_land(Write& write);
  static std::size_t edge(const Write& write, std::size_t piece);
  void end(const WritePtr& write);
  void on_severed() override;
  friend class SimTransport;

  SimTransport* transport_ = nullptr;
  std::vector<WritePtr> outstanding_;
  Time full_until_{};
  std::vector<WritePtr> landing_;                        // here, of which pieces are still to come
  std::deque<WritePtr> landed_;                          // here, with their immediates
  std::deque<std::pair<WritePtr, std::size_t>> pieces_;  // that wait for this process, where they pass through it
  std::deque<std::uint64_t> tokens_;
  std::deque<Posted> posted_;  // by the other end
};

}  // namespace bps::sim
