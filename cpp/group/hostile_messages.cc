#include "group/hostile_messages.h"

#ifdef MOOLINK_CRASH_POINTS
#include "wire/hostile_number.h"

namespace moolink::group {

Message told(Message message) {
  if (auto* announce = std::get_if<Announce>(&message.body)) {
    wire::lie("announce.epoch", announce->epoch);
    wire::lie("announce.floor", announce->floor);
    if (announce->view) wire::lie("announce.view", announce->view->epoch);
  }
  if (auto* made = std::get_if<NewEpoch>(&message.body)) {
    wire::lie("view.epoch", made->view.epoch);
    // Replaces all members by this many copies of the first one.
    std::size_t twins = 0;
    wire::lie("view.twins", twins);
    if (twins > 0) made->view.members.assign(twins, made->view.members.front());
  }
  return message;
}

}  // namespace moolink::group
#endif
