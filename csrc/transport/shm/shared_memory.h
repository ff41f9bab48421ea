// SPDX-License-Identifier: Apache-2.0
// Makes memory that other processes of the host can map, which bps_rdma.empty() returns.
//
// Each piece is an anonymous memory file. No piece has a name, so none can be left behind. Its size is sealed, so that
// no process can make the memory of another one vanish. The process that made a piece keeps the file open, to announce
// it to peers, and lists its pieces, so that a transport can find the file behind a pointer. The others keep only the
// mapping. Its functions may be called from any thread, and belong to set-up.
//
// A process that is forked inherits the pieces as copies, like all memory: what it writes stays in its own. In the
// child they are plain memory. (Pages that it has not written itself show what the parent writes; the kernel has no
// copy of shared memory that is both lazy and exact.)
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include "core/fd.h"
#include "core/fork.h"

namespace bps::transport::shm {

class SharedMemory {
 public:
  // Returns 0, or the errno of memfd_create on a system without it: then no process shares memory with this one.
  static int why_unavailable();
  // Returns zeroed pages, readable and writable; ordinary memory where none can be shared. Throws kTransport when
  // memory, files or address space are short.
  static std::shared_ptr<SharedMemory> create(std::size_t size);
  // Maps a file that a peer sent, and closes it. `size` is what the peer claims. Throws when the file is smaller, or
  // could become so.
  static std::shared_ptr<SharedMemory> map(Fd file, std::size_t size);
  // Returns the piece that contains all of `bytes`, or null.
  static std::shared_ptr<SharedMemory> find(std::span<const std::byte> bytes);

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  int fd() const { return file_.get(); }                  // the file of a piece that was created here
  bool shared() const { return forks_ == fork_count(); }  // false in a child of the process that made it

 private:
  SharedMemory(Fd file, std::span<std::byte> bytes) : file_(std::move(file)), bytes_(bytes) {}

  Fd file_;
  std::span<std::byte> bytes_;
  bool listed_ = false;
  const std::uint32_t forks_ = fork_count();
};

}  // namespace bps::transport::shm
