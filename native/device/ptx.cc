#include "device/ptx.h"

// The assembler takes a file of native/ in as it is and puts a 0 behind it. Compilers do not list such files among what
// an object depends on, so ringtrain/_binding/_build.py finds their names in this source. It compiles it without LTO,
// which would leave the assembling to the linker, and that knows no folders to look in.
// clang-format off
#define RT_TEXT(symbol, file)                                                              \
  extern "C" { __attribute__((visibility("hidden"))) extern const char symbol[]; }         \
  asm(".pushsection .rodata,\"a\",%progbits\n"                                             \
      ".global " #symbol "\n"                                                              \
      ".hidden " #symbol "\n"                                                              \
      ".type " #symbol ", %object\n"                                                       \
      #symbol ":\n"                                                                        \
      ".incbin \"" file "\"\n"                                                             \
      ".byte 0\n"                                                                          \
      ".size " #symbol ", . - " #symbol "\n"                                               \
      ".popsection")
// clang-format on

RT_TEXT(rt_pack_sm75, "device/pack_sm75.ptx");
RT_TEXT(rt_pack_sm80, "device/pack_sm80.ptx");
RT_TEXT(rt_sum_sm75, "device/sum_sm75.ptx");
RT_TEXT(rt_sum_sm80, "device/sum_sm80.ptx");

namespace ringtrain {

const Ptx kPackPtx = {rt_pack_sm75, rt_pack_sm80};
const Ptx kSumPtx = {rt_sum_sm75, rt_sum_sm80};

}  // namespace ringtrain
