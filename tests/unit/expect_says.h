// Expects a message to contain a part.
#pragma once

#include <gtest/gtest.h>

#include <string>

namespace moe_a2a {

inline void expect_says(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

}  // namespace moe_a2a
