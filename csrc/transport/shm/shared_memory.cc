// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <map>
#include <mutex>

#include "core/error.h"
#include "core/fork.h"
#include "core/limits.h"

namespace bps::transport::shm {
namespace {

struct Table {
  std::mutex mutex;
  std::map<std::uintptr_t, std::weak_ptr<SharedMemory>> pieces;  // by first byte
};

// A process that maps a file which another one shrinks is killed by SIGBUS at the next access. So the size is final.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// Is called in a child. Its view of each piece becomes a private copy, as of memory that is not shared, and no peer of
// the child maps the file.
void make_private();

Table& table() {
  static Table* table = [] {
    auto* made = new Table;  // never destroyed: arrays may outlive static destruction
    hold_across_fork(made->mutex);
    after_fork_in_child(make_private);
    return made;
  }();
  return *table;
}

void make_private() {
  for (const auto& [address, weak] : table().pieces) {
    const auto piece = weak.lock();
    if (!piece) continue;
    const std::span<std::byte> bytes = piece->bytes();
    void* const copy =
        ::mmap(bytes.data(), bytes.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, piece->fd(), 0);
    // Without a copy, what the child writes would change its parent's memory.
    if (copy == MAP_FAILED) ::mprotect(bytes.data(), bytes.size(), PROT_READ);
  }
}

std::span<std::byte> map_file(int fd, std::size_t size) {
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw_errno("cannot map " + std::to_string(size) + " bytes of shared memory");
  ::madvise(memory, size, MADV_HUGEPAGE);  // only where the system allows it for shared memory
  return {static_cast<std::byte*>(memory), size};
}

}  // namespace

int SharedMemory::why_unavailable() {
  static const int error = [] {
    const Fd file(::memfd_create("bps", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    return !file && (errno == ENOSYS || errno == EPERM || errno == EACCES || errno == EINVAL) ? errno : 0;
  }();
  return error;
}

std::shared_ptr<SharedMemory> SharedMemory::create(std::size_t size) {
  check_memory(size, "cannot create shared memory");
  if (why_unavailable() != 0) {
    void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw_errno("cannot map " + std::to_string(size) + " bytes of memory");
    return std::shared_ptr<SharedMemory>(new SharedMemory(Fd(), {static_cast<std::byte*>(memory), size}));
  }
  Fd file(::memfd_create("bps", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) throw_errno("cannot create shared memory");
  if (::ftruncate(file.get(), static_cast<off_t>(size)) != 0) {
    throw_errno("cannot reserve " + std::to_string(size) + " bytes of shared memory");
  }
  if (::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) throw_errno("cannot seal shared memory");
  const auto bytes = map_file(file.get(), size);
  std::shared_ptr<SharedMemory> piece(new SharedMemory(std::move(file), bytes));
  const std::lock_guard lock(table().mutex);
  table().pieces[reinterpret_cast<std::uintptr_t>(bytes.data())] = piece;
  piece->listed_ = true;
  return piece;
}

std::shared_ptr<SharedMemory> SharedMemory::map(Fd file, std::size_t size) {
  struct stat info{};
  if (::fstat(file.get(), &info) != 0 || static_cast<std::size_t>(info.st_size) < size || size == 0) {
    throw Error(ErrorCode::kTransport, "a peer announced shared memory that is smaller than it says", "");
  }
  const int seals = ::fcntl(file.get(), F_GET_SEALS);  // fails for anything but a memory file
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Error(ErrorCode::kTransport, "a peer announced shared memory that it can shrink", "");
  }
  // The file is closed, because a mapping needs none, and a server maps more arrays than it may have files open.
  return std::shared_ptr<SharedMemory>(new SharedMemory(Fd(), map_file(file.get(), size)));
}

std::shared_ptr<SharedMemory> SharedMemory::find(std::span<const std::byte> bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  std::shared_ptr<SharedMemory> piece;  // before the lock: the last one that has it removes it from the table
  const std::lock_guard lock(table().mutex);
  auto found = table().pieces.upper_bound(begin);
  if (found == table().pieces.begin()) return nullptr;
  --found;
  piece = found->second.lock();
  if (!piece || !piece->shared() || begin + bytes.size() > found->first + piece->bytes_.size()) return nullptr;
  return piece;
}

SharedMemory::~SharedMemory() {
  if (listed_) {
    const std::lock_guard lock(table().mutex);
    table().pieces.erase(reinterpret_cast<std::uintptr_t>(bytes_.data()));
  }
  ::munmap(bytes_.data(), bytes_.size());
}

}  // namespace bps::transport::shm
