// SPDX-License-Identifier: Apache-2.0
// See fake_cuda.h. This is a shared library, loaded in the place of CUDA's driver.
#include "device/fake_cuda.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/cuda.h"

using namespace bps::device::cuda;  // NOLINT: the driver's own words

namespace bps::device::cuda {

struct OpaqueContext {};
struct OpaqueEvent {
  std::mutex mutex;
  std::shared_ptr<std::atomic<bool>> happened;  // its last record; one that was never recorded has happened
};

}  // namespace bps::device::cuda

namespace {

constexpr Result kInvalidValue = 1;
constexpr Result kInvalidContext = 201;
constexpr Result kIllegalAddress = 700;
constexpr Result kAlreadyRegistered = 712;
constexpr Result kNotPermitted = 800;
constexpr Result kCaptureUnsupported = 900;

struct Allocation {
  std::byte* lies;
  std::size_t size;
  int file;
  unsigned long long number;  // no other one has it
};

std::mutex mutex;                                  // guards the next four, and `refused`
std::map<std::uintptr_t, Allocation> allocations;  // by address of the device
unsigned long long last_number = 0;
std::map<std::uintptr_t, std::size_t> pinned;
std::set<Stream> streams;
std::atomic<unsigned> most_delay{0};
std::atomic<bool> broken{false};
std::atomic<bool> owns_everything{false};
std::atomic<bool> hanging{false};
std::atomic<bool> captured_elsewhere{false};
std::string refused;  // the function; the next two say which call, and how
int refused_after = 0;
Result refused_with = kSuccess;
std::atomic<int> events{0};
std::atomic<int> flushes{0};
OpaqueContext only_context;
thread_local std::vector<Context> contexts;
thread_local bool in_host_function = false;
thread_local int capture_mode = 0;

std::byte* find(std::uintptr_t at, std::size_t size) {
  const std::lock_guard lock(mutex);
  auto* const elsewhere = owns_everything ? reinterpret_cast<std::byte*>(at) : nullptr;
  auto next = allocations.upper_bound(at);
  if (next == allocations.begin()) return elsewhere;
  const auto& [begin, block] = *std::prev(next);
  return at + size <= begin + block.size ? block.lies + (at - begin) : elsewhere;
}

// Returns the allocation that has this byte, and its address; the caller holds the mutex.
const std::pair<const std::uintptr_t, Allocation>* allocation_at(std::uintptr_t at) {
  auto next = allocations.upper_bound(at);
  if (next == allocations.begin()) return nullptr;
  --next;
  return at < next->first + next->second.size ? &*next : nullptr;
}

bool is_pinned(const void* memory, std::size_t size) {
  const auto at = reinterpret_cast<std::uintptr_t>(memory);
  const std::lock_guard lock(mutex);
  auto next = pinned.upper_bound(at);
  return next != pinned.begin() && at + size <= std::prev(next)->first + std::prev(next)->second;
}

// What every call but those that look at a device begins with.
Result usable(const char* function = __builtin_FUNCTION()) {
  if (in_host_function) return kNotPermitted;
  if (contexts.empty()) return kInvalidContext;
  if (captured_elsewhere && capture_mode != kCaptureRelaxed) return kCaptureUnsupported;
  const std::lock_guard lock(mutex);
  if (refused == function && refused_after-- == 0) {
    refused.clear();
    return refused_with;
  }
  return broken ? kIllegalAddress : kSuccess;
}

}  // namespace

struct bps::device::cuda::OpaqueStream {
  OpaqueStream() : thread([this] { run(); }) {}
  ~OpaqueStream() {
    {
      const std::lock_guard lock(own);
      ends = true;
    }
    changed.notify_all();
    thread.join();
  }
  void put(std::function<void()> work) {
    {
      const std::lock_guard lock(own);
      queue.push_back(std::move(work));
    }
    changed.notify_all();
  }
  bool is_idle() {
    const std::lock_guard lock(own);
    return queue.empty();
  }
  void run() {
    std::minstd_rand random(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(this)));
    std::unique_lock lock(own);
    for (;;) {
      changed.wait(lock, [this] { return ends || !queue.empty(); });
      if (queue.empty()) return;
      const auto work = queue.front();
      lock.unlock();
      if (const unsigned most = most_delay; most > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
      }
      while (hanging && !broken) std::this_thread::sleep_for(std::chrono::microseconds(100));
      if (!broken) work();
      lock.lock();
      queue.pop_front();  // it counts until it has ended
    }
  }

  std::mutex own;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool ends = false;
  bool captures = false;
  std::thread thread;
};

