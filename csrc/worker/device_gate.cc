// SPDX-License-Identifier: Apache-2.0
#include "worker/device_gate.h"

#include <algorithm>
#include <utility>

#include "worker/admission.h"
#include "worker/operation.h"

namespace bps::worker {
namespace {

using device::cuda::kNotReady;
using device::cuda::kSuccess;

}  // namespace

void DeviceGate::prepare(const device::Device& device) {
  if (std::ranges::any_of(gpus_, [&](const auto& one) { return &one->device == &device; })) return;
  const device::Device::Current current(device);
  gpus_.push_back(std::make_unique<Gpu>(device, reactor_.loop().doorbell()));
}

DeviceGate::Gpu& DeviceGate::gpu_of(const device::Device& device) const {
  return **std::ranges::find_if(gpus_, [&](const auto& one) { return &one->device == &device; });
}

// A ring for those before it is put into the stream first, because a loop that sleeps could not hear of them later.
void DeviceGate::hold(Portion& portion, ServerConnection& server) {
  Operation& operation = *portion.operation;
  const DeviceArrays& arrays = *operation.on_device;
  if (reactor_.counters().trace != nullptr) trace_hold(portion, server);
  Gpu& gpu = gpu_of(arrays.device);
  device::CopyStream& stream = *gpu.stream;
  const device::Device::Current current(gpu.device);
  if (!gpu.held.empty()) (void)stream.ring_at_last_mark();
  device::cuda::Result result = kSuccess;
  for (const device::Ready& point : arrays.ready) {
    if (result == kSuccess) result = stream.wait_for(point);
  }
  const device::cuda::Result marked = stream.mark();
  if (result == kSuccess) result = marked;
  gpu.held.push_back({operation.shared_from_this(), &portion, &server, stream.marks()});
  if (result == kSuccess) return;
  const device::cuda::Result state = stream.state();
  const bool works = state == kSuccess || state == kNotReady;
  cancellation_.abort(operation,
                      works ? gpu.device.refusal("to order a transfer", result) : gpu.device.failure(result));
}

void DeviceGate::trace_hold(const Portion& portion, const ServerConnection& server) {
  for (const Part& part : portion.parts) {
    trace(reactor_.counters(), TraceStage::kOnDevice, portion, part, server.node);
  }
}

bool DeviceGate::step() {
  bool found = false;
  for (const auto& gpu : gpus_) {
    for (; gpu->may_open(); found = true) {
      const Held one = std::move(gpu->held.front());
      gpu->held.pop_front();
      if (one.portion->cancelled || one.of->is_failing()) continue;
      enqueue(*one.portion, *one.server, connections_, reactor_.counters());
    }
  }
  return found;
}

bool DeviceGate::arm() {
  for (const auto& gpu : gpus_) {
    if (gpu->held.empty()) continue;
    if (gpu->may_open()) return false;
    const device::Device::Current current(gpu->device);
    (void)gpu->stream->ring_at_last_mark();  // a device that has failed is found by check()
  }
  return true;
}

void DeviceGate::check() {
  for (const auto& gpu : gpus_) {
    if (gpu->held.empty()) continue;
    const device::Device::Current current(gpu->device);
    const device::cuda::Result result = gpu->stream->settle();
    if (result == kSuccess || result == kNotReady) continue;
    const Error why = gpu->device.failure(result);
    for (; !gpu->held.empty(); gpu->held.pop_front()) cancellation_.abort(*gpu->held.front().of, why);
  }
}

}  // namespace bps::worker
