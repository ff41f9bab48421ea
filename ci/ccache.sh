# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# To be sourced: compiled files are kept between checkouts, whichever folder they are in, where there is a ccache. Nothing
# depends on it.
if command -v ccache > /dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD} CCACHE_NOHASHDIR=1
  export CCACHE_SLOPPINESS=pch_defines,time_macros # otherwise nothing is kept that uses precompiled headers
fi
