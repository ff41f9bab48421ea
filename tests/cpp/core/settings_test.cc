// SPDX-License-Identifier: Apache-2.0
#include "core/settings.h"

#include <gtest/gtest.h>

#include "core/clock.h"
#include "core/error.h"
#include "core/unknown_settings.h"

namespace bps {
namespace {

SettingValues with(std::map<std::string, std::string> variables) {
  return SettingValues([variables](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional<std::string>(found->second);
  });
}

TEST(Settings, OwnNameThenAliasThenDefault) {
  EXPECT_EQ(with({}).parse().worker.partition_bytes, 512U << 10);
  EXPECT_EQ(with({}).value("BPS_PARTITION_BYTES").source, "default");
  EXPECT_EQ(with({{"BYTEPS_PARTITION_BYTES", "16"}}).value("BPS_PARTITION_BYTES").source, "BYTEPS_PARTITION_BYTES");
  const SettingValues both = with({{"BYTEPS_PARTITION_BYTES", "16"}, {"BPS_PARTITION_BYTES", "24"}});
  EXPECT_EQ(both.parse().worker.partition_bytes, 24U);
  const SettingValues chain = with({{"NCCL_SOCKET_IFNAME", "last"}, {"DMLC_INTERFACE", "first"}});
  EXPECT_EQ(chain.parse().transport.interface, "first");
}

TEST(Settings, AnEmptyVariableIsUnset) {
  EXPECT_EQ(with({{"BPS_TRANSPORT", ""}}).value("BPS_TRANSPORT").source, "default");
}

TEST(Settings, ArgumentsWin) {
  SettingValues values = with({{"BPS_TRANSPORT", "shm"}});
  values.set("BPS_TRANSPORT", "tcp", "argument");
  EXPECT_EQ(values.parse().transport.allowed, "tcp");
}

TEST(Settings, ValuesOfEachKindReachTheirMembers) {
  const Settings settings = with({{"BPS_ROLE", "server"},
                                  {"BPS_RANK", "3"},
                                  {"BPS_SHM_CMA", "off"},
                                  {"BPS_TIMEOUT", "2.5"},
                                  {"BPS_LOG_LEVEL", "debug"},
                                  {"NCCL_IB_TC", "106"},
                                  {"BPS_TRANSPORT", "shm,tcp"},
                                  {"BPS_SPIN_US", "7"}})
                                .parse();
  EXPECT_EQ(settings.job.role, "server");
  EXPECT_EQ(settings.job.rank, 3U);
  EXPECT_EQ(settings.job.world_size, std::nullopt);
  EXPECT_FALSE(settings.transport.shm_cma);
  EXPECT_EQ(settings.deadlines.operation, 2.5);
  EXPECT_EQ(settings.log_level, LogLevel::kDebug);
  EXPECT_EQ(with({{"BPS_LOG_LEVEL", "warn"}}).parse().log_level, LogLevel::kWarning) << "as NCCL has it";
  EXPECT_EQ(settings.rdma.traffic_class, 106U);
  EXPECT_EQ(settings.rdma.service_level, std::nullopt) << "-1 stands for the system's";
  EXPECT_EQ(settings.transport.allowed, "shm,tcp");
  EXPECT_EQ(settings.transport.spin_us, 7U);
}

TEST(Settings, ARangeOfPortsHasTwoEnds) {
  EXPECT_EQ(with({}).parse().transport.ports, PortRange());
  EXPECT_EQ(with({{"BPS_PORTS", "40000-40100"}}).parse().transport.ports, (PortRange{40000, 40100}));
  EXPECT_EQ(with({{"BPS_PORTS", "7-7"}}).parse().transport.ports, (PortRange{7, 7}));
  for (const char* bad : {"40000", "40100-40000", "0-10", "1-65536", "1-2-3", "a-b", "1 - 2", "-5"}) {
    EXPECT_THROW(with({{"BPS_PORTS", bad}}).parse(), Error) << bad;
  }
}

TEST(Settings, AnInfiniteTimeSetsNoLimit) {
  for (const char* text : {"inf", "1e10"}) {
    const double seconds = with({{"BPS_TIMEOUT", text}}).parse().deadlines.operation;
    EXPECT_EQ(Deadline::after(seconds).at(), Deadline::never().at()) << text;
  }
}

// Each bad value is refused by an error that names the variable it came from, the value and the range.
TEST(Settings, ABadValueNamesVariableValueAndRange) {
  const std::vector<std::array<std::string, 3>> bad = {
      {"BYTEPS_PUSH_THREAD", "12x", "0 to 64"},
      {"BYTEPS_PUSH_THREAD", "-1", "0 to 64"},
      {"BYTEPS_PUSH_THREAD", "1e3", "0 to 64"},
      {"BYTEPS_PUSH_THREAD", " 5", "0 to 64"},
      {"BYTEPS_PUSH_THREAD", "99999999999999999999", "0 to 64"},
      {"BYTEPS_PUSH_THREAD", "65", "0 to 64"},
      {"NCCL_IB_SL", "16", "-1 to 15"},
      {"BPS_TIMEOUT", "0", "seconds above 0"},
      {"BPS_TIMEOUT", "nan", "seconds above 0"},
      {"BPS_TIMEOUT", "abc", "seconds above 0"},
      {"BPS_SHM_CMA", "maybe", "1 or 0"},
      {"DMLC_ROLE", "boss", "worker, server, scheduler, joint"},
      {"BPS_TRANSPORT", "carrier-pigeon", "shm, tcp, rdma"},
      {"BPS_TRANSPORT", "shm,", "shm, tcp, rdma"},
      {"BPS_TRANSPORT", "auto,tcp", "shm, tcp, rdma"},
      {"BPS_KEY_HASH_FN", "md5", "djb2"},
      {"BYTEPS_LOG_LEVEL", "LOUD", "WARNING"},
  };
  for (const auto& [variable, value, range] : bad) {
    try {
      (void)with({{variable, value}}).parse();
      FAIL() << variable << "=" << value;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(variable + "='" + value + "'"), std::string::npos) << error.what();
      EXPECT_NE(error.hint().find(range), std::string::npos) << error.hint();
    }
  }
}

TEST(Settings, EveryRowIsExplainedAndItsDefaultIsInRange) {
  EXPECT_NO_THROW((void)with({}).parse());
  for (const Setting& setting : settings_table()) {
    EXPECT_TRUE(setting.name.starts_with("BPS_")) << setting.name;
    EXPECT_GT(setting.help.size(), 10U) << setting.name;
    EXPECT_EQ(find_setting(setting.name), &setting) << setting.name << " is there twice";
    EXPECT_EQ(setting.secret, setting.name == "BPS_SECRET");
  }
}

TEST(Settings, AnUnknownNameIsToldTheNearestOne) {
  SettingValues values = with({});
  const auto message = [&](const char* name) {
    try {
      values.set(name, "1", "argument");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(message("BPS_TIMEOOT").find("did you mean BPS_TIMEOUT?"), std::string::npos);
  EXPECT_EQ(message("BPS_NO_SUCH").find("did you mean"), std::string::npos);
  EXPECT_NE(message("BPS_HEARTBEAT_INTERVAL").find("was removed"), std::string::npos);
}

TEST(UnknownSettings, MisspeltOnesAreWarnedOfAndIgnoredOnesExplained) {
  const std::vector<std::string> variables = {
      "BPS_PARTITON_BYTES=1",      // misspelt
      "BYTEPS_TRANSPORT=tcp",      // the wrong prefix
      "BPS_XYZZY=1",               // like nothing
      "BPS_HEARTBEAT_INTERVAL=1",  // removed
      "BYTEPS_NUMA_ON=1",          // harmless
      "DMLC_ENABLE_UCX=1",         // changes what is computed
      "BYTEPS_PUSH_THREAD=2",      // known
      "DMLC_ROLE=worker",          // known
      "BPS_TEST_FOLDER=/tmp",      // our own
      "BPS_UNKNOWN=",              // empty: unset
      "PATH=/bin",                 // not ours
  };
  const std::vector<SettingNote> notes = check_variables(variables);
  std::map<std::string, std::pair<std::string, bool>> found;
  for (const SettingNote& note : notes) found[note.variable] = {note.text, note.warning};
  ASSERT_EQ(found.size(), 6U);
  const auto says = [&](const std::string& variable, const std::string& text, bool warning) {
    EXPECT_NE(found[variable].first.find(text), std::string::npos) << found[variable].first;
    EXPECT_EQ(found[variable].second, warning) << variable;
  };
  says("BPS_PARTITON_BYTES", "did you mean BPS_PARTITION_BYTES?", true);
  says("BYTEPS_TRANSPORT", "did you mean BPS_TRANSPORT?", true);
  says("BPS_XYZZY", "is not a setting and has no effect", true);
  says("BPS_HEARTBEAT_INTERVAL", "was removed", true);
  says("BYTEPS_NUMA_ON", "has no effect here: threads are not pinned", false);
  says("DMLC_ENABLE_UCX", "there is no UCX transport", true);
  EXPECT_EQ(found["BPS_XYZZY"].first.find("did you mean"), std::string::npos);
}

}  // namespace
}  // namespace bps
