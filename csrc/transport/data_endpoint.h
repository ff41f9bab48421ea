// SPDX-License-Identifier: Apache-2.0
// Defines the data plane of a connection: bulk writes into the peer's registered memory, each followed by an immediate.
//
// Ordering: writes and postings have none. The only promise is that a write's immediate is delivered after that write's
// own bytes are visible. So callers make every partition self-contained.
// Errors: write() and post() accept a prefix of what they are given, and nothing while the window is full or after the
// peer is lost. They never block and never throw.
// Threading: an endpoint belongs to the thread of the event loop.
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
  RemoteSpan target{};       // target.length is the room there: a peer that writes more loses the connection
  std::uint32_t immediate = 0;
  std::uint64_t token = kNoToken;  // is handed back by on_written() when `source` may be reused

  std::uint64_t total() const { return header.size() + length; }
  // Returns true when the peer has granted enough room.
  bool fits() const { return total() <= target.length || total() == 0; }
};
inline constexpr const char* kNoRoom = "it has granted less room than a write takes";

// A posting names memory that a peer on the same host reads in place.
struct Posting {
  std::span<const std::byte> header{};  // at most kMaxHeader bytes, copied
  const Region* source = nullptr;       // must stay untouched until the peer answers; null when length is 0
  std::uint64_t source_offset = 0;
  std::uint64_t length = 0;
  const Region* answer = nullptr;  // memory that the header names, and that the peer will put() into; may be null
};

// Reaches the memory of a peer on the same host.
class DirectAccess {
 public:
  // Returns true when the peer can read and write `region` itself.
  virtual bool peer_reaches(const Region& region) const = 0;
  // Returns true when the peer maps the region, and so works on it in place. Otherwise a system call copies each time.
  virtual bool peer_maps(const Region& region) const = 0;
  virtual std::size_t post(std::span<const Posting> postings) = 0;

  // Returns where a span of the peer's memory is mapped here, or null when it can only be copied. The span is checked
  // against what the peer announced: out of bounds, map() returns null, and get() and put() return kProtocol.
  virtual std::byte* map(const RemoteSpan& span) = 0;
  virtual Status get(const RemoteSpan& span, std::byte* into) = 0;
  virtual Status put(const RemoteSpan& span, const std::byte* from) = 0;

  // Lets the peer hold a region of shared memory by a span of it. Returns false when the connection is lost or full.
  virtual bool share(const Region& /*region*/) { return false; }
  // Returns memory that the peer has shared, which stays when the peer is gone. Returns null where there is none, or
  // where only a part of it is mapped.
  virtual std::shared_ptr<shm::SharedMemory> hold(const RemoteSpan& /*span*/) { return nullptr; }

  // Returns true when the peer can write to our memory no more, as it has closed its side of the connection or has
  // ended. Until then it can write even after the connection was given up: it may have been stopped in the middle of a
  // sum, and go on later. Before the memory is used again the peer must be fenced.
  virtual bool is_fenced() = 0;
  // Returns true when fence() can fence the peer. If not, the peer must be given buffers that nobody else uses.
  virtual bool can_fence() const = 0;
  // Ends the peer's process, whatever it is doing, so that it soon is_fenced(). Has no effect on a peer that is.
  virtual void fence() = 0;

 protected:
  ~DirectAccess() = default;
};

// Tells at which rate the network has carried a connection's bytes lately.
struct MeasuredRate {
  std::uint64_t bytes_per_s = 0;  // 0: unknown
  bool at_least = false;          // the rate may be higher: there was too little to send to find out
};

// Counts the bytes that have gone out by a connection.
struct Carried {
  std::uint64_t bytes = 0;    // how many the peer's system has acknowledged
  std::uint64_t busy_us = 0;  // for how long some were on their way, or waited
};

class DataEndpoint;

// The user of a data endpoint implements this. It is called on the transport's thread, and must not block.
class DataSink {
 public:
  // Says whether the peer may write there now, with this immediate. Transports whose writes pass through this process
  // ask once, before the first byte lands. 0 means no: the write is dropped, and counted as stale. Otherwise it lands
  // in units of this many bytes, which divide its length, until on_write() or on_cut_off() tells how far it came.
  virtual std::size_t allows_write(DataEndpoint& /*from*/, const RemoteSpan&, std::uint32_t /*immediate*/) { return 1; }
  // The connection ends in the middle of a write, of which the first `bytes` have landed. These are whole units,
  // however large units are. Is called where Transport::lands_in_order().
  virtual void on_cut_off(DataEndpoint& /*from*/, std::uint32_t /*immediate*/, std::uint64_t /*bytes*/) {}
  // A write has come in, of which `landed` bytes are here, header and payload together. The transport knows this
  // number, and does not have it from the peer. DataEndpoint::is_whole() compares it with what is due.
  virtual void on_write(DataEndpoint& from, std::uint32_t immediate, std::uint64_t landed) = 0;
  virtual void on_posting(DataEndpoint& from, std::span<const std::byte> header, const RemoteSpan& span) = 0;
  virtual void on_written(DataEndpoint& to, std::uint64_t token) = 0;
  virtual void on_lost(Endpoint& peer, const std::string& why) = 0;

 protected:
  ~DataSink() = default;
};

class DataEndpoint : public Endpoint {
 public:
  // Accepts a prefix of `ops`, and returns how many these are.
  virtual std::size_t write(std::span<const WriteOp> ops) = 0;
  // Stops a write that is coming in: nothing more of it lands, and on_write() is not called. Returns how many bytes
  // have landed, which are whole units; 0 if none is coming in. Works where Transport::lands_in_order().
  virtual std::uint64_t stop_landing(std::uint32_t /*immediate*/) { return 0; }
  // Delivers what the peer has sent before its end and is here. Another connection to it may have shown that end first.
  // A peer that reaches our memory is fenced by then. It works for a connection that is lost, too, if that has a rest.
  virtual void take_rest() {}
  // Returns null for a peer on another host.
  DirectAccess* direct() const { return direct_; }
  std::uint64_t longest_piece() const { return longest_piece_; }
  // Returns true when all `total` bytes of a write are here. `landed` is what on_write() told. A NIC tells only the
  // length of the last piece. So of a write in pieces no more can be checked than that this length is right.
  bool is_whole(std::uint64_t landed, std::uint64_t total) const {
    return landed == total || (total > longest_piece_ && landed == (total - 1) % longest_piece_ + 1);
  }
  // Returns the rate, which transports measure whose rails do not tell how fast they are.
  virtual MeasuredRate measured_rate() const { return {}; }
  // Returns what was carried since the last call; zeros where that is unknown. Asks the system; not for the data path.
  virtual Carried take_carried() { return {}; }

  DataSink* sink = nullptr;  // set by Transport::attach() and accept_data()
  // Counts the writes of the peer that have come in, in the order in which it posted them, including those that were
  // not allowed. Is counted where Transport::fails_over().
  std::uint32_t received = 0;

 protected:
  explicit DataEndpoint(const Hello& opened_by, DirectAccess* direct = nullptr)
      : Endpoint(true, opened_by), direct_(direct) {}
  void report_loss(const std::string& why) override { sink->on_lost(*this, why); }

  DirectAccess* direct_;  // no virtual function: a server asks several times for each push
  // A longer write is cut into pieces of this length. on_write() then tells the length of the last piece alone.
  std::uint64_t longest_piece_ = ~std::uint64_t{0};
};

// Keeps the tokens of writes whose source is read no more, until the sink is told.
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
  // Tells the sink, which may write meanwhile. Returns how many tokens it told.
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
