# SPDX-License-Identifier: Apache-2.0
# Symbols are hidden so that two native libraries in one process never meet.
# No -march=native and no -Ofast: one build serves every machine of its architecture, and IEEE rules hold.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

add_library(bps_flags INTERFACE)
target_compile_features(bps_flags INTERFACE cxx_std_20)
target_compile_options(bps_flags INTERFACE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion)
if(BPS_STRICT)
  target_compile_options(bps_flags INTERFACE -Werror)
endif()
# Encoded bytes are the same on every machine: a product and a sum are never fused where the processor could. Nobody reads
# the processor's exception flags, and loops with selections vectorise when gcc knows that.
target_compile_options(bps_flags INTERFACE -ffp-contract=off -fno-trapping-math)
# -g1: functions and lines are what a report shows, and a tenth of the compiler's time less than -g.
if(BPS_SANITIZE STREQUAL "address")
  set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
elseif(BPS_SANITIZE STREQUAL "thread")
  # Fences only order atomics here (the sleeping flags of rings), so that the checker loses nothing by not knowing them.
  set(sanitizers -fsanitize=thread -fno-omit-frame-pointer -g1 -Wno-tsan)
elseif(BPS_SANITIZE)
  message(FATAL_ERROR "BPS_SANITIZE is address, thread or empty, not '${BPS_SANITIZE}'")
endif()
# The compiler tidies its memory up less often, which is a tenth of its time.
target_compile_options(bps_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=524288>)
target_compile_options(bps_flags INTERFACE ${sanitizers})
target_link_options(bps_flags INTERFACE ${sanitizers})
