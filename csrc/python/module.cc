// SPDX-License-Identifier: Apache-2.0
// The native module takes bind.cc, and what that needs, from a library by this reference: so ninja, which starts with
// what most steps follow, compiles the bindings first, and not as the last file while a processor idles.
extern "C" void* PyInit__core();

[[gnu::used]] static void* (*const init)() = &PyInit__core;
