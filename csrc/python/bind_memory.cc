// SPDX-License-Identifier: Apache-2.0
// Binds memory: the address, size and dtype of an array, without copying it and without a call into Python.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>

#include "core/error.h"
#include "device/devices.h"
#include "python/bind.h"
#include "python/blocks.h"
#include "python/interruptible.h"
#include "python/memory.h"
#include "transport/shm/shared_memory.h"

namespace py = pybind11;

namespace bps::python {
namespace {

std::byte* pointer(std::uintptr_t address) {
  return reinterpret_cast<std::byte*>(address);
}

std::optional<Dtype> common_dtype(const py::dtype& dtype) {
  if (dtype.byteorder() != '=' && dtype.byteorder() != '|') return std::nullopt;
  const auto is = [&](char kind, py::ssize_t size) { return dtype.kind() == kind && dtype.itemsize() == size; };
  if (is('f', 4)) return Dtype::kFloat32;
  if (is('f', 8)) return Dtype::kFloat64;
  if (is('f', 2)) return Dtype::kFloat16;
  if (is('i', 8)) return Dtype::kInt64;
  if (is('i', 4)) return Dtype::kInt32;
  if (is('i', 1)) return Dtype::kInt8;
  if (is('u', 1)) return Dtype::kUint8;
  if (is('b', 1)) return Dtype::kBool;
  return std::nullopt;
}

// Returns nothing for anything but a numpy array that can be used in place; arrays.py takes more kinds, and reports
// errors.
std::optional<Memory> describe_array(py::handle object, bool writable) {
  if (!py::isinstance<py::array>(object)) return std::nullopt;
  const bool is_plain = Py_TYPE(object.ptr()) == py::detail::npy_api::get().PyArray_Type_;
  if (!is_plain && py::hasattr(object, "mask")) return std::nullopt;
  const auto array = py::reinterpret_borrow<py::array>(object);
  const auto usable = [](const py::array& a) { return (a.flags() & py::array::c_style) != 0; };
  const auto dtype = common_dtype(array.dtype());
  if (!dtype || !usable(array) || (writable && !array.writeable())) return std::nullopt;
  py::array root = array;
  while (root.base() && py::isinstance<py::array>(root.base())) root = py::reinterpret_borrow<py::array>(root.base());
  if (!usable(root)) root = array;
  const auto bytes = [](const py::array& a) {
    return std::span(static_cast<std::byte*>(const_cast<void*>(a.data())), static_cast<std::size_t>(a.nbytes()));
  };
  return Memory{.address = bytes(array).data(),
                .nbytes = bytes(array).size(),
                .elements = static_cast<std::uint64_t>(array.size()),
                .dtype = *dtype,
                .block = BlockTable::instance().find(root, bytes(root)),
                .keep = array};
}

// Calls the driver without the GIL: it may be opened, and waits for what else the process does with it.
std::optional<Memory> describe_on_device(const std::string& library, py::object keep, std::uintptr_t address,
                                         std::uint64_t elements, std::uint64_t nbytes, Dtype dtype,
                                         std::uintptr_t stream) {
  device::Device* device = nullptr;
  {
    const WithoutGil released;
    device = device::find_owner(library, pointer(address));
  }
  if (device == nullptr) return std::nullopt;
  return Memory{.address = pointer(address),
                .nbytes = nbytes,
                .elements = elements,
                .dtype = dtype,
                .block = {{pointer(address), nbytes}, 0},
                .keep = std::move(keep),
                .device = device,
                .stream = stream};
}

}  // namespace

void bind_memory(py::module_& module) {
  module.def(
      "copy_bytes",
      [](std::uintptr_t to, std::uintptr_t from, std::size_t size) { std::memmove(pointer(to), pointer(from), size); },
      py::arg("to"), py::arg("from_"), py::arg("size"), py::call_guard<WithoutGil>());
  py::class_<transport::shm::SharedMemory, std::shared_ptr<transport::shm::SharedMemory>>(
      module, "SharedMemory", py::buffer_protocol(), "Bytes that peers on this host can map.")
      .def(py::init(&transport::shm::SharedMemory::create), py::arg("size"), "`size` zeroed bytes; at least 1.")
      .def_property_readonly(
          "address",
          [](const transport::shm::SharedMemory& m) { return reinterpret_cast<std::uintptr_t>(m.bytes().data()); })
      .def_buffer([](transport::shm::SharedMemory& m) {
        return py::buffer_info(m.bytes().data(), 1, py::format_descriptor<std::uint8_t>::format(), 1,
                               {static_cast<py::ssize_t>(m.bytes().size())}, {1}, false);
      });

  py::class_<Memory>(module, "Memory", "The bytes of an array, and the block of memory around it.")
      .def(py::init([](py::object keep, std::uintptr_t address, std::uint64_t elements, std::uint64_t nbytes,
                       Dtype dtype, py::object owner, std::uintptr_t block, std::uint64_t block_nbytes) {
             return Memory{.address = pointer(address),
                           .nbytes = nbytes,
                           .elements = elements,
                           .dtype = dtype,
                           .block = BlockTable::instance().find(owner, {pointer(block), block_nbytes}),
                           .keep = std::move(keep)};
           }),
           py::arg("keep"), py::arg("address"), py::arg("elements"), py::arg("nbytes"), py::arg("dtype"),
           py::arg("owner"), py::arg("block"), py::arg("block_nbytes"),
           "keep: the array; owner: the object with which the block is freed.")
      .def(
          "part",
          [](const Memory& m, std::uintptr_t address, std::uint64_t elements, std::uint64_t nbytes) {
            Memory part = m;
            part.address = pointer(address);
            part.elements = elements;
            part.nbytes = nbytes;
            return part;
          },
          py::arg("address"), py::arg("elements"), py::arg("nbytes"), "Elements that lie inside of it.")
      .def_property_readonly("address", [](const Memory& m) { return reinterpret_cast<std::uintptr_t>(m.address); })
      .def_readonly("nbytes", &Memory::nbytes)
      .def_readonly("elements", &Memory::elements)
      .def_readonly("dtype", &Memory::dtype)
      .def_property_readonly(
          "device", [](const Memory& m) { return m.device == nullptr ? -1 : m.device->ordinal(); },
          "The number of its GPU; -1: it is the host's.")
      .def_property_readonly(
          "shape", [](const Memory& m) { return py::tuple(m.keep.attr("shape")); }, "Of the array, for messages.")
      .def_property_readonly(
          "block",
          [](const Memory& m) {
            return std::tuple(reinterpret_cast<std::uintptr_t>(m.block.bytes.data()), m.block.bytes.size(),
                              m.block.identity);
          },
          "Address, bytes, and a number that no other block ever has.");
  module.def(
      "describe_on_device", &describe_on_device, py::arg("library"), py::arg("keep"), py::arg("address"),
      py::arg("elements"), py::arg("nbytes"), py::arg("dtype"), py::arg("stream"),
      "The memory of an array of a GPU, by the CUDA driver of this name; None for other memory. stream: a CUstream "
      "as a number, in which the array is made and used.");
  module.def("describe_array", &describe_array, py::arg("array"), py::arg("writable"),
             "The memory of a numpy array; None for anything else, and for arrays that cannot be used in place.");
  module.def(
      "renew_block", [](std::uint64_t identity) { BlockTable::instance().renew(identity); }, py::arg("identity"),
      "The block holds other memory from now on: its next use is that of a new block.");
  module.def(
      "knows_block", [](std::uint64_t identity) { return BlockTable::instance().knows(identity); }, py::arg("identity"),
      "Whether a block has been used, and neither freed nor renewed since.");
}

}  // namespace bps::python
