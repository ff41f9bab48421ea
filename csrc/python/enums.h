// SPDX-License-Identifier: Apache-2.0
// Binds the enums of the core as enums of Python's own kind. Each operation passes some, so members are found by
// identity: pybind11's own caster calls into Python for each of them, half a microsecond for each operation.
#pragma once

#include <pybind11/native_enum.h>

#include <initializer_list>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "worker/operation.h"

namespace bps::python {

// Holds the members of an enum, once it is bound. They live as long as the process does.
template <typename E>
inline std::vector<std::pair<E, PyObject*>> g_members;

template <typename E>
void bind_enum(pybind11::module_& module, const char* name, std::initializer_list<std::pair<const char*, E>> members) {
  pybind11::native_enum<E> made(module, name, "enum.Enum");
  for (const auto& [text, value] : members) made.value(text, value);
  made.finalize();
  for (const auto& [text, value] : members) {
    pybind11::object member = module.attr(name).attr(text);
    g_members<E>.emplace_back(value, member.release().ptr());
  }
}

}  // namespace bps::python

namespace pybind11::detail {

constexpr auto enum_name(bps::Dtype) {
  return const_name("bps_rdma._core.Dtype");
}
constexpr auto enum_name(bps::ReduceOp) {
  return const_name("bps_rdma._core.ReduceOp");
}
constexpr auto enum_name(bps::tensor::OperationKind) {
  return const_name("bps_rdma._core.Kind");
}

template <typename E>
struct enum_member_caster {
  PYBIND11_TYPE_CASTER(E, enum_name(E{}));

  bool load(handle source, bool) {
    for (const auto& [known, member] : bps::python::g_members<E>) {
      if (member != source.ptr()) continue;
      value = known;
      return true;
    }
    return false;
  }

  static handle cast(E source, return_value_policy, handle) {
    for (const auto& [known, member] : bps::python::g_members<E>) {
      if (known == source) return handle(member).inc_ref();
    }
    throw cast_error("the enum has no such member");
  }
};

template <>
struct type_caster_enum_type_enabled<bps::Dtype> : std::false_type {};
template <>
struct type_caster_enum_type_enabled<bps::ReduceOp> : std::false_type {};
template <>
struct type_caster_enum_type_enabled<bps::tensor::OperationKind> : std::false_type {};
template <>
struct type_caster<bps::Dtype> : enum_member_caster<bps::Dtype> {};
template <>
struct type_caster<bps::ReduceOp> : enum_member_caster<bps::ReduceOp> {};
template <>
struct type_caster<bps::tensor::OperationKind> : enum_member_caster<bps::tensor::OperationKind> {};

}  // namespace pybind11::detail
