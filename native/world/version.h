// The version, for build_info and for the comparison of ranks. setup.py passes it from ringtrain/version.py.
#ifndef RINGTRAIN_WORLD_VERSION_H_
#define RINGTRAIN_WORLD_VERSION_H_

#ifndef RT_VERSION
#define RT_VERSION "development"
#endif

namespace ringtrain {
constexpr const char* kVersion = RT_VERSION;
}  // namespace ringtrain
#endif  // RINGTRAIN_WORLD_VERSION_H_