namespace {

std::mutex default_mutex;
Stream by_default = nullptr;  // guarded by default_mutex

// Numbers 1 and 2 are the default streams. Here they are one, which does not wait for others.
Stream of(Stream stream) {
  if (reinterpret_cast<std::uintptr_t>(stream) > 2) return stream;
  const std::lock_guard lock(default_mutex);
  if (by_default == nullptr) by_default = new OpaqueStream;
  return by_default;
}

void wait_until(const std::function<bool()>& happened) {
  while (!happened() && !broken) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

}  // namespace

extern "C" {

Result cuInit(unsigned) {
  const char* const result = std::getenv("FAKE_CUDA_INIT");
  return result != nullptr ? std::atoi(result) : kSuccess;
}
Result cuGetErrorString(Result error, const char** text) {
  *text = error == kIllegalAddress ? "an illegal memory access was encountered" : "an error of the fake";
  return kSuccess;
}
Result cuDevicePrimaryCtxRetain(Context* context, Ordinal device) {
  *context = &only_context;
  return device == 0 ? kSuccess : kInvalidValue;
}
Result cuCtxPushCurrent_v2(Context context) {
  if (in_host_function) return kNotPermitted;
  contexts.push_back(context);
  return kSuccess;
}
Result cuCtxPopCurrent_v2(Context* context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}
Result cuPointerGetAttribute(void* value, int attribute, Address pointer) {
  if (find(pointer, 0) == nullptr) return kInvalidValue;
  if (attribute == kPointerMemoryType) *static_cast<unsigned*>(value) = kMemoryOfDevice;
  if (attribute == kPointerOrdinal) *static_cast<Ordinal*>(value) = 0;
  if (attribute == kPointerBuffer) {
    const std::lock_guard lock(mutex);
    const auto* const found = allocation_at(pointer);
    *static_cast<unsigned long long*>(value) = found == nullptr ? 0 : found->second.number;
  }
  return kSuccess;
}
Result cuMemGetAddressRange_v2(Address* begin, std::size_t* size, Address pointer) {
  if (const Result result = usable(); result != kSuccess) return result;
  const std::lock_guard lock(mutex);
  const auto* const found = allocation_at(pointer);
  if (found == nullptr) return kInvalidValue;
  *begin = found->first;
  *size = found->second.size;
  return kSuccess;
}
// Refuses what is not whole pages of one allocation.
Result cuMemGetHandleForAddressRange(void* handle, Address begin, std::size_t size, int kind,
                                     unsigned long long flags) {
  if (const Result result = usable(); result != kSuccess) return result;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::lock_guard lock(mutex);
  const auto* const found = allocation_at(begin);
  if (found == nullptr || found->first != begin || begin % page != 0 || size % page != 0 || kind != kDmaBuf ||
      flags != 0 || size != (found->second.size + page - 1) / page * page) {
    return kInvalidValue;
  }
  *static_cast<int*>(handle) = ::dup(found->second.file);
  return kSuccess;
}
Result cuFlushGPUDirectRDMAWrites(int target, int scope) {
  if (const Result result = usable(); result != kSuccess) return result;
  if (target != kFlushCurrent || scope != kOrderedForAll) return kInvalidValue;
  ++flushes;
  return kSuccess;
}
Result cuStreamCreateWithPriority(Stream* stream, unsigned flags, int) {
  if (const Result result = usable(); result != kSuccess) return result;
  if (flags != kStreamNonBlocking) return kInvalidValue;
  *stream = new OpaqueStream;
  const std::lock_guard lock(mutex);
  streams.insert(*stream);
  return kSuccess;
}
Result cuStreamDestroy_v2(Stream stream) {
  if (const Result result = usable(); result != kSuccess) return result;
  {
    const std::lock_guard lock(mutex);
    streams.erase(stream);
  }
  delete stream;
  return kSuccess;
}
Result cuStreamQuery(Stream stream) {
  if (const Result result = usable(); result != kSuccess) return result;
  return stream->is_idle() ? kSuccess : kNotReady;
}
Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  if (const Result result = usable(); result != kSuccess) return result;
  const std::lock_guard lock(event->mutex);
  if (event->happened == nullptr) return kSuccess;
  of(stream)->put([happened = event->happened] { wait_until([&] { return happened->load(); }); });
  return kSuccess;
}
Result cuStreamIsCapturing(Stream stream, int* status) {
  if (const Result result = usable(); result != kSuccess) return result;
  *status = of(stream)->captures ? 1 : kCaptureNone;
  return kSuccess;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(capture_mode, *mode);
  return kSuccess;
}
Result cuStreamWriteValue32_v2(Stream stream, Address at, std::uint32_t value, unsigned) {
  if (const Result result = usable(); result != kSuccess) return result;
  auto* flag = reinterpret_cast<std::uint32_t*>(at);
  if (!is_pinned(flag, sizeof value)) return kInvalidValue;
  stream->put([flag, value] { __atomic_store_n(flag, value, __ATOMIC_RELEASE); });
  return kSuccess;
}
Result cuLaunchHostFunc(Stream stream, HostFunction function, void* argument) {
  if (const Result result = usable(); result != kSuccess) return result;
  stream->put([function, argument] {
    in_host_function = true;
    function(argument);
    in_host_function = false;
  });
  return kSuccess;
}
Result cuEventCreate(Event* event, unsigned) {
  if (const Result result = usable(); result != kSuccess) return result;
  *event = new OpaqueEvent;
  ++events;
  return kSuccess;
}
Result cuEventRecord(Event event, Stream stream) {
  if (const Result result = usable(); result != kSuccess) return result;
  const std::lock_guard lock(event->mutex);
  event->happened = std::make_shared<std::atomic<bool>>(false);
  of(stream)->put([happened = event->happened] { happened->store(true); });
  return kSuccess;
}
Result cuMemHostAlloc(void** memory, std::size_t size, unsigned) {
  if (const Result result = usable(); result != kSuccess) return result;
  *memory = new std::byte[size];
  const std::lock_guard lock(mutex);
  pinned[reinterpret_cast<std::uintptr_t>(*memory)] = size;
  return kSuccess;
}
Result cuMemFreeHost(void* memory) {
  if (const Result result = usable(); result != kSuccess) return result;
  {
    const std::lock_guard lock(mutex);
    pinned.erase(reinterpret_cast<std::uintptr_t>(memory));
  }
  delete[] static_cast<std::byte*>(memory);
  return kSuccess;
}
Result cuMemHostGetDevicePointer_v2(Address* at, void* memory, unsigned) {
  *at = reinterpret_cast<Address>(memory);
  return usable();
}
Result cuMemHostRegister_v2(void* memory, std::size_t size, unsigned) {
  if (const Result result = usable(); result != kSuccess) return result;
  if (is_pinned(memory, size)) return kAlreadyRegistered;
  const std::lock_guard lock(mutex);
  pinned[reinterpret_cast<std::uintptr_t>(memory)] = size;
  return kSuccess;
}
Result cuMemHostUnregister(void* memory) {
  if (const Result result = usable(); result != kSuccess) return result;
  const std::lock_guard lock(mutex);
  return pinned.erase(reinterpret_cast<std::uintptr_t>(memory)) == 1 ? kSuccess : kInvalidValue;
}
Result cuMemcpyDtoHAsync_v2(void* to, Address from, std::size_t size, Stream stream) {
  if (const Result result = usable(); result != kSuccess) return result;
  const std::byte* source = find(from, size);
  if (source == nullptr || !is_pinned(to, size)) return kInvalidValue;
  stream->put([=] { std::memcpy(to, source, size); });
  return kSuccess;
}
Result cuMemcpyHtoDAsync_v2(Address to, const void* from, std::size_t size, Stream stream) {
  if (const Result result = usable(); result != kSuccess) return result;
  std::byte* target = find(to, size);
  if (target == nullptr || !is_pinned(from, size)) return kInvalidValue;
  stream->put([=] { std::memcpy(target, from, size); });
  return kSuccess;
}

// ---- For `bps tune`

Result cuStreamSynchronize(Stream stream) {
  if (const Result result = usable(); result != kSuccess) return result;
  wait_until([&] { return of(stream)->is_idle(); });
  return broken ? kIllegalAddress : kSuccess;
}
Result cuMemAlloc_v2(Address* at, std::size_t size) {
  if (const Result result = usable(); result != kSuccess) return result;
  *at = reinterpret_cast<Address>(fake_allocate(size));
  return kSuccess;
}
Result cuMemFree_v2(Address at) {
  if (const Result result = usable(); result != kSuccess) return result;
  fake_free(reinterpret_cast<void*>(at));  // NOLINT(performance-no-int-to-ptr): CUDA's own type
  return kSuccess;
}

Result cuCtxGetDevice(Ordinal* device) {
  *device = 0;
  return contexts.empty() ? kInvalidContext : kSuccess;
}

// ---- For `bps doctor`: as many GPUs as FAKE_CUDA_GPUS says. The first four are linked, and others share PCIe alone.

Result cuDriverGetVersion(int* version) {
  *version = 12040;
  return kSuccess;
}
Result cuDeviceGetCount(int* count) {
  const char* const said = std::getenv("FAKE_CUDA_GPUS");
  *count = said != nullptr ? std::atoi(said) : 1;
  return kSuccess;
}
Result cuDeviceGet(Ordinal* device, int number) {
  *device = number;
  return kSuccess;
}
Result cuDeviceGetName(char* name, int size, Ordinal) {
  (void)std::snprintf(name, static_cast<std::size_t>(size), "Fake");
  return kSuccess;
}
Result cuDeviceTotalMem_v2(std::size_t* bytes, Ordinal) {
  *bytes = std::size_t{80} << 30;
  return kSuccess;
}
Result cuDeviceGetPCIBusId(char* address, int size, Ordinal device) {
  (void)std::snprintf(address, static_cast<std::size_t>(size), "0000:%02X:00.0", 0x1a + 0x10 * device);
  return kSuccess;
}
Result cuDeviceGetAttribute(int* value, int attribute, Ordinal device) {
  *value = attribute == 124 && device != 0 ? 1 : 0;  // all but the first one say that they have dma-buf
  const char* const flushes_as = std::getenv("FAKE_CUDA_FLUSHES");
  if (attribute == kDeviceRdmaFlushes) *value = flushes_as != nullptr ? std::atoi(flushes_as) : kFlushByHost;
  return kSuccess;
}
Result cuDeviceCanAccessPeer(int* can, Ordinal, Ordinal) {
  *can = 1;
  return kSuccess;
}
Result cuDeviceGetP2PAttribute(int* value, int attribute, Ordinal one, Ordinal other) {
  *value = attribute == 3 && one < 4 && other < 4 ? 1 : 0;
  return kSuccess;
}

// ---- For tests

void* fake_allocate(std::size_t size) {
  const int file = ::memfd_create("fake_cuda", MFD_CLOEXEC);
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (file < 0 || ::ftruncate(file, static_cast<off_t>((size + page - 1) / page * page)) != 0) return nullptr;
  void* lies = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  void* shown = ::mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
  if (lies == MAP_FAILED || shown == MAP_FAILED) return nullptr;
  const std::lock_guard lock(mutex);
  allocations[reinterpret_cast<std::uintptr_t>(shown)] = {static_cast<std::byte*>(lies), size, file, ++last_number};
  return shown;
}
void fake_free(void* memory) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(reinterpret_cast<std::uintptr_t>(memory));
  ::munmap(found->second.lies, found->second.size);
  ::munmap(memory, found->second.size);
  ::close(found->second.file);
  allocations.erase(found);
}
void fake_own_everything(void) {
  owns_everything = true;
}
void fake_read(const void* memory, void* into, std::size_t size) {
  std::memcpy(into, find(reinterpret_cast<std::uintptr_t>(memory), size), size);
}
void fake_write(void* memory, const void* from, std::size_t size) {
  std::memcpy(find(reinterpret_cast<std::uintptr_t>(memory), size), from, size);
}
void* fake_stream() {
  return new OpaqueStream;
}
void fake_end_stream(void* stream) {
  delete static_cast<Stream>(stream);
}
void fake_end_default_stream(void) {
  const std::lock_guard lock(default_mutex);
  delete std::exchange(by_default, nullptr);
}
void fake_kernel(void* stream, void* memory, int value, std::size_t size, const std::uint32_t* gate) {
  std::byte* target = find(reinterpret_cast<std::uintptr_t>(memory), size);
  static_cast<Stream>(stream)->put([=] {
    wait_until([&] { return __atomic_load_n(gate, __ATOMIC_ACQUIRE) != 0; });
    std::memset(target, value, size);
  });
}
void fake_begin_capture(void* stream) {
  static_cast<Stream>(stream)->captures = true;
}
void fake_capture_elsewhere(void) {
  captured_elsewhere = true;
}
void fake_refuse(const char* function, int result, int skip) {
  const std::lock_guard lock(mutex);
  refused = function;
  refused_after = skip;
  refused_with = result;
}
void fake_hang(int hangs) {
  hanging = hangs != 0;
}
void fake_delay(unsigned most_us) {
  most_delay = most_us;
}
void fake_break(void) {
  broken = true;
}
int fake_busy(void) {
  const std::lock_guard lock(mutex);
  int busy = 0;
  for (Stream stream : streams) busy += stream->is_idle() ? 0 : 1;
  return busy;
}
int fake_streams(void) {
  const std::lock_guard lock(mutex);
  return static_cast<int>(streams.size());
}
int fake_events(void) {
  return events;
}
int fake_flushes(void) {
  return flushes;
}
int fake_pinned(void) {
  const std::lock_guard lock(mutex);
  return static_cast<int>(pinned.size());
}

}  // extern "C"
