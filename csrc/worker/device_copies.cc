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
constexpr double kLongestEnd_s = 5;  // of copies that nothing holds up

bool is_ending(const Transfer& transfer) {
  return transfer.cancelled || transfer.operation->is_failing();
}

Error failure_of(const device::Device& device, device::cuda::Result result) {
  return {ErrorCode::kTransport,
          "GPU " + std::to_string(device.ordinal()) + " has failed: " + device.driver().describe(result),
          "see the kernel log (dmesg) and nvidia-smi for the state of the GPU; this process cannot use it any more"};
}

// The driver has refused one call; the device may well work.
Error refusal_of(const device::Device& device, device::cuda::Result result) {
  const bool captures = device::cuda::is_of_capture(result);
  return {captures ? ErrorCode::kInvalidArgument : ErrorCode::kTransport,
          "GPU " + std::to_string(device.ordinal()) + " has refused a copy: " + device.driver().describe(result),
          captures ? device::kEndCapture : "see the kernel log (dmesg) and nvidia-smi for the state of the GPU"};
}

// Own bytes of an all_gather that lie elsewhere than in its result: what is in the buffer goes there, too.
bool is_own_part_beside(const Transfer& transfer, const tensor::Placement& placement) {
  return transfer.operation->request.kind == tensor::OperationKind::kAllGather && placement.has_payload() &&
         transfer.output_bytes + placement.output_offset != transfer.input_bytes + placement.input_offset;
}

}  // namespace

void DeviceCopies::Copies::add(StagingBuffer* buffer) {
  buffer->next = nullptr;
  (first == nullptr ? first : last->next) = buffer;
  last = buffer;
}

StagingBuffer* DeviceCopies::Copies::take() {
  StagingBuffer* taken = std::exchange(first, first->next);
  taken->next = nullptr;
  return taken;
}

// These pages are kept for ever.
void DeviceCopies::Copies::keep_memory() {
  for (StagingBuffer* one = first; one != nullptr; one = one->next) {
    (void)new std::shared_ptr<transport::shm::SharedMemory>(one->memory);
    one->pinned_by = nullptr;
  }
}

void DeviceCopies::prepare(device::Device& device, ServerConnection& server) {
  server.memory.pin(device);
  const auto known = std::ranges::find_if(lanes_, [&](const auto& one) { return &one->device == &device; });
  if (known != lanes_.end()) return;
  const device::Device::Current current(device);
  lanes_.push_back(std::make_unique<Lane>(device, reactor_.loop().doorbell()));
}

DeviceCopies::Lane& DeviceCopies::lane_of(const Transfer& transfer) {
  const device::Device* const device = &transfer.operation->on_device->device;
  return **std::ranges::find_if(lanes_, [&](const auto& one) { return &one->device == device; });
}

bool DeviceCopies::step() {
  bool found = false;
  is_blocked_ = false;
  for (const auto& lane : lanes_) found |= finish(*lane);
  for (ServerConnection* server : connections_.all()) {
    if (!server->is_closed() && !server->loading.empty()) found |= load(*server);
  }
  return found;
}

bool DeviceCopies::finish(Lane& lane) {
  bool found = false;
  for (; !lane.down.empty() && lane.out.reached(lane.down.first->copy.mark); found = true) filled(*lane.down.take());
  for (; !lane.up.empty() && lane.in.reached(lane.up.first->copy.mark); found = true) {
    const StagingBuffer::Copy copy = std::exchange(lane.up.take()->copy, {});
    copy.of->on_device->copies.fetch_sub(1, std::memory_order_release);
    if (!copy.is_refused) {
      partitions_.complete(copy.entry);
    } else {
      partitions_.table[copy.entry].stage = InFlight::Stage::kSent;
      partitions_.end_when_unread(copy.entry);
    }
  }
  return found;
}

