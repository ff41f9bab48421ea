// SPDX-License-Identifier: Apache-2.0
// The hot part of tcp: frames out, frames in.
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/limits.h"
#include "transport/tcp/tcp_data.h"

namespace bps::transport::tcp {
namespace {

// One readiness callback moves at most this much, so that no peer starves the others of the loop.
constexpr std::uint64_t kReceiveBudget = 4 << 20;
constexpr std::size_t kBatch = 8;  // writes per system call

}  // namespace

TcpData::TcpData(Fd socket, const Hello& made_by, EventLoop& loop, Counters& counters,
                 const TcpTransport::Regions& regions)
    : DataEndpoint(made_by), socket_(std::move(socket)), loop_(loop), counters_(counters), regions_(regions) {
  ::fcntl(socket_.get(), F_SETFL, ::fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
  written_.reserve(kWindow);
}

TcpData::~TcpData() {
  if (watched_) loop_.forget(socket_.get());
}

void TcpData::start() {
  watched_ = true;
  loop_.watch(socket_.get(), EPOLLIN, [this](std::uint32_t events) { on_ready(events); });
}

std::size_t TcpData::write(std::span<const WriteOp> ops) {
  if (is_lost()) return 0;
  std::size_t accepted = 0;
  for (const WriteOp& op : ops) {
    if (out_count_ == kWindow) break;
    if (!op.fits()) {
      lose(kNoRoom);
      break;
    }
    Outgoing& out = out_[(out_head_ + out_count_) % kWindow];
    out.frame = {TcpFrame::kMagic, op.immediate, op.target.key, op.target.address, op.total()};
    copy_bytes(op.header, out.header.data());
    out.header_size = op.header.size();
    out.payload = op.length > 0 ? op.source->bytes().data() + op.source_offset : nullptr;
    out.length = op.length;
    out.token = op.token;
    out.sent = 0;
    ++out_count_;
    ++accepted;
    counters_.data_writes.add();
    counters_.data_bytes.add(op.length);
  }
  if (accepted > 0 && !want_write_) transmit();
  return accepted;
}

void TcpData::transmit() {
  while (out_count_ > 0 && !is_lost()) {
    std::array<iovec, 3 * kBatch> parts;
    std::size_t count = 0;
    const auto add = [&](const void* data, std::uint64_t size, std::uint64_t& skip) {
      const std::uint64_t skipped = std::min(skip, size);
      skip -= skipped;
      if (size == skipped) return;
      parts[count++] = {const_cast<char*>(static_cast<const char*>(data)) + skipped, size - skipped};
    };
    for (std::size_t i = 0; i < std::min(out_count_, kBatch); ++i) {
      const Outgoing& out = out_[(out_head_ + i) % kWindow];
      std::uint64_t skip = out.sent;
      add(&out.frame, sizeof out.frame, skip);
      add(out.header.data(), out.header_size, skip);
      add(out.payload, out.length, skip);
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (sent < 0 && is_shortage(errno)) {
      loop_.rest(socket_.get());
      break;
    }
    if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) break;  // what came before that is read first: receive()
    if (sent < 0) return lose(std::strerror(errno));
    auto left = static_cast<std::uint64_t>(sent);
    while (left > 0) {
      Outgoing& out = out_[out_head_];
      const std::uint64_t took = std::min(left, out.total() - out.sent);
      out.sent += took;
      left -= took;
      if (out.sent < out.total()) break;
      written_.add(out.token);
      out_head_ = (out_head_ + 1) % kWindow;
      --out_count_;
    }
  }
  const bool want = out_count_ > 0;
  if (want != want_write_) {
    want_write_ = want;
    loop_.change(socket_.get(), want ? EPOLLIN | EPOLLOUT : EPOLLIN);
  }
}

void TcpData::on_ready(std::uint32_t events) {
  if ((events & EPOLLOUT) != 0) transmit();
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && !is_lost()) receive();
  tell_loss();
}

void TcpData::receive() {
  std::uint64_t budget = kReceiveBudget;
  for (bool first = true; budget > 0 && !is_lost(); first = false) {
    // Into place as far as we know where that is, and what follows into the scratch, so that a small frame behind a
    // large one costs no system call of its own.
    std::array<iovec, 2> parts;
    int count = 0;
    std::uint64_t direct = 0;
    std::size_t room = scratch_.size();
    if (in_payload_ && target_ != nullptr) {
      direct = std::min(missing_, budget);
      if (unit_ > 1) {
        const std::uint64_t here = readable();
        if (here == 0 && !first) return;  // the first read is told of the end of the connection
        direct = begun_have_ > 0 ? 0 : std::min(direct, here) / unit_ * unit_;
        if (direct == 0) room = unit_ - begun_have_;
      }
      if (direct > 0) parts[static_cast<std::size_t>(count++)] = {target_, direct};
    }
    const bool whole = direct == missing_ || direct == 0;
    if (whole) parts[static_cast<std::size_t>(count++)] = {scratch_.data(), room};
    const ssize_t got = ::readv(socket_.get(), parts.data(), count);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got < 0 && is_shortage(errno)) return loop_.rest(socket_.get());
    if (got <= 0) return lose(got == 0 ? "connection closed" : std::strerror(errno));
    const auto bytes = static_cast<std::uint64_t>(got);
    budget -= std::min(budget, bytes);
    const std::uint64_t in_place = std::min(bytes, direct);
    if (in_place > 0) {
      target_ += in_place;
      missing_ -= in_place;
      if (missing_ == 0) end_frame();
    }
    if (!take_scratch(bytes - in_place)) return lose("it broke the tcp protocol");
    if (bytes < direct + (whole ? room : 0)) return;  // drained: spare the call that would say so
  }
}

