// SPDX-License-Identifier: Apache-2.0
// The native module takes bind.cc, and what that needs, from a library by this reference. The bindings take longest to
// compile, and ninja starts with what most steps follow: without the library they would be the last of all.
extern "C" void* PyInit__core();  // NOLINT(bugprone-reserved-identifier): Python asks for this name

[[gnu::used]] static void* (*const init)() = &PyInit__core;
