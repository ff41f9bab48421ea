// SPDX-License-Identifier: Apache-2.0
// The data plane of a connection: bulk writes into the peer's registered memory, each followed by an immediate.
//
// Ordering: none between writes or postings. A write's immediate is delivered after that write's own bytes are
//           visible, and that is the only promise; callers make every partition self-contained.
// Errors:   write() and post() accept a prefix of what they are given, none of it while the window is full or after the
//           peer is lost. They never block and never throw.
// Threading: the loop's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "transport/endpoint.h"
#include "transport/memory.h"

namespace bps::transport {

namespace shm {
class SharedMemory;
}

inline constexpr std::size_t kMaxHeader = 64;
inline constexpr std::uint64_t kNoToken = ~std::uint64_t{0};

struct WriteOp {
  std::span<const std::byte> header{};  // at most kMaxHeader bytes, copied; lands right before the payload
  const Region* source = nullptr;       // may be null when length is 0
  std::uint64_t source_offset = 0;
  std::uint64_t length = 0;  // payload bytes; 0 delivers just the immediate (and the header)
  RemoteSpan target{};       // target.length is the room there: who writes more loses the connection
  std::uint32_t immediate = 0;
  std::uint64_t token = kNoToken;  // handed back by on_written() when `source` may be reused

  std::uint64_t total() const { return header.size() + length; }
  // True when the peer has granted enough room.
  bool fits() const { return total() <= target.length || total() == 0; }
};
inline constexpr const char* kNoRoom = "it has granted less room than a write takes";

// A posting names memory that a peer on the same host reads in place.
struct Posting {
  std::span<const std::byte> header{};  // at most kMaxHeader bytes, copied
  const Region* source = nullptr;       // must stay untouched until the peer answers; null when length is 0
  std::uint64_t source_offset = 0;
  std::uint64_t length = 0;
  const Region* answer = nullptr;  // memory that the header names and the peer will put() into; may be null
};

// Memory of a peer on the same host.
class DirectAccess {
 public:
  // True when the peer can read and write `region` itself.
  virtual bool peer_reaches(const Region& region) const = 0;
  // True when it maps the region, and so works on it where it lies; otherwise each access is a system call that copies.
  virtual bool peer_maps(const Region& region) const = 0;
  virtual std::size_t post(std::span<const Posting> postings) = 0;

  // Where a span of the peer's memory is mapped here, or nullptr when it can only be copied. Checks the span against
  // what the peer announced: a span out of bounds is nullptr here and kProtocol below.
  virtual std::byte* map(const RemoteSpan& span) = 0;
  virtual Status get(const RemoteSpan& span, std::byte* into) = 0;
  virtual Status put(const RemoteSpan& span, const std::byte* from) = 0;

  // Lets the peer hold a region, which is shared memory, by a span of it. False: the connection is lost, or is full.
  virtual bool share(const Region& /*region*/) { return false; }
  // Memory of the peer that it has shared, which stays when the peer is gone; null where there is none, or it is mapped
  // in part only.
  virtual std::shared_ptr<shm::SharedMemory> hold(const RemoteSpan& /*span*/) { return nullptr; }

  // A peer that can write to our memory can do so after the connection has been given up: it may have been stopped
  // in the middle of a sum, and go on later. Before the memory is used again the peer must be fenced.
  // True when the peer can write no more: it has closed its side of the connection, or has ended.
  virtual bool is_fenced() = 0;
  // Delivers what a peer that is_fenced() has posted before, also where the connection is lost.
  virtual void take_rest() {}
  // True when fence() could make sure of that. If not, the peer must be given buffers that nobody else uses.
  virtual bool can_fence() const = 0;
  // Ends the peer's process, whatever it does: soon it is_fenced(). Has no effect on one that is.
  virtual void fence() = 0;

