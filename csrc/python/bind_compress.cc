// SPDX-License-Identifier: Apache-2.0
// The codecs by themselves: to look at what a method makes of numbers, without a job.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "compress/compression.h"
#include "compress/label.h"
#include "core/error.h"
#include "python/bind.h"

namespace bps::python {

namespace py = pybind11;

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using compress::Compression;

std::span<const float> values_of(const Floats& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}

}  // namespace

void bind_compress(py::module_& module) {
  py::class_<Compression, std::shared_ptr<Compression>>(
      module, "Codec", "A method of compression, made from what users write, such as 'topk:k=0.01'.")
      .def(py::init([](const std::string& text) {
             return std::const_pointer_cast<Compression>(compress::parse_compression(text));
           }),
           py::arg("text"), "Raises InvalidArgumentError, which says what is wrong.")
      .def_readonly("text", &Compression::text)
      .def_readonly("feedback", &Compression::feedback)
      .def_readonly("momentum", &Compression::momentum)
      .def(
          "encoded_size",
          [](const Compression& one, std::size_t elements) { return one.codec->encoded_size(elements); },
          py::arg("elements"), "Bytes of so many elements, without the label of a payload.")
      .def(
          "encode",
          [](const Compression& one, const Floats& array, std::uint64_t seed) {
            std::string bytes(one.codec->encoded_size(static_cast<std::size_t>(array.size())), '\0');
            one.codec->encode(values_of(array), std::as_writable_bytes(std::span(bytes)), seed);
            return py::bytes(bytes);
          },
          py::arg("array"), py::arg("seed") = 0, "The code of a float32 array. Random methods draw from `seed`.")
      .def(
          "decode",
          [](const Compression& one, const py::bytes& code, std::size_t elements) {
            const std::string_view bytes(code);
            Floats array(static_cast<py::ssize_t>(elements));
            const std::span<float> to(array.mutable_data(), elements);
            if (one.codec->decode(std::as_bytes(std::span(bytes)), to, compress::Into::kReplace) !=
                compress::Decoded::kOk) {
              throw Error(ErrorCode::kInvalidArgument,
                          "these are not " + std::to_string(elements) + " elements in '" + one.text + "'",
                          "pass what encode() has returned, and the number of elements that it was given");
            }
            return array;
          },
          py::arg("code"), py::arg("elements"), "A float32 array of so many elements.");
  module.def("codec_names", [] {
    std::vector<std::string> names;
    for (const std::string_view name : compress::codec_names()) names.emplace_back(name);
    return names;
  });
  module.def("codec_seed", &compress::seed_of, py::arg("tensor"), py::arg("partition"), py::arg("round"),
             py::arg("sender"), "What a push draws from; the sender is the member, and 2**32 - 1 for the server.");
}

}  // namespace bps::python
