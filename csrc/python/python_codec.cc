// SPDX-License-Identifier: Apache-2.0
#include "python/python_codec.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "compress/codec_call.h"
#include "compress/store.h"

namespace bps::python {

namespace py = pybind11;

using compress::Decoded;
using compress::Into;

namespace {

// One of these is the first byte of a payload.
constexpr std::byte kFailed{0};
constexpr std::byte kGood{1};

constexpr std::size_t kMostText = 500;  // bounds the text of an exception, in an error that all ranks are sent

// Returns a text such as "ValueError: no", without where it was raised.
std::string text_of(const py::error_already_set& raised) {
  std::string text = raised.what();
  text.resize(std::min({text.size(), text.find("\n\nAt:\n"), kMostText}));
  return text;
}

// Copies the `size` bytes that a function returns. Returns false when it raises, or returns something else, which then
// is the failure of this call.
template <typename... Args>
bool call(const std::string& codec, const char* name, const py::object& function, void* into, std::size_t size,
          Args&&... args) {
  const compress::CodecCall within(codec);
  const std::string what = std::string(name) + " of the codec '" + codec + "'";
  try {
    const py::object result = function(std::forward<Args>(args)...);
    const auto bytes = result.cast<std::string_view>();
    if (bytes.size() == size) {
      std::memcpy(into, bytes.data(), size);
      return true;
    }
    compress::CodecCall::fail(what + " returned " + std::to_string(bytes.size()) + " bytes instead of " +
                              std::to_string(size));
  } catch (py::error_already_set& raised) {
    compress::CodecCall::fail(what + " raised " + text_of(raised));
    raised.discard_as_unraisable(what.c_str());
  } catch (const std::exception& error) {
    compress::CodecCall::fail(what + " failed: " + error.what());
  }
  return false;
}

}  // namespace

PythonCodec::PythonCodec(std::string name, py::object encode, py::object decode, std::size_t block,
                         std::size_t block_bytes)
    : name_(std::move(name)),
      functions_(*new Functions{std::move(encode), std::move(decode)}),
      block_(block),
      block_bytes_(block_bytes) {}

std::size_t PythonCodec::encoded_size(std::size_t elements) const {
  return elements == 0 ? 0 : sizeof kGood + (elements + block_ - 1) / block_ * block_bytes_;
}

void PythonCodec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const {
  if (from.empty()) return;
  const py::gil_scoped_acquire acquired;
  const std::span<std::byte> code = to.subspan(1);
  const py::bytes floats(reinterpret_cast<const char*>(from.data()), from.size_bytes());
  const bool good = call(name_, "encode()", functions_.encode, code.data(), code.size(), floats, seed);
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
    if (!call(name_, "decode()", functions_.decode, values.data(), size, code, values.size())) return Decoded::kFailed;
  }
  compress::choose(into, [&]<Into kInto>() {
    for (std::size_t i = 0; i < to.size(); ++i) compress::put<kInto>(values[i], to[i]);
  });
  return Decoded::kOk;
}

}  // namespace bps::python
