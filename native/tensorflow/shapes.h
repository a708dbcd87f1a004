// What TensorFlow knows of an operation's results before it runs: their shapes, of those of its inputs.
#ifndef RINGTRAIN_TENSORFLOW_SHAPES_H_
#define RINGTRAIN_TENSORFLOW_SHAPES_H_

#include "tensorflow/kernel_api.h"

namespace ringtrain::tensorflow {

enum class Shapes { kSame, kRows, kAlltoall, kScalar, kStepRow, kNone };

using ShapeInference = void (*)(TF_ShapeInferenceContext*, TF_Status*);

ShapeInference InferenceFor(Shapes shapes);

}  // namespace ringtrain::tensorflow
#endif  // RINGTRAIN_TENSORFLOW_SHAPES_H_
