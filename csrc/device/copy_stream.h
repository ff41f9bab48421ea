// SPDX-License-Identifier: Apache-2.0
// Copies in one direction, in a stream with a flag in pinned memory by which a loop sees how far it is.
//
// A mark is a number that the device writes to the flag when all that was put into the stream before it has ended. The
// loop reads the flag as it polls, which is a load and no call. A loop that is about to sleep, or that puts a wait
// behind copies, asks the stream to ring the loop's doorbell. The driver rings it on a thread of its own and holds the
// stream up meanwhile, so a loop that polls anyway does not ask.
//
// One thread at a time uses it, which holds a Device::Current for everything but reached() and marks(). What is put
// into the stream ends in that order. The constructor throws; the others return what the driver says. That may be a
// refusal of one call, and tells nothing of what is in the stream, which state() does. After an error of the device
// nothing that is in the stream changes memory any more, and no mark of it is reached.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/clock.h"
#include "device/device.h"

namespace bps::device {

// Copies that nothing holds up have ended after this time.
constexpr double kLongestEnd_s = 5;

class CopyStream {
 public:
  static constexpr int kNoDoorbell = -1;
  // `doorbell` is an eventfd, see EventLoop::doorbell(). The stream keeps a copy, because it may outlive the loop.
  CopyStream(const Device& device, int doorbell);
  // Waits for what is in the stream, for a while. A device that does not end it keeps stream and flag. The owner of the
  // memory of its copies destroys the stream only when they have ended, or keeps that memory, too.
  ~CopyStream();
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  // Holds up what follows in the stream until the caller's stream has come to this point.
  cuda::Result wait_for(const Ready& ready);
  cuda::Result to_host(std::byte* to, const std::byte* from, std::size_t size);
  cuda::Result to_device(std::byte* to, const std::byte* from, std::size_t size);
  // Puts the next mark, whose number is marks() afterwards. It counts even if the driver refuses it: a later one is
  // reached after all that is before this one, and settle() needs no mark.
  cuda::Result mark();
  std::uint32_t marks() const { return marks_; }
  // Returns true when the device has come to this mark. Numbers wrap.
  bool reached(std::uint32_t mark) const;
  // Rings the doorbell when the last mark is reached, unless that has been asked for since the mark was put.
  cuda::Result ring_at_last_mark();
  // Returns kSuccess when all has ended, kNotReady when not, or while a capture forbids the question, or else the error
  // of the device, after which all has ended, too.
  cuda::Result state() const;
  // Does the same. When all has ended, every mark is reached, also those that the driver refused.
  cuda::Result settle();
  // Waits until all has ended. Returns false at the deadline.
  bool drain(const Deadline& until) const;

 private:
  const Device& device_;
  cuda::Stream stream_ = nullptr;
  std::uint32_t* flag_ = nullptr;  // the device writes it
  cuda::Address flag_at_ = 0;      // its address for the device
  std::uint32_t marks_ = 0;
  std::uint32_t rings_at_ = 0;  // the mark at which it rings
  int doorbell_ = -1;           // closed by hand, and not while the device may still ring
};

}  // namespace bps::device
