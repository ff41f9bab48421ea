// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/incoming_frames.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace bps::transport::tcp {

IncomingFrames::Room IncomingFrames::room(std::uint64_t most) {
  Room room;
  std::size_t beside = scratch_.size();
  if (target_ != nullptr) {
    room.in_place = std::min(missing_, most);
    if (unit_ > 1) {
      room.in_place = begun_have_ > 0 ? 0 : room.in_place / unit_ * unit_;
      if (room.in_place == 0) beside = unit_ - begun_have_;
    }
    if (room.in_place > 0) room.parts[static_cast<std::size_t>(room.count++)] = {target_, room.in_place};
  }
  room.total = room.in_place;
  if (room.in_place == missing_ || room.in_place == 0) {
    room.parts[static_cast<std::size_t>(room.count++)] = {scratch_.data(), beside};
    room.total += beside;
  }
  return room;
}

bool IncomingFrames::take(const Room& room, std::uint64_t bytes) {
  const std::uint64_t in_place = std::min(bytes, room.in_place);
  if (in_place > 0) {
    target_ += in_place;
    missing_ -= in_place;
    if (missing_ == 0) end();
  }
  return take_scratch(bytes - in_place);
}

bool IncomingFrames::take_scratch(std::size_t size) {
  const std::byte* data = scratch_.data();
  while (size > 0 && !endpoint_.is_lost()) {
    if (in_payload_) {
      const std::size_t part = std::min<std::uint64_t>(missing_, size);
      if (target_ != nullptr) land(data, part);
      missing_ -= part;
      data += part;
      size -= part;
      if (missing_ == 0) end();
      continue;
    }
    const std::size_t part = std::min(sizeof frame_ - frame_have_, size);
    std::memcpy(codec::writable_bytes_of(frame_).data() + frame_have_, data, part);
    frame_have_ += part;
    data += part;
    size -= part;
    if (frame_have_ == sizeof frame_ && !begin()) return false;
  }
  return true;
}

// Takes what has come by the scratch. A unit lands when all of it is here.
void IncomingFrames::land(const std::byte* data, std::size_t size) {
  while (size > 0) {
    if (begun_have_ == 0 && size >= unit_) {
      const std::size_t whole = size / unit_ * unit_;
      std::memcpy(target_, data, whole);
      target_ += whole;
      data += whole;
      size -= whole;
      continue;
    }
    const std::size_t part = std::min(unit_ - begun_have_, size);
    std::memcpy(begun_.data() + begun_have_, data, part);
    begun_have_ += part;
    data += part;
    size -= part;
    if (begun_have_ < unit_) return;
    std::memcpy(target_, begun_.data(), unit_);
    target_ += unit_;
    begun_have_ = 0;
  }
}

bool IncomingFrames::begin() {
  if (!codec::accepts(frame_)) return false;
  in_payload_ = true;
  missing_ = frame_.length;
  target_ = nullptr;
  if (frame_.length == 0) {
    end();
    return true;
  }
  const auto found = regions_.find(frame_.key);
  // An unknown key belongs to a region that was withdrawn while the bytes were on the way. These bytes, and bytes for
  // which nothing was granted to this peer, are dropped and counted.
  if (found == regions_.end()) return true;
  const std::uint64_t size = found->second.size();
  if (frame_.address > size || frame_.length > size - frame_.address) return false;
  const RemoteSpan span{frame_.key, frame_.address, frame_.length};
  unit_ = endpoint_.sink->allows_write(endpoint_, span, frame_.immediate);
  if (unit_ > kLargestUnit || (unit_ > 1 && frame_.length % unit_ != 0)) return false;
  if (unit_ > 0) target_ = found->second.data() + frame_.address;
  return true;
}

void IncomingFrames::end() {
  const bool delivered = frame_.length == 0 || target_ != nullptr;
  in_payload_ = false;
  frame_have_ = 0;
  target_ = nullptr;
  ++endpoint_.received;
  if (delivered) {
    endpoint_.sink->on_write(endpoint_, frame_.immediate, frame_.length);
  } else {
    counters_.stale.add();
  }
}

std::uint64_t IncomingFrames::cut() {
  if (std::exchange(target_, nullptr) == nullptr) return 0;
  return frame_.length - missing_ - std::exchange(begun_have_, 0);
}

}  // namespace bps::transport::tcp
