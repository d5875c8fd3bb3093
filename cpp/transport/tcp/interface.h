#pragma once

#include <netinet/in.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/tcp/address.h"

namespace moolink::transport::tcp {

// The addresses of this host that a listener on every interface binds and announces: names of
// interfaces and ranges of addresses, separated by commas ("eth0,10.0.0.0/8"). Loopback, announced
// only to this host, is always among them.
class InterfaceChoice {
 public:
  InterfaceChoice() = default;  // all
  // Throws Exception{invalid_argument} that names the entry it cannot read.
  explicit InterfaceChoice(std::string_view text);

  bool all() const { return names_.empty() && ranges_.empty(); }
  bool allows(std::string_view interface, const SocketAddress& address) const;
  const std::string& text() const { return text_; }

 private:
  struct Range {
    std::array<std::uint8_t, 16> network{};  // v4: mapped into v6
    int bits = 0;
  };

  static Range parse_range(std::string_view entry, std::size_t slash);

  std::string text_;
  std::vector<std::string> names_;
  std::vector<Range> ranges_;
};

// The addresses of this host's interfaces that are up, loopback first. Link-local v6 addresses are
// omitted: they are valid only together with an interface of the dialler. Throws Exception{error}
// if the choice leaves nothing but loopback.
std::vector<SocketAddress> interface_addresses(const InterfaceChoice& choice);

}  // namespace moolink::transport::tcp
