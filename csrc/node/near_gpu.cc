// SPDX-License-Identifier: Apache-2.0
#include "node/near_gpu.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/log.h"
#include "device/devices.h"

namespace bps::node {
namespace {

constexpr std::size_t kDomain = 4;  // digits of the domain in an address, as the kernel writes it

// CUDA's driver is opened only where there is something to choose.
bool are_several() {
  std::error_code none;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", none);
  return std::distance(begin(devices), end(devices)) > 1;
}

std::optional<device::cuda::Ordinal> number_in(std::string_view text) {
  device::cuda::Ordinal number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || stop != text.data() + text.size() || number < 0) return std::nullopt;
  return number;
}

// Returns an address as the kernel writes it; nothing where the text is none. nvidia-smi writes more digits of the
// domain, and capitals.
std::optional<std::string> address_in(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char one) { return static_cast<char>(std::tolower(one)); });
  const bool is_address =
      std::ranges::count(text, ':') == 2 && text.find_first_not_of("0123456789abcdef:.") == text.npos;
  if (!is_address) return std::nullopt;
  if (const std::size_t digits = text.find(':'); digits > kDomain) text.erase(0, digits - kDomain);
  std::error_code none;
  if (!std::filesystem::exists("/sys/bus/pci/devices/" + text, none)) {
    log_warning("BPS_RDMA_NEAR_GPU names " + text + ", where this machine has no PCI device: all RDMA devices are far");
  }
  return text;
}

std::string gpu_of(const Settings& settings) {
  const std::string& wish = settings.rdma.near_gpu;
  if (wish.empty()) return "";
  if (auto address = address_in(wish)) return *address;
  const auto number = number_in(wish);
  if (!number && wish != "auto") {
    throw Error(ErrorCode::kInvalidArgument, "BPS_RDMA_NEAR_GPU='" + wish + "' is not understood",
                "give auto, the number of a GPU, or its PCI address as in 0000:1a:00.0");
  }
  if (!number && !are_several()) return "";
  try {
    return device::address_of_gpu(settings.worker.cuda_library, number, settings.job.local_rank);
  } catch (const Error& error) {
    if (number) throw Error(error.code(), "BPS_RDMA_NEAR_GPU=" + wish + ": " + error.what(), error.hint());
    log_info(std::string("RDMA devices are chosen without regard to a GPU: ") + error.what());
    return "";
  }
}

}  // namespace

transport::rdma::RdmaOptions rdma_options(const Settings& settings, bool may_choose) {
  auto options = transport::rdma::RdmaOptions::from(settings.rdma);
  if (may_choose && !options.hca.names_ports()) options.near_gpu = gpu_of(settings);
  return options;
}

}  // namespace bps::node
