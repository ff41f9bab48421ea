// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/shm_transport.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/hmac.h"
#include "core/limits.h"
#include "core/log.h"
#include "transport/listener.h"
#include "transport/shm/local_socket.h"
#include "transport/shm/shm_data.h"

namespace bps::transport::shm {

ShmTransport::ShmTransport(EventLoop& loop, const Credentials& credentials, Counters& counters,
                           const ShmOptions& options)
    : loop_(loop), credentials_(credentials), counters_(counters), options_(options) {}

ShmTransport::~ShmTransport() {
  *alive_ = false;
}

RegionPtr ShmTransport::register_memory(std::span<std::byte> bytes) {
  const std::uint64_t key = next_key_++;
  return std::make_shared<ShmRegion>(bytes, key, SharedMemory::find(bytes), [this, key, alive = alive_] {
    if (*alive) withdraw(key);
  });
}

void ShmTransport::withdraw(std::uint64_t key) {
  for (const auto& data : datas_) data->withdraw(key);
}

Fd ShmTransport::open_socket(const ConnectRequest& request, Plane plane) const {
  const auto connect = [&] { return connect_local(std::string(as_text(request.address)), request.deadline); };
  return connect_and_shake(connect, request.hello_for(plane), credentials_, request.deadline, request.whom).socket;
}

std::unique_ptr<ControlEndpoint> ShmTransport::connect_control(const ConnectRequest& request) {
  return std::make_unique<SocketControl>(open_socket(request, Plane::kControl), std::nullopt,
                                         request.hello_for(Plane::kControl), counters_);
}

std::unique_ptr<DataEndpoint> ShmTransport::connect_data(const ConnectRequest& request) {
  auto data = std::make_unique<ShmData>(open_socket(request, Plane::kData), request.hello_for(Plane::kData), loop_,
                                        counters_, options_);
  data->connect(request.deadline, request.whom);
  return data;
}

ControlEndpoint* ShmTransport::attach(std::unique_ptr<ControlEndpoint> endpoint, ControlSink& sink) {
  endpoint->sink = &sink;
  controls_.emplace_back(static_cast<SocketControl*>(endpoint.release()));
  controls_.back()->start(loop_);
  return controls_.back().get();
}

DataEndpoint* ShmTransport::attach(std::unique_ptr<DataEndpoint> endpoint, DataSink& sink) {
  endpoint->sink = &sink;
  datas_.emplace_back(static_cast<ShmData*>(endpoint.release()));
  datas_.back()->start();
  return datas_.back().get();
}

ControlEndpoint* ShmTransport::accept_control(std::unique_ptr<IncomingConnection> incoming, ControlSink& sink) {
  Fd socket = std::move(static_cast<IncomingSocket&>(*incoming).socket);
  return attach(std::make_unique<SocketControl>(std::move(socket), std::nullopt, incoming->hello, counters_), sink);
}

DataEndpoint* ShmTransport::accept_data(std::unique_ptr<IncomingConnection> incoming, DataSink& sink) {
  Fd socket = std::move(static_cast<IncomingSocket&>(*incoming).socket);
  return attach(std::make_unique<ShmData>(std::move(socket), incoming->hello, loop_, counters_, options_), sink);
}

void ShmTransport::close(Endpoint* endpoint) {
  std::erase_if(controls_, [&](const auto& owned) { return owned.get() == endpoint; });
  std::erase_if(datas_, [&](const auto& owned) { return owned.get() == endpoint; });
}

int ShmTransport::poll() {
  int found = 0;
  for (std::size_t i = 0; i < datas_.size(); ++i) found += datas_[i]->poll();
  return found;
}

bool ShmTransport::arm() {
  for (const auto& data : datas_) {
    if (!data->arm()) {
      disarm();
      return false;
    }
  }
  return true;
}

void ShmTransport::disarm() {
  for (const auto& data : datas_) data->disarm();
}

// ---- Set-up of a data endpoint

namespace {

bool is_out_of_files() {
  return !Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC)) && (errno == EMFILE || errno == ENFILE);
}

}  // namespace