void DeviceCopies::filled(StagingBuffer& buffer) {
  const StagingBuffer::Copy copy = std::exchange(buffer.copy, {});
  copy.of->on_device->copies.fetch_sub(1, std::memory_order_release);
  Transfer& transfer = *copy.transfer;
  if (is_ending(transfer)) return copy.server->memory.give_back(&buffer);
  StagingBuffer** end = &transfer.encoded;
  while (*end != nullptr) end = &(*end)->next;
  if (end == &transfer.encoded) {
    copy.server->queue.add(&transfer);
    connections_.note_work();
  }
  *end = &buffer;
}

// ---- From the device

// Operations pass one that is far enough ahead of what it has sent: other ranks may wait for them.
bool DeviceCopies::load(ServerConnection& server) {
  const auto is_over = [](const Portion& one) { return is_ending(one) || one.loaded() == one.parts.size(); };
  bool found = false;
  while (Transfer* const next = server.loading.find([&](const Transfer& one) {
    const auto& portion = static_cast<const Portion&>(one);
    return is_over(portion) || portion.loaded() - portion.next < kAhead;
  })) {
    auto& portion = static_cast<Portion&>(*next);
    if (is_over(portion)) {
      server.loading.remove(&portion);
      continue;
    }
    const auto alive = portion.operation->shared_from_this();  // it may end here
    if (!start(server, portion) && !is_ending(portion)) break;
    found = true;
  }
  return found;
}

// Starts the copy of the next partition; false without a buffer.
bool DeviceCopies::start(ServerConnection& server, Portion& portion) {
  Operation& operation = *portion.operation;
  Lane& lane = lane_of(portion);
  StagingBuffer* const buffer = take_buffer(server, lane, operation);
  if (buffer == nullptr) return false;
  const tensor::Placement placement = portion.place(portion.parts[portion.loaded()]);
  const device::Device::Current current(lane.device);
  device::cuda::Result result = portion.loaded() == 0 ? wait_for_call(lane, *operation.on_device) : kSuccess;
  if (result == kSuccess && placement.has_payload()) {
    result = lane.out.to_host(buffer->bytes(), portion.input_bytes + placement.input_offset, placement.length);
  }
  const device::cuda::Result marked = lane.out.mark();
  operation.on_device->copies.fetch_add(1, std::memory_order_relaxed);
  buffer->copy = {operation.shared_from_this(), &portion, &server, 0, lane.out.marks()};
  lane.down.add(buffer);
  portion.note_loaded();
  if (result == kSuccess) result = marked;
  if (result != kSuccess) {
    refuse(lane, operation, result);
  } else if (placement.has_payload()) {
    reactor_.counters().device_bytes.add(placement.length);
  }
  return true;
}

// Holds up the copies of an operation until its caller's streams have come to the call. A ring is put before that,
// because a loop that sleeps could not hear of earlier copies later.
device::cuda::Result DeviceCopies::wait_for_call(Lane& lane, const DeviceArrays& arrays) {
  if (!lane.down.empty()) (void)lane.out.ring_at_last_mark();
  for (const device::Ready& point : arrays.ready) {
    if (const device::cuda::Result result = lane.out.wait_for(point); result != kSuccess) return result;
  }
  return kSuccess;
}

// Aborts the operation for which a call was refused. If the device has failed, check() ends everything else on it.
void DeviceCopies::refuse(const Lane& lane, Operation& operation, device::cuda::Result result) {
  const device::cuda::Result state = lane.out.state();
  const bool works = state == kSuccess || state == kNotReady;
  cancellation_.abort(operation, works ? refusal_of(lane.device, result) : failure_of(lane.device, result));
}

// As Sender::take_buffer(): beyond the budget only when waiting for a free one could last for ever. A buffer that a
// late device fills comes back by itself, so no other one is made meanwhile.
StagingBuffer* DeviceCopies::take_buffer(ServerConnection& server, const Lane& lane, Operation& operation) {
  StagingBuffer* buffer = server.memory.take();
  if (buffer != nullptr && buffer->pinned_by != nullptr) return buffer;
  if (buffer == nullptr && !server.memory.may_grow() && !(lane.down.empty() && server.outstanding.check_stall())) {
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
    TransportMemory::pin(*buffer, lane.device);
    return buffer;
  } catch (const Error& error) {
    if (buffer != nullptr) server.memory.give_back(buffer);
    cancellation_.abort(operation, error);
    return nullptr;
  }
}

