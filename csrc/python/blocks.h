// SPDX-License-Identifier: Apache-2.0
// Gives blocks of memory identities, so that two blocks at one address are told apart.
//
// A network card that has registered a block goes on reading and writing its pages after the block has been freed, even
// when its addresses belong to another array by then. So every block gets a number that no other block ever gets, and
// when a block is freed, the worker of this process drops its registrations.
//
// An array or tensor that moves its memory gets a new block at its next use (numpy's `resize` refuses to move an array
// that has been used here). Memory that was freed and allocated again between two uses, at the same address, of the
// same size and by the same tensor storage, is the same block here. Where it counts that its pages are others, that is
// noticed: see transport/region_cache.h. Where the user has switched that off, renew() has to tell it.
//
// The GIL guards it, and locks do for interpreters without one. No Python code runs under a lock: it could collect
// garbage, and with it an owner.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "transport/region_cache.h"

namespace bps::node {
class Process;
}

namespace bps::python {

class BlockTable {
 public:
  static BlockTable& instance();

  // Returns the block that lives as long as `owner`, which must support weak references, and has not moved or grown.
  transport::Allocation find(pybind11::handle owner, std::span<std::byte> bytes);
  // Notes that the block holds other memory now: its next use is a new block, whose pages are registered anew.
  void renew(std::uint64_t identity);
  // Returns true when the block has been used, and neither freed nor renewed since.
  bool knows(std::uint64_t identity);

  // Between these two calls the worker of the process forgets the memory of each block that is freed. detach() precedes
  // the shutdown of the process, and once it has returned the worker is not called any more.
  void attach(node::Process& process);
  void detach(node::Process& process);  // has no effect on a process that is not attached

 private:
  struct Known {
    transport::Allocation block;
    pybind11::object owner;  // a weak reference
  };
  PyObject* owner_of(std::uint64_t identity);
  void lose(PyObject* owner, std::uint64_t identity);
  void forget(std::uint64_t identity);

  std::mutex mutex_;  // guards the next three
  std::unordered_map<PyObject*, Known> known_;
  std::unordered_map<std::uint64_t, PyObject*> owners_;  // by identity: the owners of the blocks that are known
  std::uint64_t next_ = 1;
  std::mutex processes_mutex_;
  std::vector<node::Process*> processes_;
};

}  // namespace bps::python
