// How one process reaches another.
//
// A Transport owns the NIC (or the sockets, or the mappings) and the memory registered with it. An Endpoint is one
// connection of one plane: control endpoints carry short messages, data endpoints carry payload and nothing else. Bulk
// data moves in one way: write() puts bytes into memory that the peer registered and told us of, and hands the peer a
// 32-bit immediate once they are visible there. Where two processes share a host, a peer can also reach our memory
// itself: direct() then gives post(), which hands over a range to be read in place, and get()/put() on the other side.
//
// Threading: a Transport and its endpoints belong to the thread of its event loop; connect() alone may be called from
//            another one, and the endpoint it returns enters the loop by attach(). Nothing here takes a lock.
// Ordering:  none between writes or descriptors. A write's immediate is delivered after that write's own bytes are
// visible,
//            and that is the only promise; callers make every chunk self-contained.
// Errors:    set-up throws Error. write() and post() accept a prefix of what they are given, 0 while the window is
// full;
//            they never block. A lost peer is reported once through Sink::on_lost(); its endpoint then accepts nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/bytes.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/metrics.h"
#include "transport/handshake.h"

namespace bps::transport {

inline constexpr std::size_t kMaxHeader = 64;
inline constexpr std::size_t kMaxMessage = 1 << 16;
inline constexpr std::uint64_t kNoToken = ~std::uint64_t{0};

// Memory of a peer, in the peer's own notation: the key it told us, and an address that counts from the region's
// origin.
struct RemoteSpan {
  std::uint64_t key = 0;
  std::uint64_t address = 0;
  std::uint64_t length = 0;
};

// Memory of this process that a transport knows. Whoever holds the pointer keeps it registered.
class Region {
 public:
  explicit Region(std::span<std::byte> bytes) : bytes_(bytes) {}
  virtual ~Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  // The part [offset, offset + length) as the peer has to name it.
  RemoteSpan remote(std::uint64_t offset, std::uint64_t length) const { return {key_, origin_ + offset, length}; }
  std::uint64_t key() const { return key_; }

 protected:
  std::uint64_t key_ = 0;
  std::uint64_t origin_ = 0;  // a NIC counts from the virtual address, the others from zero

 private:
  std::span<std::byte> bytes_;
};

using RegionPtr = std::shared_ptr<Region>;

struct WriteOp {
  std::span<const std::byte> header{};  // at most kMaxHeader bytes, copied; lands right before the payload
  const Region* source = nullptr;       // may be null when length is 0
  std::uint64_t source_offset = 0;
  std::uint64_t length = 0;  // payload bytes; 0 delivers just the immediate (and the header)
  RemoteSpan target{};       // target.length is the room there; ignored when header and length are 0
  std::uint32_t immediate = 0;
  std::uint64_t token = kNoToken;  // handed back by on_written() when `source` may be reused
};

struct Descriptor {
  std::span<const std::byte> header{};  // at most kMaxHeader bytes, copied
  const Region* source = nullptr;       // must stay untouched until the peer answers; null when length is 0
  std::uint64_t source_offset = 0;
  std::uint64_t length = 0;
  const Region* answer = nullptr;  // memory that the header names and the peer will put() into; may be null
};

// Memory of a peer on the same host.
class DirectAccess {
 public:
  // Whether the peer can read and write `region` itself.
  virtual bool peer_reaches(const Region& region) const = 0;
  virtual std::size_t post(std::span<const Descriptor> descriptors) = 0;

  // Where a span of the peer's memory is mapped here, or nullptr when it can only be copied. Checks the span against
  // what the peer announced: a span out of bounds is nullptr here and kProtocol below.
  virtual std::byte* map(const RemoteSpan& span) = 0;
  virtual Status get(const RemoteSpan& span, std::byte* into) = 0;
  virtual Status put(const RemoteSpan& span, const std::byte* from) = 0;

 protected:
  ~DirectAccess() = default;
};

class Endpoint;

// What a transport found. Called on the transport's thread; must not block.
class Sink {
 public:
  virtual void on_write(Endpoint& from, std::uint32_t immediate) = 0;
  virtual void on_descriptor(Endpoint& from, std::span<const std::byte> header, const RemoteSpan& span) = 0;
  virtual void on_written(Endpoint& to, std::uint64_t token) = 0;
  virtual void on_message(Endpoint& from, std::span<const std::byte> message) = 0;
  virtual void on_lost(Endpoint& peer, const std::string& why) = 0;

 protected:
  ~Sink() = default;
};

class Endpoint {
 public:
  Endpoint(bool data_plane, const Hello& made_by) : is_data_plane(data_plane), hello(made_by) {}
  virtual ~Endpoint() = default;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Data plane. Accepts a prefix of `ops` and returns how many.
  virtual std::size_t write(std::span<const WriteOp> ops) = 0;
  // Control plane. Copied; at most kMaxMessage bytes; never reordered among themselves.
  virtual Status send(std::span<const std::byte> message) = 0;
  // The peer counts as lost, whatever it thinks of that: from the return on nothing of it lands in our memory, nothing
  // is sent, and nothing is reported but tokens of writes that were posted. May be called from any callback. (A peer on
  // the same host that has our memory mapped cannot be kept from it.)
  virtual void abandon() = 0;
  // Same-host peers only, else nullptr.
  virtual DirectAccess* direct() { return nullptr; }

  const bool is_data_plane;
  const Hello hello;     // who opened this connection, and for which loops
  Sink* sink = nullptr;  // whoever uses the endpoint; set before attach() or in the accept callback
  void* user = nullptr;  // for the sink
};

// Somebody who has proved to belong to the job and waits to be let in. Destroying one sends it away.
class IncomingConnection {
 public:
  explicit IncomingConnection(const Hello& who) : hello(who) {}
  virtual ~IncomingConnection() = default;
  IncomingConnection(const IncomingConnection&) = delete;
  IncomingConnection& operator=(const IncomingConnection&) = delete;

  const Hello hello;
};

// One who came through a Listener.
class IncomingSocket final : public IncomingConnection {
 public:
  IncomingSocket(Fd by, const Hello& who) : IncomingConnection(who), socket(std::move(by)) {}
  Fd socket;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;  // "shm", "tcp", "rdma", "self"
  virtual RegionPtr register_memory(std::span<std::byte> bytes) = 0;

  // Blocks until the peer has let us in. `address` is what the peer's transport of the same name published.
  virtual std::unique_ptr<Endpoint> connect(std::span<const std::byte> address, const Hello& hello,
                                            const Deadline& deadline, const std::string& whom) = 0;
  // Lets in who came by this transport's kind of door. May return before the set-up of the data plane has finished.
  virtual Endpoint* accept(std::unique_ptr<IncomingConnection> incoming, Sink& sink) = 0;
  // On the loop's thread: the transport owns and drives the endpoint from now on.
  virtual Endpoint* attach(std::unique_ptr<Endpoint> endpoint) = 0;
  virtual void close(Endpoint* endpoint) = 0;  // no callbacks after this

  // Delivers what is there, without blocking; what comes through descriptors arrives by the event loop instead.
  virtual int poll() = 0;
  // Before the loop sleeps: from now on, work wakes the loop. False when work came in meanwhile.
  virtual bool arm() = 0;
  virtual void disarm() = 0;
  // Whether poll() alone may miss arrivals, because descriptors announce them.
  virtual bool relies_on_descriptors() const { return false; }
};

}  // namespace bps::transport
