// SPDX-License-Identifier: Apache-2.0
// Holds the memory of this process that one context knows.
//
// A registration lives as long as its Region, and as the unfinished writes from it. Until a write is acknowledged the
// device may have to send it again, and the answer that tells us that the bytes have arrived can be faster than the
// acknowledgement. When the device goes, all registrations go. They belong to the thread of the loop.
#pragma once

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "transport/rdma/context.h"
#include "transport/transport.h"

namespace bps::transport::rdma {

struct Registration {
  Mr memory;
  std::uint32_t users = 1;  // its region, and each unfinished write
};

class Registrations {
 public:
  explicit Registrations(Context& context) : context_(&context) {}
  ~Registrations() { drop_all(); }

  template <typename Memory>
  Registration* add(const Memory& memory) {
    return add(context_->register_for_peers(memory));
  }
  void release(Registration* registration);
  // Gives all memory back, because the device goes. Regions that are left name nothing any more.
  void drop_all();
  bool has_device() const { return context_ != nullptr; }

 private:
  Registration* add(Mr memory);

  Context* context_;  // null once the device is gone
  std::unordered_set<Registration*> all_;
};

class RdmaRegion final : public Region {
 public:
  // `by` has the registrations of each rail. A rail whose device is gone has none. Throws when no rail is left.
  RdmaRegion(std::span<std::byte> bytes, std::span<const std::shared_ptr<Registrations>> by);
  RdmaRegion(const ForeignMemory& memory, std::span<const std::shared_ptr<Registrations>> by);

  std::uint32_t local_key(std::size_t rail) const { return of_rails_[rail].local_key; }
  Registration* registration(std::size_t rail) const { return of_rails_[rail].registration; }

 private:
  struct OfRail {
    template <typename Memory>
    OfRail(const Memory& memory, std::shared_ptr<Registrations> by)
        : registrations(std::move(by)),
          registration(registrations->has_device() ? registrations->add(memory) : nullptr),
          local_key(registration == nullptr ? 0 : registration->memory->lkey) {}
    OfRail(OfRail&& other) noexcept
        : registrations(std::move(other.registrations)),
          registration(std::exchange(other.registration, nullptr)),
          local_key(other.local_key) {}
    OfRail& operator=(OfRail&&) = delete;
    ~OfRail() {
      if (registration != nullptr) registrations->release(registration);
    }

    std::uint32_t key() const { return registration == nullptr ? 0 : registration->memory->rkey; }

    std::shared_ptr<Registrations> registrations;  // may outlive the transport
    Registration* registration;
    std::uint32_t local_key;
  };
  template <typename Memory>
  void add(const Memory& memory, std::span<const std::shared_ptr<Registrations>> by);

  std::vector<OfRail> of_rails_;
};

}  // namespace bps::transport::rdma
