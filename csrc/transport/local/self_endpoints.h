// SPDX-License-Identifier: Apache-2.0
// Implements both ends of a connection within one process. What one end posts is queued at the other one, and delivered
// by the next poll(), so that callbacks never nest.
#pragma once

#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "core/bytes.h"
#include "transport/transport.h"

namespace bps::transport::local {

// Joins two ends, which know each other until one of them is destroyed.
template <typename Half>
class Paired {
 public:
  static void join(Half& a, Half& b) {
    a.other_ = &b;
    b.other_ = &a;
  }

 protected:
  ~Paired() {
    if (other_ != nullptr) other_->other_ = nullptr;
  }
  Half* other_ = nullptr;
};

class SelfControl final : public ControlEndpoint, public Paired<SelfControl> {
 public:
  SelfControl(const Hello& opened_by, Counters& counters) : ControlEndpoint(opened_by), counters_(counters) {}

  Status send(std::span<const std::byte> message) override {
    if (other_ == nullptr || is_lost()) return Status::kPeerLost;
    if (message.size() > kMaxMessage) return Status::kProtocol;
    counters_.control_messages.add();
    counters_.control_bytes.add(message.size());
    other_->messages_.emplace_back(message.begin(), message.end());
    return Status::kOk;
  }
  int deliver() {
    if (idle()) return 0;
    std::swap(messages_, delivering_);
    for (const Bytes& message : delivering_) {
      if (!is_lost()) sink->on_message(*this, message);
    }
    const int count = static_cast<int>(delivering_.size());
    delivering_.clear();
    return count;
  }
  bool idle() const { return messages_.empty(); }

 private:
  friend class Paired<SelfControl>;
  void sever() override {}  // a process that gave itself up has nothing to cut

  Counters& counters_;
  std::vector<Bytes> messages_, delivering_;
};

class SelfData final : public DataEndpoint, public DirectAccess, public Paired<SelfData> {
 public:
  SelfData(const Hello& opened_by, Counters& counters) : DataEndpoint(opened_by, this), counters_(counters) {}

  std::size_t write(std::span<const WriteOp> ops) override {
    if (other_ == nullptr || is_lost()) return 0;
    for (const WriteOp& op : ops) {
      std::byte* target = to_pointer(op.target.address);
      copy_bytes(op.header, target);
      if (op.length > 0) {
        std::memcpy(target + op.header.size(), op.source->bytes().data() + op.source_offset, op.length);
      }
      counters_.data_writes.add();
      counters_.data_bytes.add(op.length);
      other_->queued_.writes.push_back({op.immediate, op.total()});
      if (op.token != kNoToken) queued_.written.push_back(op.token);
    }
    return ops.size();
  }
  std::size_t post(std::span<const Posting> postings) override {
    if (other_ == nullptr || is_lost()) return 0;
    for (const Posting& what : postings) {
      other_->queued_.postings.emplace_back(what);
      counters_.data_writes.add();
      counters_.data_bytes.add(what.length);
    }
    return postings.size();
  }

  bool peer_reaches(const Region&) const override { return true; }
  bool peer_maps(const Region&) const override { return true; }
  // Addresses are pointers that this same process wrote, so there is no wire to distrust.
  std::byte* map(const RemoteSpan& span) override { return to_pointer(span.address); }
  Status get(const RemoteSpan& span, std::byte* into) override {
    std::memcpy(into, to_pointer(span.address), span.length);
    return Status::kOk;
  }
  Status put(const RemoteSpan& span, const std::byte* from) override {
    std::memcpy(to_pointer(span.address), from, span.length);
    return Status::kOk;
  }

  // Both sides belong to one thread, which sums only what it still wants to be summed.
  bool is_fenced() override { return true; }
  bool can_fence() const override { return true; }
  void fence() override {}

  int deliver() {
    int count = 0;
    count += deliver(queued_.postings, delivering_.postings, [this](const Posted& posted) {
      if (!is_lost()) sink->on_posting(*this, {posted.header.data(), posted.header_size}, posted.span);
    });
    count += deliver(queued_.writes, delivering_.writes, [this](const Written& one) {
      if (!is_lost()) sink->on_write(*this, one.immediate, one.length);
    });
    count += deliver(queued_.written, delivering_.written, [this](auto token) { sink->on_written(*this, token); });
    return count;
  }
  bool idle() const { return queued_.postings.empty() && queued_.writes.empty() && queued_.written.empty(); }

 private:
  friend class Paired<SelfData>;
  struct Posted {
    explicit Posted(const Posting& what) : header_size(what.header.size()) {
      copy_bytes(what.header, header.data());
      if (what.length > 0) span = what.source->remote(what.source_offset, what.length);
    }
    std::array<std::byte, kMaxHeader> header;  // of which only `header_size` are ever read
    std::size_t header_size;
    RemoteSpan span;
  };
  struct Written {
    std::uint32_t immediate;
    std::uint64_t length;
  };
  struct Queues {
    std::vector<Posted> postings;
    std::vector<Written> writes;
    std::vector<std::uint64_t> written;
  };
  // Delivers what is queued. What is queued meanwhile is for the next poll.
  template <typename T>
  static int deliver(std::vector<T>& queued, std::vector<T>& delivering, auto to) {
    if (queued.empty()) return 0;
    std::swap(queued, delivering);
    for (const T& each : delivering) to(each);
    const auto count = static_cast<int>(delivering.size());
    delivering.clear();
    return count;
  }
  static std::byte* to_pointer(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }
  void sever() override {}  // a process that gave itself up has nothing to cut

  Counters& counters_;
  Queues queued_;      // those for the next poll
  Queues delivering_;  // those that the running poll delivers
};

}  // namespace bps::transport::local
