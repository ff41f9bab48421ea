// SPDX-License-Identifier: Apache-2.0
// Chooses the address of this host that its peers should use.
#pragma once

#include <string>
#include <vector>

namespace bps::node {

// Returns `wanted` if given; else the first address of the first of `interfaces`; else the source address of the route
// to the scheduler, or, where `interfaces` excludes that, of the first interface that it leaves. Throws
// kInvalidArgument when there is no such interface, or it has no address.
std::string local_address(const std::string& wanted, const std::string& interfaces, const std::string& scheduler_host);

// Throws kInvalidArgument when the interface does not exist or has no address.
std::string address_of_interface(const std::string& interface);
// Reads a list of interfaces as NCCL reads NCCL_SOCKET_IFNAME: names, or beginnings of names, with commas. '=' in front
// means names only, '^' in front means all but these, which names none. A word that is no beginning is kept.
std::vector<std::string> interface_names(const std::string& list);
std::vector<std::string> interface_names(const std::string& list, const std::vector<std::string>& all);
// Returns true when a list with '^' in front leaves out this interface.
bool excludes(const std::string& list, const std::string& interface);
// Returns the interface that has this numeric address, or "".
std::string interface_with(const std::string& address);

// Returns an address of this host that others can use: that of the route to `host`. If this leads nowhere, or is a
// loopback address, it is that of the route to everywhere, or of an interface; at worst a loopback address.
std::string address_for_others(const std::string& host);
// Does the same for a name or address that is to lead others here: it stays, unless it is another host's or loopback.
std::string name_for_others(const std::string& host);

// Returns a name or an address as a numeric address; "" when it cannot be resolved.
std::string numeric_address(const std::string& host);

// Returns true for 127.0.0.0/8, ::1 and "localhost", which no other host can mean. A name does not count, wherever it
// leads: many hosts map their own to a loopback address.
bool is_loopback(const std::string& host);
// Returns true when this name or address leads back to this host.
bool is_of_this_host(const std::string& host);

std::string host_name();
// Returns 0 where the kernel does not tell. Process ids are unique only within a namespace. Containers with namespaces
// of their own may share the host's name, the names of local sockets, and folders.
unsigned long long pid_namespace();

}  // namespace bps::node