ShmData::ShmData(Fd socket, const Hello& made_by, EventLoop& loop, Counters& counters, const ShmOptions& options)
    : DataEndpoint(made_by, this),
      socket_(std::move(socket)),
      loop_(loop),
      counters_(counters),
      options_(options),
      process_(socket_.get()),
      announcements_(socket_.get(), process_.number()) {
  ::fcntl(socket_.get(), F_SETFL, ::fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
  random_bytes(probe_);
}

ShmData::~ShmData() {
  if (watched_) loop_.forget(socket_.get());
}

// `doorbell` is the peer's.
void ShmData::set_rings(std::shared_ptr<SharedMemory> rings, bool caller, Fd doorbell) {
  rings_ = std::move(rings);
  auto* const first = reinterpret_cast<PostingRing*>(rings_->bytes().data());
  out_.emplace(first + (caller ? 0 : 1), std::move(doorbell));
  in_.emplace(first + (caller ? 1 : 0));
}

ShmRecord ShmData::probe_record(ShmRecord::Kind kind) const {
  ShmRecord record{};
  record.kind = kind;
  record.base = reinterpret_cast<std::uint64_t>(probe_.data());
  record.probe = probe_;
  record.size = 2 * sizeof(PostingRing);
  return record;
}

void ShmData::connect(const Deadline& deadline, const std::string& whom) {
  auto rings = SharedMemory::create(2 * sizeof(PostingRing));
  const ShmRecord setup = probe_record(ShmRecord::kSetup);
  const int fds[] = {rings->fd(), loop_.doorbell()};
  std::optional<ShmRecord> reply;
  if (send_record(socket_.get(), codec::encode(setup), fds, deadline) == Status::kOk &&
      records_.receive(socket_.get(), deadline) == Status::kOk) {
    reply = codec::decode<ShmRecord>(records_.record());
  }
  std::vector<Fd>& descriptors = records_.fds();
  if (!reply || reply->kind != ShmRecord::kReply || descriptors.size() != 1) {
    throw Error(ErrorCode::kUnreachable, whom + " did not complete the shared-memory set-up",
                "check that it is still running, or set BPS_TRANSPORT=tcp");
  }
  set_rings(std::move(rings), true, std::move(descriptors[0]));
  peer_reaches_plain_ = reply->reaches_plain != 0;
}

void ShmData::start() {
  watched_ = true;
  loop_.watch(socket_.get(), EPOLLIN, [this](std::uint32_t) { on_socket(); });
}

// The socket is watched by its level, so the rest of a peer that sends without end comes with the loop's next turn.
void ShmData::on_socket() {
  TurnBudget budget;
  while (take_record() && budget.spend(codec::kSize<ShmRecord>)) continue;
  tell_loss();
}

// Takes the next record. Returns false when there is none, or the connection is lost.
bool ShmData::take_record() {
  if (is_lost()) return false;
  const Status status = records_.receive(socket_.get());
  if (status == Status::kAgain) {
    if (is_shortage(errno)) loop_.rest(socket_.get());
    return false;
  }
  if (status != Status::kOk) {
    lose("connection closed");
    return false;
  }
  const auto record = codec::decode<ShmRecord>(records_.record());
  if (record && record->kind == ShmRecord::kRefused) {
    lose("it cannot map our memory: " + std::string(std::strerror(static_cast<int>(record->base))) +
         ": its limit on open files is " + std::to_string(record->size) +
         "; raise it there: `ulimit -n 65536`, or `docker run --ulimit nofile=65536`");
  } else if (!record || !take_record(*record, records_.fds())) {
    lose("it broke the shared-memory protocol");
  }
  return !is_lost();
}

bool ShmData::take_record(const ShmRecord& record, std::vector<Fd>& fds) try {
  switch (record.kind) {
    case ShmRecord::kSetup: {
      if (rings_ || fds.size() != 2 || record.size != 2 * sizeof(PostingRing)) return false;
      set_rings(SharedMemory::map(std::move(fds[0]), record.size), false, std::move(fds[1]));
      ShmRecord reply = probe_record(ShmRecord::kReply);
      // The kernel's rule for one user's processes is symmetric.
      peer_reaches_plain_ = options_.cross_memory && process_.has_at(record.base, record.probe);
      reply.reaches_plain = peer_reaches_plain_ ? 1 : 0;
      const int doorbell = loop_.doorbell();
      if (send_record(socket_.get(), codec::encode(reply), {&doorbell, 1}) == Status::kOk) return true;
      lose(why_lost(errno));  // also for a shortage: nobody would send it later
      return true;
    }
    case ShmRecord::kMapped: {
      if (memory_.is_full()) return false;
      if (fds.empty() && is_out_of_files()) return refuse(record.key);
      if (fds.size() != 1) return false;
      auto piece = SharedMemory::map(std::move(fds[0]), record.file_size);
      std::byte* mapped = piece->bytes().data() + record.base;
      memory_.add(record.key, {std::move(piece), mapped, 0, record.size});
      return true;
    }
    case ShmRecord::kPlain:
      if (memory_.is_full()) return false;
      memory_.add(record.key, {nullptr, nullptr, record.base, record.size});
      return true;
    case ShmRecord::kWithdrawn: memory_.retire(record.key); return true;
    case ShmRecord::kReply:
    case ShmRecord::kRefused: break;
  }
  return false;
} catch (const Error&) {
  return false;
}

// Tells the peer that the kernel has dropped the file of a region, because this process may not open more. The peer
// says so to its caller, and gives this connection up.
bool ShmData::refuse(std::uint64_t key) {
  const auto limit = limit_behind(EMFILE);
  log_warning("cannot map the memory of a peer: " + limit->what + "; " + limit->hint);
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  ShmRecord refusal{};
  refusal.kind = ShmRecord::kRefused;
  refusal.key = key;
  refusal.base = EMFILE;
  refusal.size = files.rlim_cur;
  return send_record(socket_.get(), codec::encode(refusal), {}) == Status::kOk;
}

// Shows the peer that we write no more, as it may wait for word from us, or be about to fence us. Only our own
// direction is shut down: the other one shows us the same of the peer.
void ShmData::sever() {
  if (std::exchange(watched_, false)) loop_.forget(socket_.get());
  ::shutdown(socket_.get(), SHUT_WR);
}

bool ShmData::is_fenced() {
  return process_.is_this() || is_closed(socket_.get()) || process_.has_ended();
}

void ShmData::take_rest() {
  RingEntry entry;
  bool broken = false;
  while (in_ && in_->take(entry, broken)) {
    if (entry.kind == EntryKind::kWrite) sink->on_write(*this, entry.immediate, entry.span.length);
  }
}

std::shared_ptr<SharedMemory> ShmData::hold(const RemoteSpan& span) {
  const PeerMemory::Region* region = find(span);
  const bool is_whole = region != nullptr && region->piece && span.address == 0 &&
                        region->mapped == region->piece->bytes().data() && span.length <= region->size;
  return is_whole ? region->piece : nullptr;
}

void ShmData::fence() {
  if (is_fenced() || !may_end()) return;
  log_warning("ends process " + std::to_string(process_.number()) +
              ", which is lost to the job but could still write to the memory of this process");
  process_.end();
}

void ShmData::on_loss_noted() {
  loop_.wake();  // the loss is told from poll() at the latest
}

}  // namespace bps::transport::shm