// ---- To the device

bool DeviceCopies::take_answer(std::uint32_t index) {
  InFlight& entry = partitions_.table[index];
  const Transfer& transfer = *entry.transfer;
  const tensor::Placement placement = transfer.place(entry.part);
  if (entry.answer_length == 0 && !is_own_part_beside(transfer, placement)) return false;
  Operation& operation = *transfer.operation;
  Lane& lane = lane_of(transfer);
  const device::Device::Current current(lane.device);
  entry.unsent_bytes = false;  // the answer was faster than the word of that
  std::byte* const target = transfer.output_bytes + placement.output_offset;
  auto result = lane.in.to_device(target, entry.staged->bytes(), placement.length);
  const auto marked = lane.in.mark();
  operation.on_device->copies.fetch_add(1, std::memory_order_relaxed);
  entry.stage = InFlight::Stage::kCopying;
  entry.owed = InFlight::Owed::kNothing;
  ++entry.generation;
  entry.staged->copy = {operation.shared_from_this(), entry.transfer, entry.server, index, lane.in.marks()};
  lane.up.add(entry.staged);
  if (result == kSuccess) result = marked;
  if (result != kSuccess) {
    entry.staged->copy.is_refused = true;
    refuse(lane, operation, result);
  } else {
    reactor_.counters().device_bytes.add(placement.length);
  }
  return true;
}

// ---- Sleep, failures, the end

bool DeviceCopies::arm() {
  for (const auto& lane : lanes_) {
    for (auto [copies, stream] : {std::pair{&lane->down, &lane->out}, std::pair{&lane->up, &lane->in}}) {
      if (copies->empty()) continue;
      if (stream->reached(copies->first->copy.mark)) return false;
      const device::Device::Current current(lane->device);
      (void)stream->ring_at_last_mark();  // a device that has failed is found by check()
    }
  }
  return true;
}

void DeviceCopies::check() {
  for (const auto& lane : lanes_) {
    if (!lane->is_copying()) continue;
    const device::Device::Current current(lane->device);
    for (device::CopyStream* stream : {&lane->out, &lane->in}) {
      const device::cuda::Result result = stream->settle();
      if (result != kSuccess && result != kNotReady) fail(*lane, failure_of(lane->device, result));
    }
  }
}

// Nothing of a failed device changes memory any more: what was under way has ended.
void DeviceCopies::fail(Lane& lane, const Error& why) {
  while (!lane.down.empty()) {
    StagingBuffer* buffer = lane.down.take();
    const StagingBuffer::Copy copy = std::exchange(buffer->copy, {});
    copy.of->on_device->copies.fetch_sub(1, std::memory_order_release);
    copy.server->memory.give_back(buffer);
    cancellation_.abort(*copy.of, why);
  }
  while (!lane.up.empty()) {
    const StagingBuffer::Copy copy = std::exchange(lane.up.take()->copy, {});
    copy.of->on_device->copies.fetch_sub(1, std::memory_order_release);
    partitions_.table[copy.entry].stage = InFlight::Stage::kSent;
    cancellation_.fail(copy.entry, why);
  }
}

void DeviceCopies::end() {
  const auto is_copying = [this] {
    return std::ranges::any_of(lanes_, [](const auto& lane) { return lane->is_copying(); });
  };
  for (const Deadline until = Deadline::after(kLongestEnd_s); is_copying() && !until.passed();) {
    check();
    bool found = false;
    for (const auto& lane : lanes_) found |= finish(*lane);
    if (!found) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the end of a job
  }
  for (auto& lane : lanes_) {
    if (lane->is_copying()) {
      lane->down.keep_memory();
      lane->up.keep_memory();
      (void)lane.release();
    } else {
      const device::Device::Current current(lane->device);
      lane.reset();
    }
  }
  lanes_.clear();
}

}  // namespace bps::worker
