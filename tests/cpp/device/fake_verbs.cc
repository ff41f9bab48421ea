// SPDX-License-Identifier: Apache-2.0
// The real library of verbs, but for ibv_reg_dmabuf_mr(): it takes memory of the fake driver (fake_cuda.cc), which is a
// file in memory that the process sees where no processor may touch it. Loaded in the place of libibverbs, with which
// it is linked, so that all other functions are that one's.
//
// The device of the kernel in the VM (rxe) gets the file's pages by a mapping that lasts for the call only, under the
// addresses at which the process sees them. So a processor that touches the tensor faults, and the device does not.
#include <infiniband/verbs.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

std::atomic<int> registered{0};

ibv_mr* refuse(const char* why) {
  (void)std::fprintf(stderr, "fake verbs: %s\n", why);
  errno = EINVAL;
  return nullptr;
}

// Says whether the process sees the file there from `offset` on, where no processor may touch it.
bool is_shown(std::uint64_t address, std::size_t length, const struct stat& file, std::uint64_t offset) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return false;
  bool found = false;
  char line[512];
  while (!found && std::fgets(line, sizeof line, maps) != nullptr) {
    std::uint64_t begin = 0, end = 0, from = 0, inode = 0;
    char rights[5] = "";
    const int read =
        std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %*s %" SCNu64, &begin, &end, rights, &from, &inode);
    found = read == 5 && begin <= address && address + length <= end && from + (address - begin) == offset &&
            inode == file.st_ino && std::strncmp(rights, "---", 3) == 0;
  }
  (void)std::fclose(maps);
  return found;
}

}  // namespace

extern "C" {

ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova, int fd,
                          int access) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  struct stat file{};
  if (::fstat(fd, &file) != 0) return refuse("there is no such descriptor");
  if (length == 0 || offset % page != 0 || length % page != 0) return refuse("these are not whole pages");
  if (iova % page != offset % page) return refuse("the address does not fit to the offset");
  if (offset + length > static_cast<std::uint64_t>(file.st_size)) return refuse("this is more than there is");
  if (!is_shown(iova, length, file, offset)) return refuse("this is not the device's memory at that address");
  if (access != (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)) return refuse("these are other rights");
  void* readable = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (readable == MAP_FAILED) return refuse("the file cannot be mapped");
  ibv_mr* made = ibv_reg_mr_iova2(pd, readable, length, iova, static_cast<unsigned>(access));
  const int error = errno;
  ::munmap(readable, length);  // the kernel has the pages
  errno = error;
  if (made != nullptr) ++registered;
  return made;
}

// Counts registrations by dma-buf, for tests.
int fake_registered(void) {
  return registered;
}

}  // extern "C"
