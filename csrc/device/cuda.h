// SPDX-License-Identifier: Apache-2.0
// Declares what we use of CUDA's driver interface, so that nothing of CUDA is needed to build: its types, the
// numbers that it gives a meaning, and its functions under the names that its library exports. Names that end in _v2
// are those that programs compiled today call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bps::device::cuda {

using Result = int;  // 0: success
using Ordinal = int;
using Address = unsigned long long;  // that of memory of a device
using Context = struct OpaqueContext*;
using Stream = struct OpaqueStream*;
using Event = struct OpaqueEvent*;
using HostFunction = void (*)(void*);

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;
constexpr Result kFirstOfCapture = 900;  // a call that does not fit to a capture into a CUDA graph
constexpr Result kLastOfCapture = 908;
constexpr unsigned kStreamNonBlocking = 1;  // such a stream does not wait for the default stream
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostPortable = 1;   // the memory is pinned for every context of the process
constexpr unsigned kHostDeviceMap = 2;  // and has an address of the device
constexpr int kPointerMemoryType = 2;   // this and the next two are attributes of a pointer
constexpr int kPointerBuffer = 7;       // the number of its allocation, which no other one of the process ever has
constexpr int kPointerOrdinal = 9;
constexpr int kDeviceRdmaFlushes = 117;  // this and the next are attributes of a device
constexpr int kDeviceRdmaOrdering = 118;
constexpr int kFlushByHost = 1;      // a bit: cuFlushGPUDirectRDMAWrites can be called
constexpr int kOrderedForAll = 200;  // every device sees what RDMA devices write, without a flush
constexpr int kFlushCurrent = 0;     // the memory of the current context's device
constexpr int kDmaBuf = 1;           // the kind of a handle
constexpr unsigned kMemoryOfDevice = 2;
constexpr int kCaptureNone = 0;
constexpr int kCaptureRelaxed = 2;  // captures of other threads forbid this thread nothing

// The list calls X(name, parameters).
#define BPS_CUDA_FUNCTIONS(X)                                                                  \
  X(cuInit, (unsigned flags))                                                                  \
  X(cuGetErrorString, (Result error, const char** text))                                       \
  X(cuDeviceGetCount, (int* count))                                                            \
  X(cuDeviceGetPCIBusId, (char* address, int size, Ordinal device))                            \
  X(cuDevicePrimaryCtxRetain, (Context * context, Ordinal device))                             \
  X(cuCtxGetDevice, (Ordinal * device))                                                        \
  X(cuCtxPushCurrent_v2, (Context context))                                                    \
  X(cuCtxPopCurrent_v2, (Context * context))                                                   \
  X(cuDeviceGetAttribute, (int* value, int attribute, Ordinal device))                         \
  X(cuPointerGetAttribute, (void* value, int attribute, Address pointer))                      \
  X(cuMemGetAddressRange_v2, (Address * begin, std::size_t* size, Address pointer))            \
  X(cuMemGetHandleForAddressRange,                                                             \
    (void* handle, Address begin, std::size_t size, int kind, unsigned long long flags))       \
  X(cuFlushGPUDirectRDMAWrites, (int target, int scope))                                       \
  X(cuStreamCreateWithPriority, (Stream * stream, unsigned flags, int priority))               \
  X(cuStreamDestroy_v2, (Stream stream))                                                       \
  X(cuStreamQuery, (Stream stream))                                                            \
  X(cuStreamWaitEvent, (Stream stream, Event event, unsigned flags))                           \
  X(cuStreamIsCapturing, (Stream stream, int* status))                                         \
  X(cuThreadExchangeStreamCaptureMode, (int* mode))                                            \
  X(cuStreamWriteValue32_v2, (Stream stream, Address at, std::uint32_t value, unsigned flags)) \
  X(cuLaunchHostFunc, (Stream stream, HostFunction function, void* argument))                  \
  X(cuEventCreate, (Event * event, unsigned flags))                                            \
  X(cuEventRecord, (Event event, Stream stream))                                               \
  X(cuMemHostAlloc, (void** memory, std::size_t size, unsigned flags))                         \
  X(cuMemFreeHost, (void* memory))                                                             \
  X(cuMemHostGetDevicePointer_v2, (Address * at, void* memory, unsigned flags))                \
  X(cuMemHostRegister_v2, (void* memory, std::size_t size, unsigned flags))                    \
  X(cuMemHostUnregister, (void* memory))                                                       \
  X(cuMemcpyDtoHAsync_v2, (void* to, Address from, std::size_t size, Stream stream))           \
  X(cuMemcpyHtoDAsync_v2, (Address to, const void* from, std::size_t size, Stream stream))

struct Functions {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration takes none
#define BPS_CUDA_MEMBER(name, parameters) Result(*name) parameters = nullptr;
  BPS_CUDA_FUNCTIONS(BPS_CUDA_MEMBER)
#undef BPS_CUDA_MEMBER
};

constexpr bool is_of_capture(Result result) {
  return result >= kFirstOfCapture && result <= kLastOfCapture;
}

}  // namespace bps::device::cuda
