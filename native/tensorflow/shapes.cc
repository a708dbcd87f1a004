#include "tensorflow/shapes.h"

#include "tensorflow/step_row.h"

namespace ringtrain::tensorflow {
namespace {

// The shape of an input with an unknown first dimension; an unknown shape stays unknown.
void WithUnknownRows(TF_ShapeInferenceContext* context, const ShapePointer& shape, const StatusPointer& status) {
  if (!tf().TF_ShapeInferenceContextRankKnown(context, shape.get())) return;
  const int64_t rank = tf().TF_ShapeInferenceContextRank(context, shape.get());
  if (rank < 1) return;  // refused when it is submitted, in words that the peers see too
  ShapePointer rows(tf().TF_ShapeInferenceContextVectorFromSize(context, static_cast<size_t>(-1)));
  ShapePointer others(tf().TF_NewShapeHandle());
  tf().TF_ShapeInferenceContextSubshape(context, shape.get(), 1, rank, others.get(), status.get());
  if (Ok(status))
    tf().TF_ShapeInferenceContextConcatenateShapes(context, rows.get(), others.get(), shape.get(), status.get());
}

// Output i follows input i. The gates have no outputs: TensorFlow says so, and that ends the loop.
template <bool kKeepsRows>
void InferFromInputs(TF_ShapeInferenceContext* context, TF_Status*) {
  const int64_t inputs = tf().TF_ShapeInferenceContextNumInputs(context);
  StatusPointer status = NewStatus();
  for (int index = 0; index < inputs && Ok(status); ++index) {
    ShapePointer shape(tf().TF_NewShapeHandle());
    tf().TF_ShapeInferenceContextGetInput(context, index, shape.get(), status.get());
    if (Ok(status) && !kKeepsRows) WithUnknownRows(context, shape, status);
    if (Ok(status)) tf().TF_ShapeInferenceContextSetOutput(context, index, shape.get(), status.get());
  }
}

void InferAlltoall(TF_ShapeInferenceContext* context, TF_Status* status) {
  InferFromInputs<false>(context, status);
  ShapePointer received(tf().TF_ShapeInferenceContextVectorFromSize(context, static_cast<size_t>(-1)));
  tf().TF_ShapeInferenceContextSetOutput(context, 1, received.get(), status);
}

void InferScalar(TF_ShapeInferenceContext* context, TF_Status* status) {
  ShapePointer scalar(tf().TF_ShapeInferenceContextScalar(context));
  tf().TF_ShapeInferenceContextSetOutput(context, 0, scalar.get(), status);
}

void InferStepRow(TF_ShapeInferenceContext* context, TF_Status* status) {
  ShapePointer row(tf().TF_ShapeInferenceContextVectorFromSize(context, kRow));
  tf().TF_ShapeInferenceContextSetOutput(context, 0, row.get(), status);
}

void InferNothing(TF_ShapeInferenceContext*, TF_Status*) {}

}  // namespace

ShapeInference InferenceFor(Shapes shapes) {
  switch (shapes) {
    case Shapes::kSame:
      return &InferFromInputs<true>;
    case Shapes::kRows:
      return &InferFromInputs<false>;
    case Shapes::kAlltoall:
      return &InferAlltoall;
    case Shapes::kScalar:
      return &InferScalar;
    case Shapes::kStepRow:
      return &InferStepRow;
    default:
      return &InferNothing;
  }
}

}  // namespace ringtrain::tensorflow
