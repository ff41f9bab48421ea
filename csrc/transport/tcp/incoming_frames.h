// SPDX-License-Identifier: Apache-2.0
// Takes in the frames of a tcp connection. Each has a payload that goes to its place, or is dropped. While the place of
// the next bytes is known they are read into it. What follows is read into the scratch, so that a small frame behind a
// large one costs no system call of its own. Belongs to the thread of the loop.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/metrics.h"
#include "transport/data_endpoint.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/tcp_transport.h"

namespace bps::transport::tcp {

class IncomingFrames {
 public:
  // All three must outlive the object.
  IncomingFrames(DataEndpoint& endpoint, const TcpTransport::Regions& regions, Counters& counters)
      : endpoint_(endpoint), regions_(regions), counters_(counters) {}

  struct Room {
    std::array<iovec, 2> parts;
    int count = 0;
    std::uint64_t in_place = 0;
    std::uint64_t total = 0;
  };
  // Tells where the next bytes belong. At most `most` of them are read into place.
  Room room(std::uint64_t most);
  // Returns true when a read into place must not end within a unit, whose first bytes would be gone. `most` then counts
  // bytes that are here for certain, and a unit of which only a part is here comes by the scratch.
  bool lands_in_units() const { return target_ != nullptr && unit_ > 1; }
  // Takes the bytes that were read there. Returns false when the peer does not keep to the protocol.
  bool take(const Room& room, std::uint64_t bytes);

  // Drops the rest of the present frame. Returns how much of it has landed.
  std::uint64_t cut();
  // Returns the immediate of the present frame.
  std::uint32_t immediate() const { return frame_.immediate; }
  bool is_in_payload() const { return in_payload_; }

 private:
  static constexpr std::size_t kScratch = 16 * 1024;
  static constexpr std::size_t kLargestUnit = 16;

  bool take_scratch(std::size_t size);
  void land(const std::byte* data, std::size_t size);
  bool begin();
  void end();

  DataEndpoint& endpoint_;
  const TcpTransport::Regions& regions_;
  Counters& counters_;

  TcpFrame frame_{};
  std::size_t frame_have_ = 0;
  bool in_payload_ = false;
  std::byte* target_ = nullptr;  // where the rest goes; null: it is dropped
  std::uint64_t missing_ = 0;
  std::size_t unit_ = 1;        // how many bytes land together: see DataSink::allows_write()
  std::size_t begun_have_ = 0;  // how many bytes of a unit are here and have not landed
  std::array<std::byte, kLargestUnit> begun_;
  std::array<std::byte, kScratch> scratch_;
};

}  // namespace bps::transport::tcp
