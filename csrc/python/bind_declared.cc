// SPDX-License-Identifier: Apache-2.0
// Binds declared tensors, and operations whose view has ended.
#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "python/bind.h"
#include "python/interruptible.h"
#include "python/memory.h"
#include "worker/operation.h"

namespace py = pybind11;

namespace bps::python {
namespace {

using MayWait = py::call_guard<Interruptible>;

std::vector<std::pair<std::uint64_t, std::uint64_t>> encoded_elements(const worker::Tensor& tensor) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> runs;
  for (std::uint64_t i = 0; i < tensor.encoded.size(); ++i) {
    if (!tensor.encoded[i]) continue;
    const tensor::Partitioning::Piece piece = tensor.whole.piece(i);
    const std::uint64_t begin = piece.offset / size_of(tensor.dtype);
    const std::uint64_t end = begin + piece.length / size_of(tensor.dtype);
    if (!runs.empty() && runs.back().second == begin) {
      runs.back().second = end;
    } else {
      runs.emplace_back(begin, end);
    }
  }
  return runs;
}

void bind_tensors(py::module_& module) {
  py::class_<worker::Tensor, std::shared_ptr<worker::Tensor>>(module, "Tensor", "A declared name.")
      .def_readonly("name", &worker::Tensor::name)
      .def_readonly("id", &worker::Tensor::id)
      .def_readonly("bytes", &worker::Tensor::bytes)
      .def_readonly("dtype", &worker::Tensor::dtype)
      .def_readonly("shape", &worker::Tensor::shape)
      .def_property_readonly(
          "compression", [](const worker::Tensor& t) { return t.compression; }, "As it was declared; empty: none.")
      .def_property_readonly(
          "plain_because",
          [](const worker::Tensor& t) -> std::string {
            if (!t.compressor) return "";
            if (!t.compressor->shortens()) return "code";
            return t.stays_on_host ? "host" : "";
          },
          "Why it travels as it is although it was declared with a compression: its code would be no shorter, or all "
          "members of the job are on this host and share memory. Empty: it is compressed, or was not declared so.")
      .def_property_readonly("elements", [](const worker::Tensor& t) { return t.bytes / size_of(t.dtype); })
      .def_property_readonly("group", [](const worker::Tensor& t) { return t.group->id; })
      .def_property(
          "next_round", [](const worker::Tensor& t) { return t.next_round.load(); },
          [](worker::Tensor& t, std::uint32_t round) {
            t.next_round.store(round);
            t.next_pull.store(round);
          },
          "The round of the next operation on it; set before its first one.")
      .def(
          "fits",
          [](const worker::Tensor& t, const Memory& memory, std::uint64_t elements) {
            return t.dtype == memory.dtype && t.bytes == elements * size_of(memory.dtype);
          },
          py::arg("memory"), py::arg("elements"), "Whether `elements` of the dtype of `memory` are what was declared.")
      .def(
          "copy_feedback",
          [](worker::Tensor& t, bool momentum, const Memory& memory, bool writes) {
            if (!t.compressor) return false;
            const auto all = t.compressor->remembered(t.whole);
            const std::span<float> kept = momentum ? all.momentum : all.residual;
            if (kept.empty()) return false;
            if (memory.nbytes != kept.size_bytes()) {
              throw Error(ErrorCode::kInvalidArgument,
                          std::to_string(memory.elements) + " elements are not what '" + t.name + "' has",
                          "pass what was saved of a tensor of this size");
            }
            auto* const bytes = reinterpret_cast<std::byte*>(kept.data());
            std::memcpy(writes ? bytes : memory.address, writes ? memory.address : bytes, memory.nbytes);
            return true;
          },
          py::arg("momentum"), py::arg("memory"), py::arg("writes"),
          "Copies what this rank remembers of push_pulls, while none is in progress. False: it remembers nothing.")
      .def_property_readonly("encoded", &encoded_elements,
                             "The runs of elements, [begin, end) each, of which this rank may remember something: it "
                             "encodes them in push_pulls, for itself or for its host.")
      .def_property_readonly("partitions", [](const worker::Tensor& t) { return t.whole.count(); })
      .def_property_readonly("group_size", [](const worker::Tensor& t) { return t.group->size(); })
      .def_property_readonly(
          "server_bytes",
          [](const worker::Tensor& t) {
            const worker::Plan& plan = t.plans.whole;
            std::vector<std::uint64_t> bytes(plan.size(), 0);
            for (std::size_t place = 0; place < plan.size(); ++place) {
              for (const worker::Part& part : plan[place]) bytes[place] += t.whole.piece(part.partition).length;
            }
            return bytes;
          },
          "Bytes of push_pull by [loop of this worker x loop of a server, or of a relay of this host].");
}

// Says how an operation was late, without its name, which each rank says itself.
std::string lateness(const worker::Operation& operation) {
  if (operation.completion.is_given_up()) return worker::kInterrupted;
  const auto why = operation.failure();
  if (!why || why->code() != ErrorCode::kTimeout) return "";
  return std::string(why->what()).substr(operation.describe().size() + 2);
}

std::map<std::uint32_t, std::uint64_t> by_partition(const std::vector<worker::Begun>& all) {
  std::map<std::uint32_t, std::uint64_t> found;
  for (const auto& [partition, bytes] : all) found[partition] = bytes;
  return found;
}

// Binds what job.py needs to go on with operations in the next view.
void bind_suspended(py::module_& module) {
  using worker::Operation;
  py::class_<Operation, std::shared_ptr<Operation>>(module, "Suspended", "An operation whose view has ended.")
      .def_property_readonly("tensor", [](const Operation& o) { return o.tensor; })
      .def_readonly("round", &Operation::round)
      .def_property_readonly(
          "missing", [](const Operation& o) { return by_partition(o.suspension().missing()); },
          "Of partitions whose result is wanted here and lacks: the bytes of it that have come over the output. The "
          "rest of the input is as it was.")
      .def_property_readonly(
          "whole", [](const Operation& o) { return by_partition(o.suspension().whole()); },
          "Partitions whose result is wanted here and has come, and its bytes.")
      .def(
          "length", [](const Operation& o, std::uint32_t partition) { return o.suspension().length(partition); },
          py::arg("partition"), "Bytes of its result.")
      .def(
          "read",
          [](const Operation& o, std::uint32_t partition, const Memory& into) {
            o.suspension().read(partition, {into.address, static_cast<std::size_t>(into.nbytes)});
          },
          py::arg("partition"), py::arg("into"), MayWait(), "The first bytes of the result of a partition.")
      .def(
          "write",
          [](Operation& o, std::uint32_t partition, const Memory& from) {
            o.suspension().write(partition, {from.address, static_cast<std::size_t>(from.nbytes)});
          },
          py::arg("partition"), py::arg("from_"), MayWait(), "They come from another rank.")
      .def(
          "take_landed", [](Operation& o) { o.suspension().take_landed(); }, MayWait(),
          "Takes the results that have landed in buffers.")
      .def_property_readonly(
          "has_failed", [](const Operation& o) { return !o.is_suspended() || o.completion.is_given_up(); },
          "At its deadline, on all ranks, or its caller was interrupted: who called it knows.")
      .def_property_readonly("lateness", &lateness, "Why it is not to be started again; empty where it may be.")
      .def("complete", [](Operation& o) { o.suspension().resolve(worker::Resumption::kComplete); })
      .def("abort", [](Operation& o) { o.suspension().resolve(worker::Resumption::kAborted); })
      .def(
          "fail",
          [](Operation& o, const std::string& why) {
            o.abort_suspended(worker::given_up_elsewhere(o.describe() + ": ", why));
          },
          py::arg("why"), "Another rank has given it up.");
}

}  // namespace

void bind_declared(py::module_& module) {
  bind_tensors(module);
  bind_suspended(module);
}

}  // namespace bps::python
