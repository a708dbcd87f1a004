// The C ABI of collectives/residuals.h.
#include <string>

#include "c_api/context.h"
#include "c_api/translate.h"
#include "include/ringtrain.h"

using ringtrain::TextBy;
using ringtrain::TextOf;

namespace {

ringtrain::Residual& ResidualOf(rt_context* context, int32_t process_set, const char* name, int32_t place,
                                int64_t elements) {
  return *context->context->residuals().Of(process_set, TextOf(name), static_cast<size_t>(place),
                                           static_cast<size_t>(elements));
}

}  // namespace

int32_t rt_residuals_keep(rt_context* context, int32_t process_set, const char* prefix) {
  return Done([&] { context->context->residuals().Keep(process_set, TextOf(prefix)); });
}

int32_t rt_residuals_take_back(rt_context* context, int32_t process_set, const char* prefix, int64_t after) {
  return Done([&] { context->context->residuals().TakeBack(process_set, TextOf(prefix), after); });
}

int64_t rt_residuals_turns(rt_context* context) { return context->context->residuals().turns(); }

int32_t rt_residuals_inherit(rt_context* context, rt_context* former) {
  return Done([&] { context->context->residuals().Inherit(former->context->residuals()); });
}

char* rt_residuals(rt_context* context, int32_t process_set, const char* prefix) {
  return TextBy([&] {
    std::string text;
    context->context->residuals().ForEach(process_set, TextOf(prefix), [&](const auto& key, const auto& residual) {
      const auto& [set, operation, place] = key;
      if (operation.find('\n') == std::string::npos)
        text += std::to_string(residual.elements()) + "|" + std::to_string(place) + "|" + operation + "\n";
    });
    return text;
  });
}

int32_t rt_residual_save(rt_context* context, int32_t process_set, const char* name, int32_t place, int64_t elements,
                         float* sent, float* finished) {
  return Or<int32_t>(
      -1, [&] { return ResidualOf(context, process_set, name, place, elements).Save(sent, finished) ? 1 : 0; });
}

int32_t rt_residual_load(rt_context* context, int32_t process_set, const char* name, int32_t place, int64_t elements,
                         const float* sent, const float* finished) {
  return Done([&] { ResidualOf(context, process_set, name, place, elements).Load(sent, finished); });
}
