// SPDX-License-Identifier: Apache-2.0
#include "core/trace_file.h"

#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/error.h"

namespace bps {

void append_frame(Bytes& to, TraceFrameKind kind, std::uint32_t number, std::span<const std::byte> content) {
  const TraceFrameHeader header{.kind = kind, .number = number, .size = static_cast<std::uint32_t>(content.size())};
  const auto bytes = codec::bytes_of(header);
  to.insert(to.end(), bytes.begin(), bytes.end());
  to.insert(to.end(), content.begin(), content.end());
}

std::optional<TraceFrame> TraceFrames::next() {
  begin_ = at_;
  TraceFrameHeader header;
  if (!read(codec::writable_bytes_of(header))) return std::nullopt;
  if (!codec::accepts(header)) refuse("it does not begin as one");
  content_.resize(header.size);
  if (!read(content_)) return std::nullopt;
  return TraceFrame{header.kind, header.number, content_};
}

// Returns false where the file ends before.
bool TraceFrames::read(std::span<std::byte> to) {
  while (!to.empty()) {
    const ssize_t got = ::pread(file_, to.data(), to.size(), static_cast<off_t>(at_));
    if (got == 0) return false;
    if (got < 0) {
      if (errno == EINTR) continue;
      throw Error(ErrorCode::kTransport, "cannot read " + name_ + ": " + std::generic_category().message(errno),
                  "look at that disk");
    }
    at_ += static_cast<std::uint64_t>(got);
    to = to.subspan(static_cast<std::size_t>(got));
  }
  return true;
}

void TraceFrames::refuse(const std::string& why) const {
  throw Error(ErrorCode::kInvalidArgument,
              name_ + " is no trace of bps_rdma: the frame at byte " + std::to_string(begin_) + ": " + why,
              "leave it out");
}

}  // namespace bps
