// Blocks of memory, told apart although addresses are used again.
//
// A card that was told of a block goes on reading and writing its pages after it has been freed, also when its
// addresses belong to another array by then. So a block has a number that no other block ever gets, and losing it is
// told.
//
// Of an array or tensor that moves its memory (numpy's `resize` refuses to, for what has been used here) the next use
// is a new block. What is not seen is memory that was given up and taken back between two uses, at the same address and
// of the same size, by the same tensor storage: renew() is told.
//
// Threading: the GIL, and a lock for interpreters without one. No Python code runs under the lock: it could collect
// garbage, and with it an owner.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "transport/region_cache.h"

namespace bps::python {

class BlockTable {
 public:
  static BlockTable& instance();

  // The block that lives as long as `owner` (which can be referred to weakly) and has not moved or grown.
  transport::Allocation find(pybind11::handle owner, std::span<std::byte> bytes);
  // What lies in the block is other memory from now on: the next use is a new block, whose pages are looked at anew.
  void renew(std::uint64_t identity);
  // Calls `listener` with the identity of each block from the moment when it is gone.
  void when_gone(pybind11::function listener) { listeners_.push_back(std::move(listener)); }

 private:
  struct Known {
    transport::Allocation block;
    pybind11::object owner;  // weak reference
  };
  void lose(PyObject* owner, std::uint64_t identity);
  void tell(std::uint64_t identity);

  std::mutex mutex_;
  std::unordered_map<PyObject*, Known> known_;
  std::uint64_t next_ = 1;
  std::vector<pybind11::function> listeners_;
};

}  // namespace bps::python
