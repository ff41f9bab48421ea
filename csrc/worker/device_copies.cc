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
    partitions_.complete(std::exchange(lane.up.take()->copy, {}).entry);
  }
  return found;
}

void DeviceCopies::filled(StagingBuffer& buffer) {
  const StagingBuffer::Copy copy = std::exchange(buffer.copy, {});
  copy.of->on_device->reads.fetch_sub(1, std::memory_order_release);
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

bool DeviceCopies::load(ServerConnection& server) {
  bool found = false;
  while (!server.loading.empty()) {
    auto& portion = static_cast<Portion&>(*server.loading.top());
    if (is_ending(portion) || portion.loaded() == portion.parts.size()) {
      server.loading.pop();
      continue;
    }
    if (portion.loaded() - portion.next >= kAhead || !start(server, portion)) break;
    found = true;
  }
  return found;
}

// Starts the copy of the next partition; false without a buffer, or when the operation has failed by it.
bool DeviceCopies::start(ServerConnection& server, Portion& portion) {
  Operation& operation = *portion.operation;
  Lane& lane = lane_of(portion);
  StagingBuffer* const buffer = take_buffer(server, lane, operation);
  if (buffer == nullptr) return false;
  const tensor::Placement placement = portion.place(portion.parts[portion.loaded()]);
  const device::Device::Current current(lane.device);
  device::cuda::Result result = kSuccess;
  for (const device::Ready& point : operation.on_device->ready) {
    if (portion.loaded() == 0 && result == kSuccess) result = lane.out.wait_for(point);
  }
  if (result == kSuccess && placement.has_payload()) {
    result = lane.out.to_host(buffer->bytes(), portion.input_bytes + placement.input_offset, placement.length);
  }
  if (result == kSuccess) result = lane.out.mark();
  if (result != kSuccess) {
    server.memory.give_back(buffer);
    cancellation_.abort(operation, failure_of(lane.device, result));
    return false;
  }
  if (placement.has_payload()) reactor_.counters().device_bytes.add(placement.length);
  operation.on_device->reads.fetch_add(1, std::memory_order_relaxed);
  buffer->copy = {operation.shared_from_this(), &portion, &server, 0, lane.out.marks()};
  lane.down.add(buffer);
  portion.note_loaded();
  return true;
}

// As Sender::take_buffer(): beyond the budget only when waiting for a free one could last for ever. What a device that
// is late has not filled does not: it goes on by itself, however long that takes.
StagingBuffer* DeviceCopies::take_buffer(ServerConnection& server, const Lane& lane, Operation& operation) {
  StagingBuffer* buffer = server.memory.take();
  if (buffer != nullptr) return buffer;
  if (!server.memory.may_grow() && !(lane.down.empty() && server.outstanding.check_stall())) {
    is_blocked_ = true;
    return nullptr;
  }
  const transport::Reactor::SetUp set_up(&reactor_);
  try {
    server.memory.add_buffer();
  } catch (const Error& error) {
    cancellation_.abort(operation, error);
    return nullptr;
  }
  server.outstanding.restart_stall();
  return server.memory.take();
}

// ---- To the device

void DeviceCopies::take_answer(std::uint32_t index) {
  InFlight& entry = partitions_.table[index];
  const Transfer& transfer = *entry.transfer;
  Lane& lane = lane_of(transfer);
  const tensor::Placement placement = transfer.place(entry.part);
  const device::Device::Current current(lane.device);
  entry.unsent_bytes = false;  // the answer was faster than the word of that
  std::byte* const target = transfer.output_bytes + placement.output_offset;
  auto result = lane.in.to_device(target, entry.staged->bytes(), placement.length);
  if (result == kSuccess) result = lane.in.mark();
  if (result != kSuccess) return cancellation_.fail(index, failure_of(lane.device, result));
  reactor_.counters().device_bytes.add(placement.length);
  entry.stage = InFlight::Stage::kCopying;
  entry.owed = InFlight::Owed::kNothing;
  ++entry.generation;
  entry.staged->copy = {nullptr, entry.transfer, entry.server, index, lane.in.marks()};
  lane.up.add(entry.staged);
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
    for (const device::CopyStream* stream : {&lane->out, &lane->in}) {
      const device::cuda::Result result = stream->state();
      if (result != kSuccess && result != kNotReady) fail(*lane, failure_of(lane->device, result));
    }
  }
}

// Nothing of a failed device changes memory any more: what was under way has ended.
void DeviceCopies::fail(Lane& lane, const Error& why) {
  while (!lane.down.empty()) {
    StagingBuffer* buffer = lane.down.take();
    const StagingBuffer::Copy copy = std::exchange(buffer->copy, {});
    copy.of->on_device->reads.fetch_sub(1, std::memory_order_release);
    copy.server->memory.give_back(buffer);
    cancellation_.abort(*copy.of, why);
  }
  while (!lane.up.empty()) {
    const std::uint32_t index = std::exchange(lane.up.take()->copy, {}).entry;
    partitions_.table[index].stage = InFlight::Stage::kSent;
    cancellation_.fail(index, why);
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
    if (!lane->is_copying()) continue;
    lane->down.keep_memory();
    lane->up.keep_memory();
    (void)lane.release();
  }
  lanes_.clear();
}

}  // namespace bps::worker
