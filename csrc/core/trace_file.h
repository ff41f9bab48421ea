// SPDX-License-Identifier: Apache-2.0
// Defines the file of a trace while a process runs: TraceWriter appends frames, each with a kind, a number and bytes.
// format_trace() makes the trace that people open from them (trace_format.h).
//
// The first frame says whose trace it is. A name stands before the first frame that uses it. A process that is killed
// leaves the last frame cut short. Numbers are those of the machine, little-endian.
//
// It belongs to one thread. It throws kInvalidArgument, with the file's name, for what no TraceWriter has written,
// since nothing in a file is trusted, and kTransport where the file cannot be read.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "core/bytes.h"
#include "core/codec.h"
#include "core/trace.h"

namespace bps {

enum class TraceFrameKind : std::uint32_t {
  kProcess,     // TraceProcess
  kTensorName,  // the name of a tensor by its number; the next two are alike
  kNodeName,
  kSpanName,
  kEvents,   // TraceEvents of the ring of that number
  kSpans,    // TraceSpan
  kDropped,  // TraceDropped
  kClock,  // TickSample: events are timed by the processor's counter; one comes before the events, and one at their end
};
constexpr bool is_valid(TraceFrameKind kind) {
  return kind <= TraceFrameKind::kClock;
}

struct TraceFrameHeader {
  static constexpr std::uint32_t kMagic = 0x32'53'50'42;  // "BPS2"; a file of another form has another number
  static constexpr std::uint32_t kMostBytes = TraceRing::kEvents * sizeof(TraceEvent);

  std::uint32_t magic = kMagic;
  TraceFrameKind kind = TraceFrameKind::kProcess;
  std::uint32_t number = 0;
  std::uint32_t size = 0;  // the bytes that follow

  static constexpr void fields(auto& io, auto& m) {
    io(m.magic, m.kind, m.number, m.size);
    io.require([&] { return m.magic == kMagic && m.size <= kMostBytes; });
  }
};
static_assert(codec::Plain<TraceFrameHeader>);

struct TraceProcess {
  static constexpr std::size_t kMostText = 4096;  // the limit of a name as well
  static constexpr std::uint32_t kMostRings = 4096;

  std::string version;
  std::string name;  // "worker 0 and server 0"
  std::string host;
  std::string clock;  // processes with the same text have the same one
  std::uint64_t pid = 0;
  std::int32_t worker_rank = -1;
  std::int32_t server_rank = -1;
  std::uint32_t rings = 0;

  static constexpr void fields(auto& io, auto& m) {
    io.bounded(m.version, kMostText);
    io.bounded(m.name, kMostText);
    io.bounded(m.host, kMostText);
    io.bounded(m.clock, kMostText);
    io(m.pid, m.worker_rank, m.server_rank, m.rings);
    io.require([&] { return m.rings <= kMostRings; });
  }
};

// Counts the events that all rings together have dropped so far.
struct TraceDropped {
  std::uint64_t events = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.events); }
};

void append_frame(Bytes& to, TraceFrameKind kind, std::uint32_t number, std::span<const std::byte> content);

struct TraceFrame {
  TraceFrameKind kind;
  std::uint32_t number;
  std::span<const std::byte> content;  // valid until the next frame is read
};

class TraceFrames {
 public:
  // `file` is open for reading. It is read from its start, whatever its position.
  TraceFrames(int file, std::string name) : file_(file), name_(std::move(name)) {}

  // Returns nothing at the end of the file, or where the last frame is cut short.
  std::optional<TraceFrame> next();
  // Throws an error that says what is wrong with the frame that was read last.
  [[noreturn]] void refuse(const std::string& why) const;

 private:
  bool read(std::span<std::byte> to);

  const int file_;
  const std::string name_;
  std::uint64_t begin_ = 0;  // where the frame begins that was read last
  std::uint64_t at_ = 0;
  Bytes content_;
};

}  // namespace bps
