#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "rpc/actions.h"
#include "rpc/authenticator.h"
#include "rpc/timers.h"

namespace moolink::rpc {

// What all components of a Node use: who this peer is, where their actions and timers go, and
// whether it closes. The Node owns the one object, makes it first and outlives with it every
// component, which hold a reference. Only the Node drains the actions, takes timers out and sets
// `closing`.
struct Shared {
  Config config;
  const Authenticator& authenticator;
  std::vector<std::string> addresses = {};  // where this peer can be dialled
  std::vector<Action> actions = {};         // in the order in which they are carried out
  TimerQueue timers = {};
  bool closing = false;  // close() was called: nothing new begins

  template <class Any>
  void post(Any&& action) {
    actions.push_back(std::forward<Any>(action));
  }
  void log(LogLevel level, std::string text) { actions.push_back(Log{level, std::move(text)}); }
};

}  // namespace moolink::rpc
