// Compares our hand-written declarations of other libraries' functions with those of their headers, while compiling.
#ifndef RINGTRAIN_TESTS_NATIVE_SIGNATURES_H_
#define RINGTRAIN_TESTS_NATIVE_SIGNATURES_H_

#include <type_traits>

template <typename T>
constexpr int kPointers = 0;  // levels of them: 2 for char**
template <typename T>
constexpr int kPointers<T*> = 1 + kPointers<std::remove_cv_t<T>>;

// Two types are passed alike if they are of one size, as many pointers deep, and both structures or both floats or
// neither.
template <typename A, typename B>
constexpr bool kAlike =
    sizeof(A) == sizeof(B) && kPointers<A> == kPointers<B> && std::is_class_v<A> == std::is_class_v<B> &&
    std::is_floating_point_v<A> == std::is_floating_point_v<B>;

template <typename Result, typename... A, typename Expected, typename... B>
constexpr bool SameSignature(Result (*)(A...), Expected (*)(B...)) {
  if constexpr (sizeof...(A) == sizeof...(B))
    return kAlike<Result, Expected> && (kAlike<A, B> && ...);
  else
    return false;
}

#endif  // RINGTRAIN_TESTS_NATIVE_SIGNATURES_H_
