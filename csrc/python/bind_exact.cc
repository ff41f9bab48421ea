// SPDX-License-Identifier: Apache-2.0
// Binds the native half of bps_rdma.ExactSum.
#include <pybind11/stl.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/float_environment.h"
#include "python/bind.h"
#include "python/interruptible.h"
#include "python/memory.h"
#include "server/exact_accumulator.h"

namespace bps::python {

namespace py = pybind11;

using server::ExactAccumulator;

namespace {

void require(const Memory& memory, Dtype dtype, std::size_t elements) {
  if (memory.dtype == dtype && memory.elements == elements) return;
  throw Error(ErrorCode::kInvalidArgument,
              std::to_string(memory.elements) + " elements of " + std::string(to_string(memory.dtype)) +
                  " cannot be added to, or taken from, " + std::to_string(elements) + " of " +
                  std::string(to_string(dtype)),
              "pass an array of the size and dtype of the one that the sum was made for");
}

void require(const std::vector<std::uint32_t>& elements, std::size_t count) {
  for (const std::uint32_t element : elements) {
    if (element < count) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "there is no element " + std::to_string(element) + " among " + std::to_string(count),
                "pass elements of the sum");
  }
}

std::span<double> doubles(const Memory& memory) {
  return {reinterpret_cast<double*>(memory.address), memory.elements};
}

}  // namespace

void bind_exact(py::module_& module) {
  py::class_<ExactAccumulator>(module, "ExactAccumulator", "See bps_rdma.ExactSum. One thread at a time.")
      .def(py::init<Dtype, std::size_t>(), py::arg("dtype"), py::arg("elements"))
      .def_property_readonly("dtype", &ExactAccumulator::dtype)
      .def_property_readonly("elements", &ExactAccumulator::elements)
      .def("clear", &ExactAccumulator::clear)
      .def(
          "add",
          [](ExactAccumulator& sum, const Memory& elements) {
            require(elements, sum.dtype(), sum.elements());
            const WithoutGil release;
            const DefaultFloatEnvironment not_the_callers;
            sum.add(elements.address);
          },
          py::arg("elements"))
      .def(
          "copy_sums",
          [](const ExactAccumulator& sum, const Memory& into) {
            require(into, Dtype::kFloat64, sum.elements());
            std::ranges::copy(sum.sums(), doubles(into).begin());
          },
          py::arg("into"), "The sums as float64; NaN where that does not hold one.")
      .def("beyond", &ExactAccumulator::beyond, "The elements that are NaN there.")
      .def_property_readonly_static("parts_per_element",
                                    [](const py::object&) { return server::Superaccumulator::kParts; })
      .def(
          "copy_specials",
          [](const ExactAccumulator& sum, const std::vector<std::uint32_t>& elements, const Memory& into) {
            require(into, Dtype::kBool, elements.size() * 3);
            sum.specials(elements, {reinterpret_cast<bool*>(into.address), into.elements});
          },
          py::arg("elements"), py::arg("into"), "For each of these elements: is it NaN, infinite, negative infinite?")
      .def(
          "copy_parts",
          [](const ExactAccumulator& sum, const std::vector<std::uint32_t>& elements, const Memory& into) {
            require(elements, sum.elements());
            require(into, Dtype::kFloat64, elements.size() * server::Superaccumulator::kParts);
            std::ranges::copy(sum.parts(elements), doubles(into).begin());
          },
          py::arg("elements"), py::arg("into"), "Numbers for each of these elements that can be added.")
      .def(
          "round",
          [](const ExactAccumulator& sum, const Memory& sums, const std::vector<std::uint32_t>& elements,
             const Memory& parts, std::uint32_t divisor, bool is_divided, const Memory& into) {
            require(elements, sum.elements());
            require(sums, Dtype::kFloat64, sum.elements());
            require(parts, Dtype::kFloat64, elements.size() * server::Superaccumulator::kParts);
            require(into, sum.dtype(), sum.elements());
            const DefaultFloatEnvironment not_the_callers;
            sum.round(doubles(sums), elements, doubles(parts), divisor, is_divided, into.address);
          },
          py::arg("sums"), py::arg("elements"), py::arg("parts"), py::arg("divisor"), py::arg("is_divided"),
          py::arg("into"), "The ranks' sum, divided and rounded.");
}

}  // namespace bps::python
