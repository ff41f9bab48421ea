// SPDX-License-Identifier: Apache-2.0
// Binds messages from one rank to another one: what a message consists of is started by one call, and waited for by
// one. See bps_rdma/operations/lanes.py.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "node/process.h"
#include "python/bind.h"
#include "python/handle.h"
#include "python/interruptible.h"
#include "python/memory.h"
#include "worker/worker.h"

namespace py = pybind11;

namespace bps::python {
namespace {

using node::Process;
using TensorOfMessage = std::shared_ptr<worker::Tensor>;

// One operation of a message. No message survives the loss of a server.
struct Piece {
  TensorOfMessage tensor;
  worker::Request request;
  const Memory* source;
  const Memory* target;
  std::shared_ptr<worker::Operation> started;
};

Piece piece_of(const TensorOfMessage& tensor, tensor::OperationKind kind, const Memory& source, const Memory& target,
               std::int32_t priority, bool awaited) {
  Piece piece{.tensor = tensor, .request = {}, .source = &source, .target = &target, .started = nullptr};
  piece.request.kind = kind;
  piece.request.input = source.address;
  piece.request.output = target.address;
  piece.request.input_allocation = source.block;
  piece.request.output_allocation = target.block;
  piece.request.priority = priority;
  piece.request.awaited = awaited;
  return piece;
}

// Starts the pieces, and then wakes each loop once. Throws where one cannot be started; those before it go on.
void start_pieces(Process& process, std::vector<Piece>& pieces, std::optional<double> timeout_s, bool wakes) {
  const WithoutGil released;
  const Process::Call call(process);
  const double seconds = timeout_s ? checked_timeout(*timeout_s) : process.operation_timeout_s();
  struct Waker {
    std::vector<Piece>& pieces;
    bool wakes;
    ~Waker() {
      for (const Piece& piece : pieces) {
        if (wakes && piece.started && piece.started->completion.progress) piece.started->completion.progress->wake();
      }
    }
  };
  const Waker waker{pieces, wakes};
  for (Piece& piece : pieces) {
    piece.request.timeout_s = seconds;
    piece.started = process.worker().start(piece.tensor, piece.request, {}, false);
  }
}

void start_message(Process& process, const TensorOfMessage& notices, const Memory& half, const Memory& whole,
                   const py::tuple& contents, std::int32_t priority, bool is_first, bool awaited,
                   std::optional<double> timeout_s, py::list begun) {
  std::vector<Piece> pieces;
  pieces.reserve(1 + contents.size());
  pieces.push_back(piece_of(notices, tensor::OperationKind::kAllGather, half, whole, priority, awaited && is_first));
  for (const py::handle& content : contents) {
    const auto parts = py::reinterpret_borrow<py::tuple>(content);
    const auto* memory = parts[1].cast<const Memory*>();
    pieces.push_back(piece_of(parts[0].cast<TensorOfMessage>(), tensor::OperationKind::kBroadcast, *memory, *memory,
                              priority, awaited));
    pieces.back().request.root = parts[2].cast<std::uint32_t>();
  }
  const auto keep_started = [&] {
    for (Piece& piece : pieces) {
      if (!piece.started) break;
      begun.append(
          std::make_unique<Handle>(std::move(piece.started), py::none(), piece.source->keep, piece.target->keep));
    }
  };
  try {
    start_pieces(process, pieces, timeout_s, !(awaited && is_first));
  } catch (...) {  // also where memory is short: what has begun uses the notice
    keep_started();
    throw;
  }
  keep_started();
}

}  // namespace

void bind_message(py::module_& module) {
  module.def("start_message", &start_message, py::arg("process"), py::arg("notices"), py::arg("half"), py::arg("whole"),
             py::arg("contents"), py::arg("priority"), py::arg("is_first"), py::arg("awaited"), py::arg("timeout_s"),
             py::arg("begun"),
             "Starts the exchange of notices of a message, and the broadcasts of its contents: (tensor, memory, root) "
             "of each. Appends their handles to `begun`, in this order, also of those before one that fails. is_first: "
             "no other message has to be waited for before.");
}

}  // namespace bps::python
