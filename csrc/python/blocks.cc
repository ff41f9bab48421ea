// SPDX-License-Identifier: Apache-2.0
#include "python/blocks.h"

#include <utility>

#include "core/fork.h"
#include "node/process.h"
#include "worker/worker.h"

namespace py = pybind11;

namespace bps::python {

BlockTable& BlockTable::instance() {
  static auto& table = *[] {
    auto* made = new BlockTable;  // is never destroyed: owners may die after everything else of this module
    hold_across_fork(made->processes_mutex_);
    hold_across_fork(made->mutex_);
    after_fork_in_child([] { instance().processes_.clear(); });  // these are the parent's
    return made;
  }();
  return table;
}

transport::Allocation BlockTable::find(py::handle owner, std::span<std::byte> bytes) {
  const auto same = [&](const Known& known) {
    return known.block.bytes.data() == bytes.data() && known.block.bytes.size() == bytes.size();
  };
  std::uint64_t identity = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(owner.ptr());
    if (found != known_.end() && same(found->second))
      return found->second.block;  // all calls but the first return here
    identity = next_++;
  }
  const py::cpp_function lost([this, key = owner.ptr(), identity](py::handle) { lose(key, identity); });
  Known before{{bytes, identity}, py::weakref(owner, lost)};
  {
    const std::lock_guard lock(mutex_);
    std::swap(known_[owner.ptr()], before);
    if (before.owner) owners_.erase(before.block.identity);
    owners_.emplace(identity, owner.ptr());
  }
  if (before.owner) forget(before.block.identity);  // the memory has moved
  return {bytes, identity};
}

PyObject* BlockTable::owner_of(std::uint64_t identity) {
  const std::lock_guard lock(mutex_);
  const auto found = owners_.find(identity);
  return found == owners_.end() ? nullptr : found->second;
}

void BlockTable::renew(std::uint64_t identity) {
  if (PyObject* owner = owner_of(identity)) lose(owner, identity);
}

bool BlockTable::knows(std::uint64_t identity) {
  return owner_of(identity) != nullptr;
}

void BlockTable::attach(node::Process& process) {
  const std::lock_guard lock(processes_mutex_);
  processes_.push_back(&process);
}

void BlockTable::detach(node::Process& process) {
  const std::lock_guard lock(processes_mutex_);
  std::erase(processes_, &process);
}

void BlockTable::lose(PyObject* owner, std::uint64_t identity) {
  Known lost;
  {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(owner);
    if (found == known_.end() || found->second.block.identity != identity) return;
    lost = std::move(found->second);
    known_.erase(found);
    owners_.erase(identity);
  }
  forget(identity);
}

void BlockTable::forget(std::uint64_t identity) {
  const std::lock_guard lock(processes_mutex_);
  for (node::Process* process : processes_) process->worker().forget_memory(identity);
}

}  // namespace bps::python
