// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/tcp_data.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/limits.h"

namespace bps::transport::tcp {
namespace {

// One readiness callback moves at most this much, so that no peer starves the others of the loop.
constexpr std::uint64_t kReceiveBudget = 4 << 20;
constexpr int kMostTurns = 16;  // more than a socket can hold

}  // namespace

TcpData::TcpData(Fd socket, const Hello& made_by, EventLoop& loop, Counters& counters,
                 const TcpTransport::Regions& regions)
    : DataEndpoint(made_by),
      socket_(std::move(socket)),
      loop_(loop),
      counters_(counters),
      incoming_(*this, regions, counters) {
  ::fcntl(socket_.get(), F_SETFL, ::fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
  written_.reserve(OutgoingFrames::kMost);
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
    if (outgoing_.is_full()) break;
    if (!op.fits()) {
      lose(kNoRoom);
      break;
    }
    outgoing_.add(op);
    ++accepted;
    counters_.data_writes.add();
    counters_.data_bytes.add(op.length);
  }
  if (accepted > 0 && !want_write_) transmit();
  return accepted;
}

void TcpData::transmit() {
  while (!outgoing_.is_empty() && !is_lost()) {
    OutgoingFrames::Pieces pieces;
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = outgoing_.next_pieces(pieces);
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (sent < 0 && is_shortage(errno)) {
      loop_.rest(socket_.get());
      break;
    }
    if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) break;  // what came before that is read first: receive()
    if (sent < 0) return lose(std::strerror(errno));
    outgoing_.note_sent(static_cast<std::uint64_t>(sent), written_);
  }
  const bool want = !outgoing_.is_empty();
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
  is_receiving_ = true;
  receive_some();
  is_receiving_ = false;
}

// A peer that goes on sending does not hold the loop up.
void TcpData::take_rest() {
  if (is_receiving_) return;  // a frame is being delivered, by which the peer has turned out to be wrong
  for (int turn = 0; turn < kMostTurns && !is_lost() && readable() > 0; ++turn) receive();
}

void TcpData::receive_some() {
  std::uint64_t budget = kReceiveBudget;
  for (bool first = true; budget > 0 && !is_lost(); first = false) {
    std::uint64_t most = budget;
    if (incoming_.lands_in_units()) {
      most = std::min(most, readable());
      if (most == 0 && !first) return;  // the first read is told of the end of the connection
    }
    const IncomingFrames::Room room = incoming_.room(most);
    const ssize_t got = ::readv(socket_.get(), room.parts.data(), room.count);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got < 0 && is_shortage(errno)) return loop_.rest(socket_.get());
    if (got <= 0) return lose(got == 0 ? "connection closed" : std::strerror(errno));
    const auto bytes = static_cast<std::uint64_t>(got);
    budget -= std::min(budget, bytes);
    if (!incoming_.take(room, bytes)) return lose("it broke the tcp protocol");
    if (bytes < room.total) return;  // drained: spare the call that would say so
  }
}

// Returns how many bytes are here for certain.
std::uint64_t TcpData::readable() const {
  int here = 0;
  return ::ioctl(socket_.get(), FIONREAD, &here) == 0 && here > 0 ? static_cast<std::uint64_t>(here) : 0;
}

int TcpData::poll() {
  if (is_lost()) outgoing_.give_up(written_);
  const int found = written_.tell(*this);
  tell_loss();
  return found;
}

std::uint64_t TcpData::stop_landing(std::uint32_t immediate) {
  return incoming_.is_in_payload() && incoming_.immediate() == immediate ? incoming_.cut() : 0;
}

Carried TcpData::take_carried() {
  if (is_lost()) return {};
  const Carried before = std::exchange(carried_, carried_by(socket_.get()));
  return {carried_.bytes - before.bytes, carried_.busy_us - before.busy_us};
}

void TcpData::sever() {
  if (const std::uint64_t landed = incoming_.cut(); landed > 0) {
    sink->on_cut_off(*this, incoming_.immediate(), landed);
  }
  if (std::exchange(watched_, false)) loop_.forget(socket_.get());
}

}  // namespace bps::transport::tcp
