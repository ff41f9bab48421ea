// SPDX-License-Identifier: Apache-2.0
#include "python/python_codec.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "compress/store.h"

namespace bps::python {

namespace py = pybind11;

using compress::Decoded;
using compress::Into;

namespace {

// The first byte of a payload.
constexpr std::byte kFailed{0};
constexpr std::byte kGood{1};

// Bytes of so many as a function returns them; none when it raises, or returns something else.
template <typename... Args>
bool call(const py::object& function, const char* what, void* into, std::size_t size, Args&&... args) {
  try {
    const py::object result = function(std::forward<Args>(args)...);
    const auto bytes = result.cast<std::string_view>();
    if (bytes.size() == size) {
      std::memcpy(into, bytes.data(), size);
      return true;
    }
    PyErr_Format(PyExc_ValueError, "%s returned %zu bytes instead of %zu", what, bytes.size(), size);
    PyErr_WriteUnraisable(function.ptr());
  } catch (py::error_already_set& raised) {
    raised.discard_as_unraisable(what);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(function.ptr());
  }
  return false;
}

}  // namespace

PythonCodec::PythonCodec(py::object encode, py::object decode, std::size_t block, std::size_t block_bytes)
    : functions_(*new Functions{std::move(encode), std::move(decode)}), block_(block), block_bytes_(block_bytes) {}

std::size_t PythonCodec::encoded_size(std::size_t elements) const {
  return elements == 0 ? 0 : sizeof kGood + (elements + block_ - 1) / block_ * block_bytes_;
}

void PythonCodec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const {
  if (from.empty()) return;
  const py::gil_scoped_acquire acquired;
  const std::span<std::byte> code = to.subspan(1);
  const py::bytes floats(reinterpret_cast<const char*>(from.data()), from.size_bytes());
  const bool good = call(functions_.encode, "encode", code.data(), code.size(), floats, seed);
  to[0] = good ? kGood : kFailed;
  if (!good) std::ranges::fill(code, std::byte{});
}

Decoded PythonCodec::decode(std::span<const std::byte> from, std::span<float> to, Into into) const {
  if (from.size() != encoded_size(to.size())) return Decoded::kWrongSize;
  if (to.empty()) return Decoded::kOk;
  if (from[0] != kGood) return Decoded::kMalformed;
  std::vector<float> values(to.size());
  {
    const py::gil_scoped_acquire acquired;
    const py::bytes code(reinterpret_cast<const char*>(from.data()) + 1, from.size() - 1);
    const std::size_t size = values.size() * sizeof(float);
    if (!call(functions_.decode, "decode", values.data(), size, code, values.size())) return Decoded::kMalformed;
  }
  compress::choose(into, [&]<Into kInto>() {
    for (std::size_t i = 0; i < to.size(); ++i) compress::put<kInto>(values[i], to[i]);
  });
  return Decoded::kOk;
}

}  // namespace bps::python
