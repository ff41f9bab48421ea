// SPDX-License-Identifier: Apache-2.0
#include "transport/message_stream.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/limits.h"
#include "transport/listener.h"

namespace bps::transport {
namespace {

// At most this many bytes wait for a peer that does not read. That is far more than anybody says to a peer that stops
// for a while.
constexpr std::size_t kMostBacklog = 64U << 20;
constexpr std::size_t kCopied = 4096;  // shared messages up to this size are copied

}  // namespace

MessageStream::MessageStream(Fd socket, std::optional<MessageKeys> keys, std::size_t largest_message)
    : socket_(std::move(socket)), keys_(keys), largest_(largest_message), in_(4096) {
  ::fcntl(socket_.get(), F_SETFL, ::fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
}

MessageStream::~MessageStream() {
  close();
}

void MessageStream::start(EventLoop& loop, Events events) {
  loop_ = &loop;
  events_ = std::move(events);
  loop.watch(socket_.get(), EPOLLIN, [this](std::uint32_t ready) { on_ready(ready); });
}

void MessageStream::close() {
  if (loop_ != nullptr && socket_) loop_->forget(socket_.get());
  socket_.reset();
}

void MessageStream::fail(const std::string& why) {
  if (!socket_) return;
  close();
  if (events_.on_closed) {
    const auto tell = events_.on_closed;  // the callback may destroy this object
    tell(why);
  }
}

Status MessageStream::check(std::size_t size) {
  if (!socket_) return Status::kPeerLost;
  if (size > largest_) return Status::kProtocol;
  if (out_.size() <= std::max(kMostBacklog, 8 * largest_)) return Status::kOk;
  does_not_read_ = true;
  ::shutdown(socket_.get(), SHUT_RDWR);  // the loop sees that as the end of the stream
  return Status::kPeerLost;
}

// A failure shows up as an event of the loop as well, so that on_closed never runs inside send().
Status MessageStream::send(std::span<const std::byte> message) {
  if (const Status status = check(message.size()); status != Status::kOk) return status;
  const auto length = static_cast<std::uint32_t>(message.size());
  out_.add(std::as_bytes(std::span(&length, 1)));
  out_.add(message);
  if (keys_) out_.add(keys_->sent.sign(out_.last(sizeof length + message.size())));
  transmit();
  return Status::kOk;
}

Status MessageStream::send(const std::shared_ptr<const SharedMessage>& message) {
  if (const Status status = check(message->size()); status != Status::kOk) return status;
  if (message->size() <= kCopied) {  // it then goes out with its code by one call
    out_.add(message->length_and_bytes());
  } else {
    out_.add(message);
  }
  if (keys_) out_.add(message->sign(keys_->sent));
  transmit();
  return Status::kOk;
}

void MessageStream::transmit() {
  while (!out_.is_empty()) {
    const auto next = out_.next();
    const auto sent = ::send(socket_.get(), next.data(), next.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      out_.note_sent(static_cast<std::size_t>(sent));
      continue;
    }
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && is_shortage(errno) && loop_ != nullptr) loop_->rest(socket_.get());
    break;
  }
  const bool want = !out_.is_empty();
  if (want != want_write_ && loop_ != nullptr) {
    want_write_ = want;
    loop_->change(socket_.get(), want ? EPOLLIN | EPOLLOUT : EPOLLIN);
  }
}

bool MessageStream::is_flushed() const {
  return out_.is_empty() && !has_unacknowledged(socket_.get());
}

void MessageStream::on_ready(std::uint32_t events) {
  if ((events & EPOLLOUT) != 0) transmit();
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) receive();
}

bool MessageStream::is_authentic(std::span<const std::byte> length_and_bytes, std::span<const std::byte> mac) {
  if (!keys_) return true;
  was_forged_ = !equal_constant_time(keys_->received.sign(length_and_bytes), mac);
  return !was_forged_;
}

void MessageStream::receive() {
  if (is_deferred_) return;
  TurnBudget budget;
  while (take_messages(budget)) {
    if (in_size_ == in_.size()) in_.resize(in_.size() * 2);  // bounded: a message beyond largest_ is refused
    const auto got = ::recv(socket_.get(), in_.data() + in_size_, in_.size() - in_size_, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && is_shortage(errno)) return loop_->rest(socket_.get());
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0 && does_not_read_) return fail("it does not read what it is sent");
    if (got <= 0) return fail(got == 0 ? "connection closed" : std::strerror(errno));
    in_size_ += static_cast<std::size_t>(got);
  }
}

// Takes the messages that are here whole. Returns true when it is to look for more: not once the stream is closed, or
// the budget of its peer is used up, which has its next turn when the others have had theirs.
bool MessageStream::take_messages(TurnBudget& budget) {
  std::size_t begin = 0;
  bool goes_on = true;
  while (goes_on && in_size_ - begin >= sizeof(std::uint32_t)) {
    std::uint32_t length = 0;
    std::memcpy(&length, in_.data() + begin, sizeof length);
    if (length > largest_) {
      fail("a message of " + std::to_string(length) + " bytes is beyond the limit");
      return false;
    }
    const std::size_t size = sizeof length + length;
    if (in_size_ - begin < size + mac_size()) break;
    const std::span<const std::byte> signed_bytes(in_.data() + begin, size);
    if (!is_authentic(signed_bytes, {in_.data() + begin + size, mac_size()})) {
      fail("a message failed its authentication: it was changed or inserted on the way");
      return false;
    }
    events_.on_message(signed_bytes.subspan(sizeof length));
    if (!socket_) return false;  // the callback closed us
    begin += size + mac_size();
    goes_on = budget.spend(size);
  }
  std::memmove(in_.data(), in_.data() + begin, in_size_ - begin);
  in_size_ -= begin;
  if (!goes_on) defer();
  return goes_on;
}

// Receives again in the next turn, because the socket may be empty by then, and announces nothing.
void MessageStream::defer() {
  is_deferred_ = true;
  loop_->post([this, alive = std::weak_ptr(alive_)] {
    if (alive.expired()) return;
    is_deferred_ = false;
    if (socket_) receive();
  });
}

}  // namespace bps::transport
