// SPDX-License-Identifier: Apache-2.0
#include "node/stacks.h"

#include <unistd.h>

#include <mutex>
#include <utility>

#include "core/fork.h"

namespace bps::node {
namespace {

std::mutex g_mutex;
// This is never destroyed: a forked child that ends would have to do so after the run time system that it belongs to.
std::function<std::string()>& g_show = *new std::function<std::string()>;
pid_t g_shown_by = 0;
[[maybe_unused]] const bool g_held = (hold_across_fork(g_mutex), true);

}  // namespace

void show_stacks_by(std::function<std::string()> show) {
  const std::lock_guard lock(g_mutex);
  g_show = std::move(show);
  g_shown_by = ::getpid();
}

std::string stacks() {
  const std::lock_guard lock(g_mutex);
  return g_show && g_shown_by == ::getpid() ? g_show() : "";
}

}  // namespace bps::node
