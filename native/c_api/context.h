// What an rt_context stands for.
#ifndef RINGTRAIN_C_API_CONTEXT_H_
#define RINGTRAIN_C_API_CONTEXT_H_

#include <memory>

#include "run/context.h"

struct rt_context {
  std::shared_ptr<ringtrain::Context> context;
};

#endif  // RINGTRAIN_C_API_CONTEXT_H_
