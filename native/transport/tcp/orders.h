// Orders: what other threads ask of whoever moves bytes next (connections.h).
#ifndef RINGTRAIN_TRANSPORT_TCP_ORDERS_H_
#define RINGTRAIN_TRANSPORT_TCP_ORDERS_H_

#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "transport/tcp/plan.h"
#include "transport/tcp/exchange.h"

namespace ringtrain {

struct Order {
  enum Kind { kFrame, kMessage, kConnection, kUnreachable } kind;
  int peer = 0;
  std::string text;  // frame, or cause
  Message* message = nullptr;
  Connection connection;
};

class Orders {
 public:
  void Give(Order order) {
    MutexLock lock(mutex_);
    orders_.push_back(std::move(order));
  }
  std::vector<Order> TakeAll() {
    MutexLock lock(mutex_);
    return std::exchange(orders_, {});
  }

 private:
  Mutex mutex_;
  std::vector<Order> orders_ RT_GUARDED_BY(mutex_);
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_ORDERS_H_
