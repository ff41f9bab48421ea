// SPDX-License-Identifier: Apache-2.0
// The size of shared memory is final, on both sides.
#include "transport/shm/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <thread>

#include "core/error.h"

namespace bps::transport::shm {
namespace {

constexpr std::size_t kSize = 1 << 16;

Fd duplicate(int fd) {
  return Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
}

Fd unsealed() {
  Fd file(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(file.get(), kSize), 0);
  return file;
}

TEST(SharedMemory, NobodyCanChangeItsSize) {
  const auto piece = SharedMemory::create(kSize);
  const Fd peers = duplicate(piece->fd());
  EXPECT_EQ(::ftruncate(peers.get(), 0), -1);
  EXPECT_EQ(::ftruncate(peers.get(), 2 * kSize), -1);
  EXPECT_EQ(::fcntl(peers.get(), F_ADD_SEALS, F_SEAL_WRITE), -1);
}

TEST(SharedMemory, IsTheSameMemoryWhereItIsMapped) {
  const auto piece = SharedMemory::create(kSize);
  const auto mapped = SharedMemory::map(duplicate(piece->fd()), kSize);
  mapped->bytes()[kSize - 1] = std::byte{7};
  EXPECT_EQ(piece->bytes()[kSize - 1], std::byte{7});
}

TEST(SharedMemory, MappingTakesNoFile) {
  const auto piece = SharedMemory::create(kSize);
  Fd file = duplicate(piece->fd());
  const int number = file.get();
  const auto mapped = SharedMemory::map(std::move(file), kSize);
  EXPECT_EQ(::fcntl(number, F_GETFD), -1) << "the file is closed";
}

// Who looks for a piece may be the last one that has it.
TEST(SharedMemory, APieceMayEndWhileItIsLookedFor) {
  std::atomic<const std::byte*> address{nullptr};
  std::atomic<bool> over{false};
  std::thread looks([&] {
    while (!over) {
      // It has more bytes than the piece, so that the piece is let go of at once.
      const std::byte* const first = address;
      if (first != nullptr) (void)SharedMemory::find({first, 1 << 20});
    }
  });
  for (int i = 0; i < 20'000; ++i) {
    const auto piece = SharedMemory::create(4096);
    address = piece->bytes().data();
  }
  over = true;
  looks.join();
}

TEST(SharedMemory, AFileThatCouldShrinkIsRefused) {
  EXPECT_THROW(SharedMemory::map(unsealed(), kSize), Error);
  Fd grows = unsealed();
  ASSERT_EQ(::fcntl(grows.get(), F_ADD_SEALS, F_SEAL_GROW), 0);
  EXPECT_THROW(SharedMemory::map(std::move(grows), kSize), Error);
}

TEST(SharedMemory, AFileThatIsNoMemoryIsRefused) {
  EXPECT_THROW(SharedMemory::map(Fd(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC)), 1), Error);
}

TEST(SharedMemory, AFileThatIsSmallerThanAnnouncedIsRefused) {
  const auto piece = SharedMemory::create(kSize);
  EXPECT_THROW(SharedMemory::map(duplicate(piece->fd()), kSize + 1), Error);
}

}  // namespace
}  // namespace bps::transport::shm
