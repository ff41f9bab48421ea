// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/announcements.h"

#include <cerrno>
#include <cstring>
#include <string>

#include "core/limits.h"
#include "core/log.h"
#include "transport/shm/local_socket.h"

namespace bps::transport::shm {

Status Announcements::send(const Region& region) {
  const auto& shm = static_cast<const ShmRegion&>(region);
  ShmRecord record{};
  record.key = region.key();
  record.size = region.bytes().size();
  Status status;
  if (shm.piece) {
    record.kind = ShmRecord::kMapped;
    record.base = static_cast<std::uint64_t>(region.bytes().data() - shm.piece->bytes().data());
    record.file_size = shm.piece->bytes().size();
    const int fd = shm.piece->fd();
    status = send_record(socket_, codec::encode(record), {&fd, 1});
  } else {
    record.kind = ShmRecord::kPlain;
    record.base = reinterpret_cast<std::uint64_t>(region.bytes().data());
    status = send_record(socket_, codec::encode(record), {});
  }
  if (status == Status::kOk) known_.insert(region.key());
  if (status == Status::kAgain && is_shortage(errno)) note_shortage(errno);
  return status;
}

// Warns of a shortage. The loop looks again every millisecond, for as long as the operation may take.
void Announcements::note_shortage(int error) {
  if (std::exchange(said_short_, true)) return;
  const auto limit = limit_behind(error);
  log_warning("process " + std::to_string(peer_) + " cannot be sent memory at the moment (" + std::strerror(error) +
              "), and what needs that waits" +
              (limit ? ": " + limit->what +
                           ", and as many are on their way to processes that have not taken them yet; " + limit->hint
                     : ""));
}

Status Announcements::withdraw(std::uint64_t key) {
  if (known_.erase(key) == 0) return Status::kOk;
  ShmRecord record{};
  record.kind = ShmRecord::kWithdrawn;
  record.key = key;
  return send_record(socket_, codec::encode(record), {});
}

}  // namespace bps::transport::shm
