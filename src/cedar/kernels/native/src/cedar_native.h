// What every kernel file shares: instruction-set variants and how a call picks one.
//
// A kernel file is compiled once per variant, with the flags of that variant and
// -DCEDAR_ISA=<name>; everything in it lives in `namespace cedar::CEDAR_ISA`, so the copies do not
// collide. The exported entry point is compiled once (dispatch.cpp) and forwards to a copy:
//
//     CEDAR_VARIANTS(int, rms_norm, (const float* x, ...))           declares the copies
//     extern "C" int cedar_rms_norm(const float* x, ...) { CEDAR_CALL(rms_norm, (x, ...)); }
//
// Rules for kernel files, because the linker keeps one copy of equal inline functions, maybe the
// one with the wrong instructions: templates of the standard library only on types of the variant's
// own namespace, or ones that are always inlined (std::min, std::max). No exceptions.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#define CEDAR_X86 1
#endif

namespace cedar {

enum class Isa : int { scalar = 0, avx2 = 1, avx512 = 2, amx = 3 };

// The variant that calls use now: the best one this machine has, or the one forced.
Isa active_isa();

}  // namespace cedar

#ifdef CEDAR_X86
// Declares `name` in the three variants every kernel has.
#define CEDAR_VARIANTS(result, name, parameters)                   \
  namespace cedar {                                                \
  namespace scalar { result name parameters; }                     \
  namespace avx2 { result name parameters; }                       \
  namespace avx512 { result name parameters; }                     \
  }
// Kernels that also have a variant for matrix tiles.
#define CEDAR_VARIANTS_AMX(result, name, parameters) \
  CEDAR_VARIANTS(result, name, parameters)           \
  namespace cedar { namespace amx { result name parameters; } }
#define CEDAR_CALL(name, arguments)                                                          \
  switch (cedar::active_isa()) {                                                             \
    case cedar::Isa::scalar: return cedar::scalar::name arguments;                           \
    case cedar::Isa::avx2: return cedar::avx2::name arguments;                               \
    default: return cedar::avx512::name arguments;                                           \
  }
#define CEDAR_CALL_AMX(name, arguments)                                                      \
  if (cedar::active_isa() == cedar::Isa::amx) return cedar::amx::name arguments;             \
  CEDAR_CALL(name, arguments)
#else
#define CEDAR_VARIANTS(result, name, parameters) \
  namespace cedar { namespace scalar { result name parameters; } }
#define CEDAR_VARIANTS_AMX(result, name, parameters) CEDAR_VARIANTS(result, name, parameters)
#define CEDAR_CALL(name, arguments) return cedar::scalar::name arguments
#define CEDAR_CALL_AMX(name, arguments) return cedar::scalar::name arguments
#endif

#define CEDAR_API extern "C" __attribute__((visibility("default")))

CEDAR_API int cedar_set_isa(const char* name);  // "scalar", "avx2", "avx512", "amx", "auto"; 0 or -1
CEDAR_API const char* cedar_isa();              // name of the variant in use
