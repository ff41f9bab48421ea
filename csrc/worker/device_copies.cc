// SPDX-License-Identifier: Apache-2.0
#include "worker/device_copies.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "worker/operation.h"

namespace bps::worker {
namespace {

using device::cuda::kNotReady;
using device::cuda::kSuccess;

constexpr std::uint32_t kAhead = 4;  // partitions of a transfer that are copied before they can be sent

bool is_ending(const Transfer& transfer) {
  return transfer.cancelled || transfer.operation->is_failing();
}

}  // namespace

void DeviceCopies::Copies::add(StagingBuffer* buffer, Transfer& transfer, ServerConnection* server,
                               std::uint32_t entry) {
  buffer->copy = {transfer.operation->shared_from_this(), &transfer, server, entry, stream.marks()};
  transfer.operation->on_device->copies.fetch_add(1, std::memory_order_relaxed);
  buffer->next = nullptr;
  (first == nullptr ? first : last->next) = buffer;
  last = buffer;
}

DeviceCopies::Ended DeviceCopies::Copies::take() {
  StagingBuffer* const taken = std::exchange(first, first->next);
  taken->next = nullptr;
  const Ended ended{taken, std::exchange(taken->copy, {})};
  ended.copy.of->on_device->copies.fetch_sub(1, std::memory_order_release);
  return ended;
}

// Keeps these pages for ever.
void DeviceCopies::Copies::keep_memory() {
  for (StagingBuffer* one = first; one != nullptr; one = one->next) {
    (void)new std::shared_ptr<transport::shm::SharedMemory>(one->memory);
    one->pinned_by = nullptr;
  }
}

void DeviceCopies::prepare(const Portion& portion, ServerConnection& server) {
  device::Device& device = portion.operation->on_device->device;
  if (is_encoded(portion.route)) server.memory.make_spare();
  server.memory.pin(device);
  const auto known = std::ranges::find_if(gpus_, [&](const auto& one) { return &one->device == &device; });
  if (known != gpus_.end()) return;
  const device::Device::Current current(device);
  gpus_.push_back(std::make_unique<Gpu>(device, reactor_.loop().doorbell()));
}

DeviceCopies::Gpu& DeviceCopies::gpu_of(const Transfer& transfer) {
  const device::Device* const device = &transfer.operation->on_device->device;
  return **std::ranges::find_if(gpus_, [&](const auto& one) { return &one->device == device; });
}

bool DeviceCopies::step() {
  bool found = gate.step();
  is_blocked_ = false;
  for (const auto& gpu : gpus_) found |= finish(*gpu);
  for (ServerConnection* server : connections_.all()) {
    if (!server->is_closed() && !server->fetching.empty()) found |= fetch(*server);
  }
  return found;
}

bool DeviceCopies::finish(Gpu& gpu) {
  bool found = false;
  for (trace_begin(gpu); gpu.out.has_ended(); trace_begin(gpu)) {
    note_filled(gpu.out.take());
    found = true;
  }
  for (; gpu.in.has_ended(); found = true) {
    const StagingBuffer::Copy copy = gpu.in.take().copy;
    if (!copy.is_refused) {
      partitions_.complete(copy.entry);
    } else {
      partitions_.table[copy.entry].stage = InFlight::Stage::kLanded;
      partitions_.end_when_unread(copy.entry);
    }
  }
  return found;
}

void DeviceCopies::note_filled(const Ended& ended) {
  const auto& [buffer, copy] = ended;
  Transfer& transfer = *copy.transfer;
  if (is_ending(transfer)) return copy.server->memory.give_back(buffer);
  buffer->is_encoded = false;
  trace(reactor_.counters(), TraceStage::kFetched, transfer, transfer.parts[copy.entry], copy.server->node);
  StagingBuffer** end = &transfer.encoded;
  while (*end != nullptr) end = &(*end)->next;
  if (end == &transfer.encoded) {
    copy.server->queue.add(&transfer);
    connections_.note_work();
  }
  *end = buffer;
}

void DeviceCopies::count(Counter DeviceCounter::* direction, std::uint64_t bytes) {
  (reactor_.counters().device_copies.*direction).add();
  (reactor_.counters().device_bytes.*direction).add(bytes);
}

bool DeviceCopies::is_traced(const Transfer& transfer) const {
  const TraceRing* const ring = reactor_.counters().trace;
  return ring != nullptr && ring->wants(transfer.header->round);
}

// Notes that the device has come to the copy that is the next to end.
void DeviceCopies::trace_begin(Gpu& gpu) {
  if (reactor_.counters().trace == nullptr || gpu.out.empty()) return;
  StagingBuffer::Copy& next = gpu.out.first->copy;
  if (next.begins_at == 0 || !gpu.out.stream.reached(next.begins_at)) return;
  next.begins_at = 0;
  trace(reactor_.counters(), TraceStage::kReached, *next.transfer, next.transfer->parts[next.entry], next.server->node);
}

// ---- From the device

// Starts copies. Operations far ahead of what they have sent are passed: other ranks may wait for the rest.
bool DeviceCopies::fetch(ServerConnection& server) {
  const auto is_over = [](const Portion& one) { return is_ending(one) || one.fetched() == one.parts.size(); };
  bool found = false;
  while (Transfer* const next = server.fetching.find([&](const Transfer& one) {
    const auto& portion = static_cast<const Portion&>(one);
    return is_over(portion) || portion.fetched() - portion.next < kAhead;
  })) {
    auto& portion = static_cast<Portion&>(*next);
    if (is_over(portion)) {
      server.fetching.remove(&portion);
      continue;
    }
    const auto alive = portion.operation->shared_from_this();  // it may end here
    if (!start(server, portion) && !is_ending(portion)) break;
    found = true;
  }
  return found;
}

// Starts the copy of the next partition. Returns false without a buffer.
bool DeviceCopies::start(ServerConnection& server, Portion& portion) {
  Operation& operation = *portion.operation;
  Gpu& gpu = gpu_of(portion);
  StagingBuffer* const buffer = take_buffer(server, gpu, operation);
  if (buffer == nullptr) return false;
  const std::uint32_t place = portion.fetched();
  const tensor::Extent extent = portion.extent_of(portion.parts[place]);
  const device::Device::Current current(gpu.device);
  trace(reactor_.counters(), TraceStage::kOnDevice, portion, portion.parts[place], server.node);
  device::cuda::Result result = place == 0 ? wait_for_call(gpu, *operation.on_device) : kSuccess;
  if (place == 0 && is_traced(portion)) mark_call(gpu);
  const std::uint32_t begins_at = is_traced(portion) ? gpu.out.stream.marks() : 0;
  if (result == kSuccess && extent.has_payload()) {
    result = gpu.out.stream.to_host(buffer->bytes(), portion.input_bytes + extent.input_offset, extent.length);
  }
  const device::cuda::Result marked = gpu.out.stream.mark();
  gpu.out.add(buffer, portion, &server, place);
  buffer->copy.begins_at = begins_at;
  portion.note_fetched();
  if (result == kSuccess) result = marked;
  if (result != kSuccess) {
    refuse(gpu, operation, result);
  } else if (extent.has_payload()) {
    count(&DeviceCounter::from, extent.length);
  }
  return true;
}

// Holds up the copies of an operation until its caller's streams have come to the call. A ring is put before that,
// because a loop that sleeps could not hear of earlier copies later.
device::cuda::Result DeviceCopies::wait_for_call(Gpu& gpu, const DeviceArrays& arrays) {
  if (!gpu.out.empty()) (void)gpu.out.stream.ring_at_last_mark();
  for (const device::Ready& point : arrays.ready) {
    if (const device::cuda::Result result = gpu.out.stream.wait_for(point); result != kSuccess) return result;
  }
  return kSuccess;
}

// Puts a mark at the call. The loop is woken there, so that it notes the time.
void DeviceCopies::mark_call(Gpu& gpu) {
  (void)gpu.out.stream.mark();
  (void)gpu.out.stream.ring_at_last_mark();
}

// Aborts the operation for which a call was refused. If the device has failed, check() ends everything else on it.
void DeviceCopies::refuse(const Gpu& gpu, Operation& operation, device::cuda::Result result) {
  const device::cuda::Result state = gpu.out.stream.state();
  const bool works = state == kSuccess || state == kNotReady;
  cancellation_.abort(operation, works ? gpu.device.refusal("a copy", result) : gpu.device.failure(result));
}

// Takes a buffer as Sender::take_buffer() does: beyond the budget only when waiting for a free one could last for ever.
// A buffer that a late device fills comes back by itself, so no other one is made meanwhile.
StagingBuffer* DeviceCopies::take_buffer(ServerConnection& server, const Gpu& gpu, Operation& operation) {
  StagingBuffer* buffer = server.memory.take();
  if (buffer != nullptr && buffer->pinned_by != nullptr) return buffer;
  if (buffer == nullptr && !server.memory.may_grow() && !(gpu.out.empty() && server.outstanding.check_stall())) {
    is_blocked_ = true;
    return nullptr;
  }
  const transport::Reactor::SetUp set_up(&reactor_);
  try {
    if (buffer == nullptr) {
      server.memory.add_buffer();
      server.outstanding.restart_stall();
      buffer = server.memory.take();
    }
    TransportMemory::pin(*buffer, gpu.device);
    return buffer;
  } catch (const Error& error) {
    if (buffer != nullptr) server.memory.give_back(buffer);
    cancellation_.abort(operation, error);
    return nullptr;
  }
}

// ---- To the device

Status DeviceCopies::decode(InFlight& entry) {
  const tensor::Extent extent = entry.transfer->extent_of(entry.part);
  if (!extent.is_compressed() || !extent.wants_data()) return Status::kOk;
  StagingBuffer& spare = entry.server->memory.spare();
  const Compressor& compressor = *entry.transfer->operation->tensor->compressor;
  const Status decoded = compressor.decode(extent, entry.staged->bytes(), spare.bytes(), reactor_.counters());
  if (decoded == Status::kOk) entry.staged->swap_bytes(spare);
  return decoded;
}

bool DeviceCopies::take_answer(std::uint32_t index) {
  InFlight& entry = partitions_.table[index];
  const Transfer& transfer = *entry.transfer;
  const tensor::Extent extent = transfer.extent_of(entry.part);
  Operation& operation = *transfer.operation;
  if (entry.answer_length == 0 && !is_own_part_beside(operation.request, extent)) return false;
  Gpu& gpu = gpu_of(transfer);
  const device::Device::Current current(gpu.device);
  entry.unsent_bytes = false;  // the answer came before the word that the bytes were out
  const Continuation* const continuation = operation.continuation.get();
  const std::uint64_t first = continuation == nullptr ? 0 : continuation->begun(entry.part.partition);
  std::byte* const target = transfer.output_bytes + extent.output_offset;
  auto result = gpu.in.stream.to_device(target + first, entry.staged->bytes() + first, extent.length - first);
  const auto marked = gpu.in.stream.mark();
  entry.stage = InFlight::Stage::kCopying;
  entry.owed = InFlight::Owed::kNothing;
  ++entry.generation;
  trace(reactor_.counters(), TraceStage::kAnswered, transfer, entry.part, entry.server->node);
  gpu.in.add(entry.staged, *entry.transfer, entry.server, index);
  if (result == kSuccess) result = marked;
  if (result != kSuccess) {
    entry.staged->copy.is_refused = true;
    refuse(gpu, operation, result);
  } else {
    count(&DeviceCounter::to, extent.length - first);
  }
  return true;
}

// ---- Sleep, failures, the end

bool DeviceCopies::arm() {
  if (!gate.arm()) return false;
  for (const auto& gpu : gpus_) {
    for (Copies* copies : {&gpu->out, &gpu->in}) {
      if (copies->empty()) continue;
      if (copies->has_ended()) return false;
      const device::Device::Current current(gpu->device);
      (void)copies->stream.ring_at_last_mark();  // a device that has failed is found by check()
    }
  }
  return true;
}

void DeviceCopies::check() {
  gate.check();
  for (const auto& gpu : gpus_) {
    if (!gpu->is_copying()) continue;
    const device::Device::Current current(gpu->device);
    for (Copies* copies : {&gpu->out, &gpu->in}) {
      const device::cuda::Result result = copies->stream.settle();
      if (result != kSuccess && result != kNotReady) fail(*gpu, gpu->device.failure(result));
    }
  }
}

// Ends all copies of a failed device. None of them changes memory any more.
void DeviceCopies::fail(Gpu& gpu, const Error& why) {
  while (!gpu.out.empty()) {
    const auto [buffer, copy] = gpu.out.take();
    copy.server->memory.give_back(buffer);
    cancellation_.abort(*copy.of, why);
  }
  while (!gpu.in.empty()) {
    const StagingBuffer::Copy copy = gpu.in.take().copy;
    partitions_.table[copy.entry].stage = InFlight::Stage::kLanded;
    cancellation_.fail(copy.entry, why);
  }
}

void DeviceCopies::end() {
  gate.end();
  const auto is_copying = [this] {
    return std::ranges::any_of(gpus_, [](const auto& gpu) { return gpu->is_copying(); });
  };
  for (const Deadline until = Deadline::after(device::kLongestEnd_s); is_copying() && !until.passed();) {
    check();
    bool found = false;
    for (const auto& gpu : gpus_) found |= finish(*gpu);
    if (!found) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the end of a job
  }
  for (auto& gpu : gpus_) {
    if (gpu->is_copying()) {
      gpu->out.keep_memory();
      gpu->in.keep_memory();
      (void)gpu.release();
    } else {
      const device::Device::Current current(gpu->device);
      gpu.reset();
    }
  }
  gpus_.clear();
}

}  // namespace bps::worker