 protected:
  ~DirectAccess() = default;
};

// The rate at which the network has carried a connection's bytes lately.
struct MeasuredRate {
  std::uint64_t bytes_per_s = 0;  // 0: unknown
  bool at_least = false;          // there was not enough to send to find out more
};

// The bytes that have gone out by a connection.
struct Carried {
  std::uint64_t bytes = 0;    // that the peer's system has acknowledged
  std::uint64_t busy_us = 0;  // while some were on their way, or waited
};

class DataEndpoint;

// The user of a data endpoint. Called on the transport's thread; must not block.
class DataSink {
 public:
  // True when the peer may write there now, with this immediate: asked once, before the first byte lands, by transports
  // whose writes pass through this process. 0: it may not; that goes nowhere, and is counted as stale. Else it lands in
  // units of so many bytes, which divide its length; on_write() tells its end, or on_cut_off() how far it has come.
  virtual std::size_t allows_write(DataEndpoint& /*from*/, const RemoteSpan&, std::uint32_t /*immediate*/) { return 1; }
  // The connection ends in the middle of a write, of which the first `bytes` have landed, which are whole units,
  // however large these are. Called where Transport::lands_in_order().
  virtual void on_cut_off(DataEndpoint& /*from*/, std::uint32_t /*immediate*/, std::uint64_t /*bytes*/) {}
  // A write has come in, of which `landed` bytes are here, header and payload together: as the transport knows it, and
  // not as its peer says. DataEndpoint::is_whole() compares it with what is due.
  virtual void on_write(DataEndpoint& from, std::uint32_t immediate, std::uint64_t landed) = 0;
  virtual void on_posting(DataEndpoint& from, std::span<const std::byte> header, const RemoteSpan& span) = 0;
  virtual void on_written(DataEndpoint& to, std::uint64_t token) = 0;
  virtual void on_lost(Endpoint& peer, const std::string& why) = 0;

 protected:
  ~DataSink() = default;
};

class DataEndpoint : public Endpoint {
 public:
  // Accepts a prefix of `ops` and returns how many.
  virtual std::size_t write(std::span<const WriteOp> ops) = 0;
  // Nothing more of a write that is coming in lands, where Transport::lands_in_order(), and on_write() does not come.
  // Returns how many bytes have landed, which are whole units; 0 if it is not coming in.
  virtual std::uint64_t stop_landing(std::uint32_t /*immediate*/) { return 0; }
  // Peers on the same host only, else nullptr.
  DirectAccess* direct() const { return direct_; }
  std::uint64_t longest_piece() const { return longest_piece_; }
  // True when all of a write of `total` bytes is here, of which DataSink::on_write() has told `landed`. A NIC tells
  // the length of the last piece only, so of a write in pieces no more can be checked than that this length is right.
  bool is_whole(std::uint64_t landed, std::uint64_t total) const {
    return landed == total || (total > longest_piece_ && landed == (total - 1) % longest_piece_ + 1);
  }
  // Transports whose rails do not tell how fast they are.
  virtual MeasuredRate measured_rate() const { return {}; }
  // Since it was asked last; nothing where it is not known. Asks the system; not for the data path.
  virtual Carried take_carried() { return {}; }

  DataSink* sink = nullptr;  // set by Transport::attach() and accept_data()
  // Counts the writes of the peer that have come in, in the order in which it posted them, also those that were not
  // allowed; where Transport::fails_over().
  std::uint32_t received = 0;

 protected:
  explicit DataEndpoint(const Hello& opened_by, DirectAccess* direct = nullptr)
      : Endpoint(true, opened_by), direct_(direct) {}
  void report_loss(const std::string& why) override { sink->on_lost(*this, why); }

  DirectAccess* direct_;  // no virtual function: a server asks several times for each push
  // A longer write is cut into pieces of this length, of whose last one alone on_write() tells.
  std::uint64_t longest_piece_ = ~std::uint64_t{0};
};

// The tokens of writes whose source is read no more, until the sink is told.
class WrittenTokens {
 public:
  void reserve(std::size_t most) {
    waiting_.reserve(most);
    told_.reserve(most);
  }
  void add(std::uint64_t token) {
    if (token != kNoToken) waiting_.push_back(token);
  }
  bool empty() const { return waiting_.empty(); }
  // Tells the sink, which may write meanwhile. Returns how many.
  int tell(DataEndpoint& to) {
    if (waiting_.empty()) return 0;
    waiting_.swap(told_);
    for (const std::uint64_t token : told_) to.sink->on_written(to, token);
    const auto told = static_cast<int>(told_.size());
    told_.clear();
    return told;
  }

 private:
  std::vector<std::uint64_t> waiting_;
  std::vector<std::uint64_t> told_;
};

}  // namespace bps::transport
