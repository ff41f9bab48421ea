// SPDX-License-Identifier: Apache-2.0
// Declares what the fake driver has beside CUDA's functions, for tests. Its streams are threads that take their time.
// Memory of its device is at addresses where the processor faults, so that only copies of the driver reach it. It
// refuses what CUDA refuses, or does badly: calls without a context, asynchronous copies of memory that is not pinned,
// and calls from a host function.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// Makes memory of the device. Returns null when there is none.
void* fake_allocate(std::size_t size);
void fake_free(void* memory);
// Makes all other memory the device's, too, from now on, where it lies. The processor reaches that.
void fake_own_everything(void);
// These do what the processor may not do itself.
void fake_read(const void* memory, void* into, std::size_t size);
void fake_write(void* memory, const void* from, std::size_t size);
// Makes a stream of a caller. fake_kernel() writes `value` in the stream, once `gate` is not zero.
void* fake_stream();
// Ends a stream when all that is in it has happened.
void fake_end_stream(void* stream);
// Ends the default stream, which begins again when it is used next.
void fake_end_default_stream(void);
void fake_kernel(void* stream, void* memory, int value, std::size_t size, const std::uint32_t* gate);
void fake_begin_capture(void* stream);
// Lets another thread capture some stream from here on, which forbids all others what could break that.
void fake_capture_elsewhere(void);
// Lets each thing that a stream does take up to so long, by chance.
void fake_delay(unsigned most_us);
// Lets the device fail from now on: all that is in streams is dropped, and each call says so.
void fake_break(void);
// Lets the call of this function after `skip` others do nothing, and return `result`.
void fake_refuse(const char* function, int result, int skip);
// Makes streams do nothing while `hangs` is not zero.
void fake_hang(int hangs);
// Counts the streams, but for those of callers, in which something is still to happen.
int fake_busy(void);
// These count the objects that exist: streams, events, and blocks of pinned memory.
int fake_streams(void);
int fake_events(void);
int fake_pinned(void);
// Counts the calls that wait for what RDMA devices have written.
int fake_flushes(void);
}
