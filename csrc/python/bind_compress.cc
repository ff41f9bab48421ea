// SPDX-License-Identifier: Apache-2.0
// Binds the codecs by themselves, for bps_rdma.compression.
#include <pybind11/stl.h>

#include <cstring>
#include <string_view>
#include <vector>

#include "compress/codec_call.h"
#include "compress/compression.h"
#include "core/error.h"
#include "core/float_environment.h"
#include "python/bind.h"
#include "python/python_codec.h"

namespace bps::python {

namespace py = pybind11;

namespace {

void rethrow_failure() {
  const std::string failure = compress::CodecCall::take_failure();
  if (!failure.empty()) throw Error(ErrorCode::kInvalidArgument, failure, compress::kMendCodec);
}

}  // namespace

using compress::Compression;

void bind_compress(py::module_& module) {
  module.def(
      "add_codec",
      [](const std::string& name, const py::object& encode, const py::object& decode, std::size_t block,
         std::size_t block_bytes) {
        compress::add_codec(name, std::make_shared<const PythonCodec>(name, encode, decode, block, block_bytes));
      },
      py::arg("name"), py::arg("encode"), py::arg("decode"), py::arg("block"), py::arg("block_bytes"),
      "See bps_rdma.compression.register().");
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
          [](const Compression& one, const py::bytes& floats, std::uint64_t seed) {
            const std::string_view from(floats);
            std::vector<float> values(from.size() / sizeof(float));
            std::memcpy(values.data(), from.data(), values.size() * sizeof(float));
            std::string code(one.codec->encoded_size(values.size()), '\0');
            const DefaultFloatEnvironment not_the_callers;
            one.codec->encode(values, std::as_writable_bytes(std::span(code)), seed);
            rethrow_failure();
            return py::bytes(code);
          },
          py::arg("floats"), py::arg("seed"))
      .def(
          "decode",
          [](const Compression& one, const py::bytes& code, std::size_t elements) {
            const std::string_view from(code);
            std::vector<float> values(elements);
            const DefaultFloatEnvironment not_the_callers;
            const compress::Decoded decoded =
                one.codec->decode(std::as_bytes(std::span(from)), values, compress::Into::kReplace);
            rethrow_failure();
            if (decoded != compress::Decoded::kOk) {
              throw Error(ErrorCode::kInvalidArgument,
                          "these are not " + std::to_string(elements) + " elements in '" + one.text + "'",
                          "pass what encode() has returned, and the number of elements that it was given");
            }
            return py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
          },
          py::arg("code"), py::arg("elements"));
}

}  // namespace bps::python
