// SPDX-License-Identifier: Apache-2.0
#include "core/exposition.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "core/counter_families.h"
#include "core/metrics.h"

namespace bps {
namespace {

using Type = MetricFamily::Type;

TEST(Exposition, WritesFamiliesAsPrometheusReadsThem) {
  MetricFamilies families;
  families.push_back({Type::kCounter, "bps_x_total", "What x is."});
  families.back().add(3).add(0.5, {{"plane", "data"}, {"rank", "1"}});
  families.push_back({Type::kGauge, "bps_y", "And y."});
  families.back().add(std::numeric_limits<double>::infinity());
  EXPECT_EQ(to_text(families),
            "# HELP bps_x_total What x is.\n"
            "# TYPE bps_x_total counter\n"
            "bps_x_total 3\n"
            "bps_x_total{plane=\"data\",rank=\"1\"} 0.5\n"
            "# HELP bps_y And y.\n"
            "# TYPE bps_y gauge\n"
            "bps_y +Inf\n");
}

TEST(Exposition, EscapesWhatWouldEndALineOrAValue) {
  MetricFamilies families{{Type::kGauge, "y", "a\\b\nc\"d"}};
  families.back().add(1, {{"of", "a\\b\nc\"d"}});
  EXPECT_EQ(to_text(families), "# HELP y a\\\\b\\nc\"d\n# TYPE y gauge\ny{of=\"a\\\\b\\nc\\\"d\"} 1\n");
}

TEST(Exposition, LeavesOutFamiliesWithoutSamples) {
  EXPECT_EQ(to_text({{Type::kGauge, "y", "And y."}}), "");
}

TEST(Exposition, DescribesAFamilyOnce) {
  MetricFamilies families{{Type::kGauge, "y", "And y."}, {Type::kGauge, "z", "Z."}, {Type::kGauge, "y", "And y."}};
  families[0].add(1, {{"role", "a"}});
  families[1].add(2);
  families[2].add(3, {{"role", "b"}});
  EXPECT_EQ(to_text(families),
            "# HELP y And y.\n# TYPE y gauge\ny{role=\"a\"} 1\ny{role=\"b\"} 3\n"
            "# HELP z Z.\n# TYPE z gauge\nz 2\n");
}

TEST(Exposition, LabelsOfTheProcessComeFirst) {
  MetricFamilies families{{Type::kGauge, "y", "And y."}};
  families.back().add(1, {{"peer", "server 0"}});
  label_all(families, {{"role", "worker"}});
  EXPECT_EQ(families.back().samples.back().labels, (Labels{{"role", "worker"}, {"peer", "server 0"}}));
}

TEST(CounterFamilies, EveryCounterHasAName) {
  const auto counters = Counters().list();
  std::size_t samples = 0;
  std::set<std::string> names;
  for (const MetricFamily& family : counter_families(counters)) {
    EXPECT_TRUE(family.name.starts_with("bps_") && family.name.ends_with("_total")) << family.name;
    EXPECT_FALSE(family.help.empty()) << family.name;
    EXPECT_TRUE(names.insert(family.name).second) << family.name << " is there twice";
    samples += family.samples.size();
  }
  EXPECT_EQ(samples, counters.size()) << "add the new counter to core/counter_families.cc";
}

}  // namespace
}  // namespace bps
