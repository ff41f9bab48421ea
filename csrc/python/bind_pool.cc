// SPDX-License-Identifier: Apache-2.0
// Answers `bps run --pool` and `bps pool` about pools of servers.
#include <pybind11/stl.h>

#include <map>
#include <optional>

#include "core/settings.h"
#include "pool/client.h"
#include "pool/job_settings.h"
#include "pool/jobs.h"
#include "pool/key_file.h"
#include "pool/report.h"
#include "python/bind.h"
#include "python/interruptible.h"

namespace py = pybind11;

namespace bps::python {
namespace {

using Variables = std::map<std::string, std::string>;

pool::NamedValues settings_in(const Variables& variables) {
  return pool::settings_of_job(SettingValues([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  }));
}

}  // namespace

void bind_pool(py::module_& module) {
  py::class_<pool::Client>(module, "PoolClient", "A connection to a pool of servers.")
      .def(py::init([](const std::string& host, std::uint16_t port, const std::string& user, const std::string& key,
                       double timeout_s) {
             return std::make_unique<pool::Client>(host, port, pool::UserKey{user, key}, checked_timeout(timeout_s));
           }),
           py::arg("host"), py::arg("port"), py::arg("user"), py::arg("key"), py::arg("timeout_s"),
           py::call_guard<Interruptible>())
      .def_property_readonly("address", &pool::Client::address, "The address at which the pool reaches this host.")
      .def(
          "reserve",
          [](pool::Client& client, const std::string& job, std::uint32_t cores, std::uint64_t memory,
             const Variables& variables) {
            const pool::Reserved reserved = client.reserve({job, cores, memory, settings_in(variables)});
            return std::tuple(reserved.lease, reserved.cores, reserved.memory);
          },
          py::arg("job"), py::arg("cores"), py::arg("memory"), py::arg("variables"), py::call_guard<Interruptible>(),
          "(lease, cores, memory) for a server; 0 asks for what is usual there.")
      .def(
          "begin",
          [](pool::Client& client, std::uint64_t lease, const Variables& variables, const std::string& secret) {
            client.begin(lease, settings_in(variables), secret);
          },
          py::arg("lease"), py::arg("variables"), py::arg("secret"), py::call_guard<Interruptible>(),
          "Starts the reserved server for the job that these variables describe.")
      .def("end", &pool::Client::end, py::arg("job"), py::call_guard<Interruptible>(),
           "Ends the server of a job; why it had ended already, if it had.")
      .def("list", &pool::Client::list, py::call_guard<Interruptible>(), "JSON: what the pool has, and its jobs.");
  module.def(
      "pool_metrics",
      [] {
        std::vector<std::tuple<std::string, std::string, std::string>> told;
        for (const MetricFamily& family : pool::pool_families(pool::Jobs({}, {}, "", std::nullopt), {})) {
          told.emplace_back(family.name, std::string(name_of(family.type)), family.help);
        }
        return told;
      },
      "(name, type, help) of each metric that a pool serves.");
  module.def(
      "read_pool_key",
      [](const std::string& path, const std::string& user) {
        pool::UserKey found = pool::read_key(path, user);
        return std::pair(std::move(found.user), std::move(found.key));
      },
      py::arg("path"), py::arg("user"), "(user, key): the only line of the file, or that of the user.");
}

}  // namespace bps::python
