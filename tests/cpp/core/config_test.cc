#include "core/config.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace bps {
namespace {

Config with(std::map<std::string, std::string> variables) {
  return Config([variables](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional<std::string>(found->second);
  });
}

TEST(Config, OwnNameThenAliasThenDefault) {
  EXPECT_EQ(with({}).text("BPS_PARTITION_BYTES"), "524288");
  EXPECT_EQ(with({}).value("BPS_PARTITION_BYTES").source, "default");
  EXPECT_EQ(with({{"BYTEPS_PARTITION_BYTES", "7"}}).value("BPS_PARTITION_BYTES").source, "BYTEPS_PARTITION_BYTES");
  const Config both = with({{"BYTEPS_PARTITION_BYTES", "7"}, {"BPS_PARTITION_BYTES", "9"}});
  EXPECT_EQ(both.integer("BPS_PARTITION_BYTES", 1, 100), 9);
}

TEST(Config, AnEmptyVariableIsUnset) {
  EXPECT_EQ(with({{"BPS_TRANSPORT", ""}}).value("BPS_TRANSPORT").source, "default");
}

TEST(Config, ArgumentsWin) {
  Config config = with({{"BPS_TRANSPORT", "shm"}});
  config.set("BPS_TRANSPORT", "tcp", "argument");
  EXPECT_EQ(config.text("BPS_TRANSPORT"), "tcp");
  EXPECT_THROW(config.set("BPS_NO_SUCH", "1", "argument"), Error);
}

TEST(Config, NonsenseNamesTheVariableItCameFrom) {
  for (const char* value : {"12x", "-1", "1e3", " 5", "99999999999999999999", "101"}) {
    try {
      with({{"BYTEPS_PUSH_THREAD", value}}).integer("BPS_PUSH_THREAD", 1, 100);
      FAIL() << value;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("BYTEPS_PUSH_THREAD"), std::string::npos);
      EXPECT_NE(error.hint().find("1 to 100"), std::string::npos);
    }
  }
  EXPECT_THROW(with({{"BPS_TIMEOUT", "0"}}).seconds("BPS_TIMEOUT"), Error);
  EXPECT_THROW(with({{"BPS_TIMEOUT", "nan"}}).seconds("BPS_TIMEOUT"), Error);
  EXPECT_THROW(with({{"BPS_SHM_CMA", "maybe"}}).flag("BPS_SHM_CMA"), Error);
  EXPECT_FALSE(with({{"BPS_SHM_CMA", "off"}}).flag("BPS_SHM_CMA"));
}

TEST(Config, EverySettingIsExplained) {
  for (const Setting& setting : Config::table()) {
    EXPECT_TRUE(setting.name.starts_with("BPS_")) << setting.name;
    EXPECT_GT(setting.help.size(), 10U) << setting.name;
  }
}

}  // namespace
}  // namespace bps
