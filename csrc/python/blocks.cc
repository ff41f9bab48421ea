#include "python/blocks.h"

#include <utility>

namespace py = pybind11;

namespace bps::python {

BlockTable& BlockTable::instance() {
  static auto& table = *new BlockTable;  // never destroyed: owners may die after everything else of this module
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
    if (found != known_.end() && same(found->second)) return found->second.block;  // the way of all calls but the first
    identity = next_++;
  }
  const py::cpp_function lost([this, key = owner.ptr(), identity](py::handle) { lose(key, identity); });
  Known before{{bytes, identity}, py::weakref(owner, lost)};
  {
    const std::lock_guard lock(mutex_);
    std::swap(known_[owner.ptr()], before);
  }
  if (before.owner) tell(before.block.identity);  // it has moved
  return {bytes, identity};
}

void BlockTable::renew(std::uint64_t identity) {
  PyObject* owner = nullptr;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, known] : known_) {
      if (known.block.identity == identity) owner = key;
    }
  }
  if (owner != nullptr) lose(owner, identity);
}

void BlockTable::lose(PyObject* owner, std::uint64_t identity) {
  Known lost;
  {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(owner);
    if (found == known_.end() || found->second.block.identity != identity) return;
    lost = std::move(found->second);
    known_.erase(found);
  }
  tell(identity);
}

void BlockTable::tell(std::uint64_t identity) {
  for (std::size_t i = 0; i < listeners_.size(); ++i) listeners_[i](identity);
}

}  // namespace bps::python
