#pragma once

#include <string_view>

namespace moolink {

// Whether the bytes are well-formed UTF-8 (RFC 3629: no surrogates, no overlong forms).
bool is_utf8(std::string_view bytes);

}  // namespace moolink
