// Numbers as text, with a point in every locale: records are JSON, and texts are compared between ranks.
#ifndef RINGTRAIN_BASE_DECIMAL_H_
#define RINGTRAIN_BASE_DECIMAL_H_

#include <string>

namespace ringtrain {

// As by printf with such a format of one double, such as "%.6f".
std::string Decimal(const char* format, double value);
// False unless all of the text is one finite number.
bool ReadDecimal(const std::string& text, double* value);

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_DECIMAL_H_