// Bytes that are here for certain. A read of whole units of them does not end within a unit, whose bytes of before
// would be gone; a unit of which only a part is here comes by the scratch.
std::uint64_t TcpData::readable() const {
  int here = 0;
  return ::ioctl(socket_.get(), FIONREAD, &here) == 0 && here > 0 ? static_cast<std::uint64_t>(here) : 0;
}

// Takes what has come by the scratch. A unit lands when all of it is here.
void TcpData::land(const std::byte* data, std::size_t size) {
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

bool TcpData::take_scratch(std::size_t size) {
  const std::byte* data = scratch_.data();
  while (size > 0 && !is_lost()) {
    if (in_payload_) {
      const std::size_t part = std::min<std::uint64_t>(missing_, size);
      if (target_ != nullptr) land(data, part);
      missing_ -= part;
      data += part;
      size -= part;
      if (missing_ == 0) end_frame();
      continue;
    }
    const std::size_t part = std::min(sizeof frame_ - frame_have_, size);
    std::memcpy(codec::writable_bytes_of(frame_).data() + frame_have_, data, part);
    frame_have_ += part;
    data += part;
    size -= part;
    if (frame_have_ == sizeof frame_ && !begin_frame()) return false;
  }
  return true;
}

bool TcpData::begin_frame() {
  if (!codec::accepts(frame_)) return false;
  in_payload_ = true;
  missing_ = frame_.length;
  target_ = nullptr;
  if (frame_.length > 0) {
    const auto found = regions_.find(frame_.key);
    if (found != regions_.end()) {
      const std::uint64_t size = found->second.size();
      if (frame_.address > size || frame_.length > size - frame_.address) return false;
      unit_ = sink->allows_write(*this, {frame_.key, frame_.address, frame_.length}, frame_.immediate);
      if (unit_ > kLargestUnit || (unit_ > 1 && frame_.length % unit_ != 0)) return false;
      if (unit_ > 0) target_ = found->second.data() + frame_.address;
    }
    // An unknown key is a region withdrawn while the bytes were on the way. These, and bytes for which nothing was
    // granted to this peer, go nowhere and are counted.
  } else {
    end_frame();
  }
  return true;
}

void TcpData::end_frame() {
  const bool delivered = frame_.length == 0 || target_ != nullptr;
  in_payload_ = false;
  frame_have_ = 0;
  target_ = nullptr;
  ++received;
  if (delivered) {
    sink->on_write(*this, frame_.immediate, frame_.length);
  } else {
    counters_.stale.add();
  }
}

int TcpData::poll() {
  if (is_lost()) give_up_sends();
  const int found = written_.tell(*this);
  tell_loss();
  return found;
}

// Nothing is sent any more, and so no source is read.
void TcpData::give_up_sends() {
  for (; out_count_ > 0; --out_count_, out_head_ = (out_head_ + 1) % kWindow) {
    written_.add(out_[out_head_].token);
  }
}

// The rest of a frame goes nowhere. Returns how much has landed.
std::uint64_t TcpData::cut_frame() {
  if (std::exchange(target_, nullptr) == nullptr) return 0;
  return frame_.length - missing_ - std::exchange(begun_have_, 0);
}

std::uint64_t TcpData::stop_landing(std::uint32_t immediate) {
  return in_payload_ && frame_.immediate == immediate ? cut_frame() : 0;
}

Carried TcpData::take_carried() {
  if (is_lost()) return {};
  const Carried before = std::exchange(carried_, carried_by(socket_.get()));
  return {carried_.bytes - before.bytes, carried_.busy_us - before.busy_us};
}

void TcpData::sever() {
  if (const std::uint64_t landed = cut_frame(); landed > 0) sink->on_cut_off(*this, frame_.immediate, landed);
  if (std::exchange(watched_, false)) loop_.forget(socket_.get());
}

}  // namespace bps::transport::tcp
