// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/registrations.h"

#include <algorithm>
#include <utility>

namespace bps::transport::rdma {

Registration* Registrations::add(Mr memory) {
  auto made = std::make_unique<Registration>(Registration{std::move(memory)});
  all_.insert(made.get());
  return made.release();
}

void Registrations::release(Registration* registration) {
  if (--registration->users > 0) return;
  all_.erase(registration);
  delete registration;
}

void Registrations::drop_all() {
  context_ = nullptr;
  for (Registration* registration : all_) registration->memory.reset();
}

RdmaRegion::RdmaRegion(std::span<std::byte> bytes, std::span<const std::shared_ptr<Registrations>> by) : Region(bytes) {
  add(bytes, by);
}

RdmaRegion::RdmaRegion(const ForeignMemory& memory, std::span<const std::shared_ptr<Registrations>> by)
    : Region(memory.bytes) {
  is_foreign_ = true;
  add(memory, by);
}

template <typename Memory>
void RdmaRegion::add(const Memory& memory, std::span<const std::shared_ptr<Registrations>> by) {
  if (std::ranges::none_of(by, &Registrations::has_device,
                           [](const auto& one) -> const Registrations& { return *one; })) {
    throw Error(ErrorCode::kTransport, "cannot register memory: the RDMA device is gone", kRestartJob);
  }
  of_rails_.reserve(by.size());
  for (const auto& registrations : by) {
    const std::uint32_t key = of_rails_.emplace_back(memory, registrations).key();
    if (of_rails_.size() == 1) {
      key_ = key;
    } else {
      other_keys_.push_back(key);
    }
  }
  origin_ = reinterpret_cast<std::uint64_t>(bytes().data());
}

}  // namespace bps::transport::rdma
