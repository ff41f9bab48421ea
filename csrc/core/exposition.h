// SPDX-License-Identifier: Apache-2.0
// Writes metrics for Prometheus: families of samples, and their text ("text exposition format", version 0.0.4).
//
// Names follow Prometheus' conventions: a prefix, base units (bytes, seconds) as a suffix, and `_total` at the end of
// what only grows. These are pure functions, which throw nothing and escape the values of labels.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bps {

using Labels = std::vector<std::pair<std::string, std::string>>;

struct MetricFamily {
  enum class Type : std::uint8_t { kCounter, kGauge, kHistogram };
  struct Sample {
    std::string suffix;  // that of a sample of a histogram: "_bucket", "_sum", "_count"; else ""
    Labels labels;
    double value = 0;
  };

  Type type;
  std::string name;  // the name of a counter includes its "_total"
  std::string help;
  std::vector<Sample> samples{};

  MetricFamily& add(double value, Labels labels = {}) {
    samples.push_back({"", std::move(labels), value});
    return *this;
  }
};

using MetricFamilies = std::vector<MetricFamily>;

std::string_view name_of(MetricFamily::Type type);
// Returns the shortest text that reads back as the same number, as samples and the bounds of buckets have it.
std::string to_text(double value);
// Puts these labels in front of those of each sample.
void label_all(MetricFamilies& families, const Labels& labels);
// Leaves families without samples out, and joins families of one name, so that each name is described once.
std::string to_text(const MetricFamilies& families);

}  // namespace bps
